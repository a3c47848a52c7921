"""``python -m tinywan.learning.live FOLDER``: a causal tiny model, which makes video as long as one watches.

It begins with the tiny text to video's transformer and learns videos without end (``endless``), block after
block: at the four noise levels of Self-Forcing, each block after the clean ones before it. At the end it
rehearses: what it sees before a block, and what it has of it from the level before, it made itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import UMT5EncoderModel

from tinywan.captions import caption
from tinywan.checkpoint import FOLDER
from tinywan.endless import BLOCK
from tinywan.learning import export, stories
from tinywan.learning.causal import LEVELS, Forced
from tinywan.learning.course import Course, Plan
from tinywan.learning.stories import Stories
from tinywan.learning.text import Captions

SOURCE = FOLDER / "wan2.1-t2v"
BATCH = 3
PLAN = Plan("live", steps=1700, rate=1.5e-3, decay=0.1, memory=0.995)

AUGMENTED = 0.2
"""The most noise in clean blocks, as sigma: what a model made itself is not as clean as what was drawn."""

SAVED = 250
"""Steps between two states of the weights that are saved."""

REHEARSED = 0.3
"""The share of the steps, the last ones, in which it sees what it made itself."""


@dataclass(frozen=True)
class Lesson:
    """Blocks to learn from.

    Args:
        clean: float32 (B, K, 16, BLOCK, H, W), as they were drawn.
        before: likewise, those that the next ones see.
        known: likewise, those to which noise was added.
        level: int (B, K), which of ``LEVELS``.
        texts: float32 (B, C, TOKENS, width).
        turns: int (B, K), which of its video's texts a block has.
    """

    clean: Tensor
    before: Tensor
    known: Tensor
    level: Tensor
    texts: Tensor
    turns: Tensor

    def errors(self, velocity: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the error of the velocities, and the clean blocks that they lead to."""
        sigma = torch.tensor(LEVELS)[self.level]
        share = sigma.view(*sigma.shape, 1, 1, 1, 1)
        noise = torch.randn_like(self.clean)
        noisy = (1 - share) * self.known + share * noise
        haze = AUGMENTED * torch.rand(*sigma.shape, 1, 1, 1, 1)
        before = (1 - haze) * self.before + haze * torch.randn_like(self.clean)
        predicted = velocity(before[:, :-1], noisy, sigma, self.texts, self.turns)
        return mse_loss(predicted, (noisy - self.clean) / share), noisy - share * predicted


class Teacher:
    """Draws lessons.

    Args:
        bank: videos.
        captions: embeds texts.
        rng: the source of randomness, with torch's.
    """

    def __init__(self, bank: Stories, captions: Captions, rng: np.random.Generator) -> None:
        self._bank, self._captions, self._rng = bank, captions, rng

    def draw(self) -> Lesson:
        """Returns a lesson of ``BATCH`` videos as they were drawn."""
        chosen = self._rng.integers(0, len(self._bank.scenes), BATCH)
        clean = self._bank.latents[chosen].float().unflatten(2, (-1, BLOCK)).transpose(1, 2).contiguous()
        texts = [caption(scene, self._rng) for i in chosen for scene in self._bank.scenes[i]]
        with torch.no_grad():
            embedded = self._captions(texts).unflatten(0, (BATCH, -1))
        turns = torch.from_numpy(self._bank.turns[chosen])
        return Lesson(clean, clean, clean, _levels(turns), embedded, turns)

    def rehearse(self, lesson: Lesson, velocity: Callable[..., Tensor]) -> Lesson:
        """Returns the lesson after a lesson: the next level of every block, from what the model made of it.

        Half of what blocks see before them is what it made too.
        """
        made = lesson.errors(velocity)[1].detach()  # without gradients torch would compile it anew
        half = torch.rand(*made.shape[:2], 1, 1, 1, 1) < 0.5
        before = torch.where(half, made, lesson.clean)
        level = (lesson.level + 1) % len(LEVELS)
        return Lesson(lesson.clean, before, made, level, lesson.texts, lesson.turns)


def _levels(turns: Tensor) -> Tensor:
    """Draws the level of every block of a batch, each level as often as the others."""
    return torch.randperm(turns.numel()).view(turns.shape) % len(LEVELS)


def encoder() -> Captions:
    """Returns the text encoder of the tiny text to video, which learns no more."""
    model = UMT5EncoderModel.from_pretrained(SOURCE / "text_encoder", torch_dtype=torch.float32)
    return Captions(SOURCE / "tokenizer", model.requires_grad_(False))


def learn(bank: Stories, folder: Path, seed: int, plan: Plan, compiled: bool = True) -> None:
    """Trains the transformer, and saves the average of its weights as ``FOLDER/live`` now and then.

    Args:
        bank: videos.
        folder: of what is saved, and of the log of losses.
        seed: of everything that is drawn.
        plan: how long and how fast.
        compiled: whether torch compiles the transformer, which needs a C++ compiler.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = WanTransformer3DModel.from_pretrained(SOURCE / "transformer", torch_dtype=torch.float32)
    course = Course(model, plan, folder / "log.jsonl", rng)
    forced = Forced(model, bank.turns.shape[1], *bank.latents.shape[-2:])
    velocity = torch.compile(forced, dynamic=False) if compiled else forced
    teacher = Teacher(bank, encoder(), rng)
    for step in course.steps():
        lesson = teacher.draw()
        if step > (1 - REHEARSED) * plan.steps:
            lesson = teacher.rehearse(lesson, velocity)
        course.learn(step, lesson.errors(velocity)[0])
        if step % SAVED == 0 or step == plan.steps:
            course.average().save_pretrained(folder / "live")
    course.end()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--videos", default=800, show_default=True, help="To learn from.")
@click.option("--steps", default=PLAN.steps, show_default=True, help="Of training.")
@click.option("--seed", default=0, show_default=True)
@click.option("--checkpoint", "target", type=click.Path(path_type=Path), help="Write it here at the end.")
def main(folder: Path, videos: int, steps: int, seed: int, target: Path | None) -> None:
    """Trains the causal tiny model in FOLDER, which takes a core about 20 minutes."""
    torch.set_num_threads(1)  # two are hardly faster for so few tokens
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bank").exists():
        stories.make(SOURCE / "vae", seed + 100, videos).save(folder / "bank")
    learn(Stories.load(folder / "bank"), folder, seed, replace(PLAN, steps=steps))
    if target is not None:
        export.write_live(folder, target)


if __name__ == "__main__":
    main()
