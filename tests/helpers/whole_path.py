"""Whole generations by the command line, and what diffusers makes of the same: a row for each profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers.fake_pipeline import write_lines
from helpers.pictures import picture, pictures, write_folder
from helpers.reference_guidance import avoiding, combined_by, guided_between
from helpers.reference_models import relative_error
from wanbuild.check.reference import frames_check
from wanbuild.check.reference_pipeline import Made, Reference, open_media
from wanrun.artifact.guiders import OWN_OPTIONS
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.denoising.guided_steps import GUIDED
from wanrun.denoising.solvers import SOLVERS
from wanrun.media.inputs import Media
from wanrun.replay.samples import sample_mask

LATENTS = 1e-5  # the aim; seen: 1-3e-6, and the reference's own float32 noise against float64 is 1-2e-6
PROMPT = "a cat &amp; a dog,   in the  snow"
NEGATIVE = "ugly, blurry"
LOOPS = ("step", "scan")
WITH_REFERENCE = tuple(
    sorted(
        name
        for name, solver in SOLVERS.items()
        if not (solver.scales_start or solver.trained_levels or name == "self-forcing")
    )
)
"""The solvers that diffusers has too. rCM's two have no class there: their tables are those of euler and lcm,
and their noise is scaled. Nor has dmd, whose levels tests/runtime/denoising compares with a search through
all of them, nor self-forcing, whose published loop is written out there."""


def generate(reference: Reference, **options: Any) -> Made:
    """One generation of the reference from ``PROMPT`` and ``NEGATIVE``; options are those of its ``run``."""
    return reference.run(prompt=PROMPT, negative_prompt=NEGATIVE, **options)


def check(
    latents: np.ndarray,
    frames: np.ndarray,
    expected: Made,
    record: Callable[[str, object], None] = lambda name, value: None,
    video: int = 0,
) -> None:
    """Holds the latents of all videos, and the frames of one, against the reference's.

    The reference's latents have those of reference images in front.
    """
    assert latents.dtype == np.float32 and frames.dtype == np.uint8
    own = expected.latents[:, :, expected.latents.shape[2] - latents.shape[2] :]
    assert latents.shape == own.shape and frames.shape == expected.frames[video].shape
    error = relative_error(latents, own)
    beyond = frames_check("video", frames, expected.frames[video]).error
    record("latents_relative_error", error)
    print(f"latents {error:.1e}, {beyond:.2%} of uint8 off by more than a level", flush=True)
    assert error < LATENTS
    assert beyond <= 1e-3
    assert frames.std() > 20  # a constant video would agree with anything


@dataclass(frozen=True)
class Drawn:
    """A picture, or a video of so many frames or its mask, of a size that need not be the profile's."""

    width: int
    height: int
    seed: int = 0
    frames: int | None = None
    mask: bool = False

    def write(self, folder: Path) -> Path:
        """Writes it as one file, or as a folder of them, unless it is there."""
        number = "" if self.frames is None else f"-{self.frames}"
        kind = "mask" if self.mask else self.seed
        path = folder / f"{self.width}x{self.height}{number}-{kind}{'' if number else '.png'}"
        if not path.exists():
            if self.frames is None:
                picture(self.width, self.height, self.seed).save(path)
            elif self.mask:
                write_folder(sample_mask(self.width, self.height, self.frames), path)
            else:
                write_folder(pictures(self.frames, self.width, self.height, self.seed), path)
        return path


@dataclass(frozen=True)
class Case:
    """One generation.

    Attributes:
        steps: denoising steps.
        media: by the keys of a prompts file; a tuple has several.
        seed: of the noise.
        options: others, by the keys of a prompts file.
        calls: how often the reference calls each expert, with guidance twice a step; None: not counted.
        frames: those of the video, where a profile's are those of a window.
    """

    steps: int
    media: Mapping[str, Drawn | tuple[Drawn, ...]] = field(default_factory=dict)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[int, int] | None = None
    frames: int | None = None

    def files(self, folder: Path) -> dict[str, Path | tuple[Path, ...]]:
        """Its media, which are written into a folder."""
        return {
            name: tuple(one.write(folder) for one in value)
            if isinstance(value, tuple)
            else value.write(folder)
            for name, value in self.media.items()
        }

    def line(self, folder: Path) -> dict[str, Any]:
        """Its line of a prompts file."""
        media = {
            name: list(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in self.files(folder).items()
        }
        return {"prompt": PROMPT, "steps": self.steps, "seed": self.seed, **media, **self.options}


@dataclass(frozen=True)
class Row:
    """A profile of a toy, and the generations that are held against the reference.

    Attributes:
        toy: the name of its checkpoint and artifact, see ``toy_of``.
        cases: by name.
        size: width, height and frames.
        scale: the guidance scale of cases that have none.
        loops: the forms of the loop that are held against the reference.
        alike: whether all forms of the loop make the same bits.
        programs: how many a run with one form of the loop loads; None: not counted.
        process: run the command as a user does, in a process.
        thorough: left out by ``make test``.
    """

    toy: str
    cases: Mapping[str, Case]
    size: tuple[int, int, int] = (96, 64, 9)
    scale: float = 3.0
    loops: tuple[str, ...] = ("step",)
    alike: bool = False
    programs: int | None = None
    process: bool = False
    thorough: bool = False


class WholePath:
    """A row's artifact and the reference, which make the same cases.

    Args:
        row: the row.
        toy: the checkpoint and its artifact.
        commands: runs the command.
        folder: for what the command is given and writes.
    """

    def __init__(self, row: Row, toy: tuple[Path, Path], commands: Any, folder: Path) -> None:
        self.row, (checkpoint, self.artifact) = row, toy
        self._commands, self._folder = commands, folder
        self._size = dict(zip(("width", "height", "num_frames"), row.size, strict=True))
        self.reference = Reference(checkpoint, read_manifest(self.artifact).model.variant)
        self.timings: dict[str, Any] = {}
        self._made: dict[str, Made] = {}

    def line(self, name: str) -> dict[str, Any]:
        """A case's line of a prompts file."""
        return self.row.cases[name].line(self._folder)

    def ours(self, name: str, loop: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Latents and frames; all cases are made by one run of the command a form of the loop."""
        if loop not in self.timings:
            self._run(loop)
        cases = list(self.row.cases)
        index = str(cases.index(name) + 1).zfill(len(str(len(cases))))
        files = (self._folder / f"{loop}-{kind}-{index}.npy" for kind in ("latents", "video"))
        latents, frames = map(np.load, files)
        return latents, frames

    def _run(self, loop: str) -> None:
        cases = self.row.cases.values()
        references = next(iter(cases)).files(self._folder).get("reference_image", ())
        timing = self._folder / f"{loop}.json"
        lines = [case.line(self._folder) for case in cases]
        self._commands.succeeds(
            *("wanrun", "--artifact", self.artifact, "--negative-prompt", NEGATIVE, "--loop", loop),
            *("--prompts", write_lines(self._folder / "cases.jsonl", *lines)),
            *("--guidance-scale", self.row.scale, "--no-embedding-cache"),
            *(item for file in references for item in ("--reference-image", file)),
            *("--save-latents", self._folder / f"{loop}-latents-{{index}}.npy"),
            *("--output", self._folder / f"{loop}-video-{{index}}.npy", "--timing-json", timing),
        )
        self.timings[loop] = json.loads(timing.read_text())
        assert self.timings[loop]["cache_misses"] == 0

    def theirs(self, name: str) -> Made:
        """What the reference makes; computed once."""
        if name not in self._made:
            self._made[name] = self.run(self.row.cases[name])
        return self._made[name]

    def run(self, case: Case) -> Made:
        """The reference's run of a case."""
        given = {name: open_media(value) for name, value in case.files(self._folder).items()}
        own = {key: value for key, value in case.options.items() if key in ("mode", "segment_overlap")}
        options = {"guidance_scale": self.row.scale, **case.options}
        shares = [options.pop(name, default) for name, default in GUIDED.items()]
        guider, nag = options.pop("guider", None), options.pop("nag_scale", None)
        guiding, pipe = {**options}, self.reference.pipe
        options = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
        with ExitStack() as changed:
            if guider is not None:
                changed.enter_context(combined_by(pipe, guider, guiding))
            for expert in TRANSFORMERS if nag else ():
                negative = pipe._get_t5_prompt_embeds([NEGATIVE], max_sequence_length=512)
                changed.enter_context(
                    avoiding(getattr(pipe, expert), negative.detach().numpy(), (nag, 2.5, 0.25))
                )
            changed.enter_context(guided_between(pipe, *shares))
            return generate(
                self.reference,
                media=Media(**given, **own) if given else None,
                seed=case.seed,
                num_inference_steps=case.steps,
                **self._size,
                **{key: value for key, value in options.items() if key not in own},
            )

    def check(self, name: str, record: Callable[[str, object], None], loop: str = "step") -> None:
        """Holds a case against the reference, in results, in shapes, and in how often each expert ran."""
        latents, frames = self.ours(name, loop)
        case, made = self.row.cases[name], self.theirs(name)
        check(latents, frames, made, record)
        assert latents.shape[2] == (self.row.size[2] - 1) // 4 + 1  # without those of reference images
        assert len(frames) == (case.frames or self.row.size[2])
        if case.calls is not None:
            assert tuple(made.count(expert) for expert in TRANSFORMERS) == case.calls
        if self.row.programs is not None:
            assert self.timings[loop]["cache_hits"] == self.row.programs
