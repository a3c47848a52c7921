"""The course of a training: what every step ends with, whatever is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tinywan.learning.log import Log
from tinywan.learning.optimizer import Optimizer
from tinywan.learning.state import State, Stateful


@dataclass(frozen=True)
class Plan:
    """How long and how fast is learned.

    Args:
        name: in the log.
        steps: their number.
        rate: the highest learning rate.
        decay: of matrices, by rate and step.
        memory: of the average of the weights: the share that it keeps in a step.
    """

    name: str
    steps: int
    rate: float
    decay: float = 0.0
    memory: float = 0.999


class Course:
    """A training: its optimizer, the average of its weights, its log and its last state.

    Args:
        module: what is trained; its weights are changed.
        plan: how.
        log_file: where losses are written; the state is next to it.
        rng: the steps' source of randomness, with torch's.
    """

    def __init__(self, module: nn.Module, plan: Plan, log_file: Path, rng: np.random.Generator) -> None:
        self._module, self._plan = module, plan
        self._average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(plan.memory))
        self._optimizer = Optimizer(module, plan.rate, plan.steps, plan.decay)
        self._log = Log(log_file, plan.name, plan.steps)
        parts: list[Stateful] = [module, self._average, self._optimizer]
        self._state = State(log_file.with_name(f"{plan.name}.state"), parts, rng)

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps, from 1; of an interrupted training, those after its last state."""
        return iter(range(self._state.resumed() + 1, self._plan.steps + 1))

    def learn(self, step: int, loss: Tensor, **noted: Tensor) -> None:
        """Ends a step.

        Args:
            step: its number.
            loss: scalar, whose gradients are followed.
            noted: what is written into the log; the loss if there is nothing else.
        """
        loss.backward()
        self._optimizer.step()
        self._average.update_parameters(self._module)
        self._log.step(step, **{name: value.item() for name, value in (noted or {"loss": loss}).items()})
        self._state.save(step)

    def average(self) -> Any:
        """Returns the module with the average of its weights."""
        return self._average.module

    def end(self) -> None:
        """Removes the last state: what was learned is saved."""
        self._state.remove()
