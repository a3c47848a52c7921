"""A step whose transformer passes through the device layer by layer: see ``wanrun.weights.layers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wanrun.artifact.guiders import SKIPPED_LAYERS
from wanrun.artifact.slots import LORA
from wanrun.denoising.state import State
from wanrun.weights.bound_programs import Programs
from wanrun.weights.layers import OUTSIDE, Layer
from wanrun.weights.loras import AppliedLora


class StreamedStep:
    """One expert's steps; called like a step's program.

    ``given`` are the inputs that all steps take, such as ``embeddings`` and conditions. ``constant`` has the
    same, and what is computed from them once.
    """

    def __init__(
        self, programs: Programs, expert: str, given: Mapping[str, Any], loras: Sequence[AppliedLora] = ()
    ) -> None:
        self._programs, self._stream = programs, programs.streamed(expert)
        self._layers, self._keys = (self._by_stack(role) for role in ("layer", "keys"))
        self._kv: dict[Layer, Any] = {}
        outside = programs.weights.opened.waits.result(self._stream.outside)
        self._expert, self._slots = expert, programs.slots(loras)
        given = {
            **given,
            OUTSIDE: self._slots.changed_part(expert, outside),
            LORA: self._slots.of_part(expert),
        }
        self.constant = {**self._run("context", given), **given}

    def _by_stack(self, role: str) -> dict[str, str]:
        """Returns the programs of a role by the stack that they take a layer of."""
        names = self._programs.with_role(role)
        return {
            stack: name
            for name in names
            for stack in self._programs[name].inputs
            if stack in self._stream.stacks
        }

    def _run(self, role: str, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        (name,) = self._programs.with_role(role)
        return self._call(name, arrays)

    def _call(self, name: str, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Runs a program with the arrays that it takes."""
        bound = self._programs.bound(name)
        return bound(**{key: arrays[key] for key in self._programs[name].inputs})

    def __call__(self, **given: Any) -> State:
        """Returns the state after a step; takes the state before it, and the step's inputs."""
        import jax

        try:
            arrays = {**self.constant, **given}
            arrays |= self._run("enter", arrays)
            for stack, number, weights in self._stream:
                place = stack, number
                layer: dict[str, Any] = {
                    stack: self._slots.changed_part(self._expert, weights, *place),
                    LORA: self._slots.of_part(self._expert, *place),
                }
                layer |= {"index": np.int32(number), "kv": self._kv_of(stack, number, layer)}
                if stack == self._stream.stacks[0] and SKIPPED_LAYERS in given:
                    kept = given[SKIPPED_LAYERS][number] == 0
                    layer["skip_scale"] = np.where(kept, given["skip_scale"], np.float32(0))
                arrays |= self._call(self._layers[stack], {**arrays, **layer})
                jax.block_until_ready(arrays["carry"])  # then the next layer may take this one's place
                del layer, weights
            return self._run("leave", arrays)
        except BaseException:
            self._programs.release()  # this one is in the middle of a pass
            raise

    def _kv_of(self, stack: str, number: int, layer: Mapping[str, Any]) -> Any:
        """Returns a layer's keys and values, which are computed of its weights before its first run."""
        if (stack, number) not in self._kv:
            found = self._call(self._keys[stack], {**self.constant, **layer})
            self._kv[stack, number] = found["kv"]
        return self._kv[stack, number]
