"""Video from images and videos through the command lines, and what diffusers makes of the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers.fake_pipeline import write_lines
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, NEGATIVE, PROMPT, generate, within_one_level
from wanbuild.check.reference_pipeline import Made, Reference, open_media
from wanrun.artifact.manifest import read_manifest
from wanrun.media.types import MEDIA_KINDS, Media

LOOPS = ("step", "scan")


@dataclass(frozen=True)
class Case:
    """One generation.

    Args:
        steps: denoising steps.
        media: by the keys of a prompts file: a file, a folder, or a tuple of files.
        seed: of the noise.
        options: others, by the keys of a prompts file.
        reference: arguments of the reference's pipeline that the options stand for.
    """

    steps: int
    media: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """Its line of a prompts file."""
        media = {
            name: [str(file) for file in value] if isinstance(value, tuple) else str(value)
            for name, value in self.media.items()
        }
        return {"prompt": PROMPT, "steps": self.steps, "seed": self.seed, **media, **self.options}


class MediaPath:
    """A toy's artifact and the reference, which make the same cases.

    Args:
        toy: the checkpoint and its artifact.
        commands: runs the command.
        folder: for what the command writes.
        cases: by name.
        size: width, height and frames.
        guidance: whether the profile has it.
    """

    def __init__(
        self,
        toy: tuple[Path, Path],
        commands: Any,
        folder: Path,
        cases: Mapping[str, Case],
        size: tuple[int, int, int] = (96, 64, 9),
        guidance: bool = True,
    ) -> None:
        checkpoint, self.artifact = toy
        self._commands, self._folder, self.cases = commands, folder, cases
        self._width, self._height, self._frames = size
        self._scale = 3.0 if guidance else 1.0
        self.reference = Reference(checkpoint, read_manifest(self.artifact).model.variant)
        self._ran: set[str] = set()
        self._made: dict[str, Made] = {}

    def ours(self, name: str, loop: str) -> tuple[np.ndarray, np.ndarray]:
        """Latents and frames; all cases are made by one run of the command a form of the loop."""
        if loop not in self._ran:
            self._run(loop)
            self._ran.add(loop)
        index = list(self.cases).index(name) + 1
        return self.latents(loop, index), np.load(self._folder / f"{loop}-video-{index}.npy")

    def forget(self) -> None:
        """Lets the reference make its cases anew; what the command made is kept."""
        self._made.clear()

    def latents(self, loop: str, index: int) -> np.ndarray:
        latents: np.ndarray = np.load(self._folder / f"{loop}-latents-{index}.npy")
        return latents

    def _run(self, loop: str) -> None:
        lines = [case.line() for case in self.cases.values()]
        references = next(iter(self.cases.values())).media.get("reference_image", ())
        timing = self._folder / f"{loop}.json"
        self._commands.succeeds(
            *("wanrun", "--artifact", self.artifact, "--negative-prompt", NEGATIVE, "--loop", loop),
            *(
                "--guidance-scale",
                self._scale,
                "--prompts",
                write_lines(self._folder / "cases.jsonl", *lines),
            ),
            *(item for file in references for item in ("--reference-image", file)),
            *("--save-latents", self._folder / f"{loop}-latents-{{index}}.npy"),
            *("--output", self._folder / f"{loop}-video-{{index}}.npy", "--timing-json", timing),
        )
        assert json.loads(timing.read_text())["cache_misses"] == 0

    def theirs(self, name: str) -> Made:
        """What the reference makes; computed once."""
        if name not in self._made:
            self._made[name] = self.run(self.cases[name])
        return self._made[name]

    def run(self, case: Case) -> Made:
        """The reference's run of a case."""
        given = {name: open_media(value) for name, value in case.media.items() if name in MEDIA_KINDS}
        settings = {key: value for key, value in case.options.items() if key in ("mode", "segment_overlap")}
        scheduler = {key: value for key, value in case.options.items() if key in ("solver", "flow_shift")}
        return generate(
            self.reference,
            media=Media(**given, **settings) if given else None,
            seed=case.seed,
            width=self._width,
            height=self._height,
            num_frames=self._frames,
            num_inference_steps=case.steps,
            guidance_scale=self._scale,
            **scheduler,
            **case.reference,
        )

    def check(self, name: str, record: Callable[[str, object], None]) -> None:
        """Holds a case of single steps against the reference; the loop computes the same bits."""
        expected = self.theirs(name)
        latents, frames = self.ours(name, "step")
        error = relative_error(latents, expected.latents)
        share = within_one_level(frames, expected.levels[0])
        record("latents_relative_error", error)
        print(f"{name}: latents {error:.1e}, {share:.2%} of uint8 within one level", flush=True)
        assert latents.dtype == np.float32 and frames.dtype == np.uint8
        assert error < LATENTS
        assert share >= 0.999
        assert frames.std() > 20  # a constant video would agree with anything
