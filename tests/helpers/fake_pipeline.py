"""What a run makes of its options: wanrun in this process, without the models of pipeline and artifact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from helpers.manifests import with_model, with_profiles
from helpers.terminal import complaints
from wancli.console import run
from wancli.run import wanrun
from wanrun.artifact.manifest import Component, read_manifest
from wanrun.generation.result import Result
from wanrun.media.inputs import Inputs
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings

SIZE = (9, 64, 96, 3)
"""Shape (T, H, W, 3) of the frames that a ``Fake`` makes, those of the toy artifact's profile."""


class Run:
    """What a run in this process came to; not what it waited for."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out.splitlines(), complaints(err)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of its last line: videos that were made, were there and failed, and were not tried."""
        return tuple(map(int, re.findall(r"\d+", self.out[-1])))


def run_here(capsys: pytest.CaptureFixture[str], artifact: Path, *arguments: object) -> Run:
    """Runs wanrun here."""
    capsys.readouterr()
    code = run(wanrun, ["--artifact", str(artifact), *map(str, arguments)])
    return Run(code, *capsys.readouterr())


class Fake:
    """A pipeline that makes frames from the options alone, and can be told what happens with a prompt.

    Attributes:
        loads: the keywords of each call of ``wanrun.load``.
        asked: prompts, and what else was asked for, in order.
        generations: the options of each generation, with its inputs and latents.
        warn: receives the warnings of the generation that is going on.
        happens: what to call before the video of a prompt is made.
    """

    def __init__(self, num_videos: int) -> None:
        self.num_videos = num_videos
        self.loads: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.generations: list[dict[str, Any]] = []
        self.happens: dict[str, Callable[[], object]] = {}

    def load(self, artifact: Path, **arguments: Any) -> Fake:
        self.loads.append(arguments)
        return self

    def warmup(self, timings: Timings) -> None:
        self.asked.append("warmup")

    def run(
        self,
        generation: Generation,
        *,
        inputs: Inputs | None,
        latents: np.ndarray | None,
        timings: Timings,
        warn: Callable[[str], None],
        **others: object,
    ) -> Result:
        options = generation.options
        self.asked.append(options["prompt"])
        self.generations.append({**options, "inputs": inputs, "latents": latents})
        self.warn = warn
        self.happens.get(options["prompt"], lambda: None)()
        seed = options["seed"] if latents is None else int(abs(latents).sum())
        if inputs is not None:
            seed += sum(int(array.sum()) for array in inputs.arrays.values())
        texts = (options["prompt"], options["negative_prompt"] or "")
        random = np.random.default_rng([*texts[0].encode(), *texts[1].encode(), seed])
        frames = random.integers(0, 256, (self.num_videos, *SIZE), dtype=np.uint8)
        final = random.standard_normal((self.num_videos, 2), np.float32)
        return Result(frames, final, generation.metadata(inputs, {}), timings)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *error: object) -> None:
        self.asked.append("closed")


def write_lines(path: Path, *lines: Mapping[str, object] | str) -> Path:
    """Writes a prompts file."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def make_two_experts(
    artifact: Path, loop: Literal["both", "step", "scan"] = "both", max_steps: int = 60
) -> None:
    """Changes a manifest to one of two experts; there are no weights of the second, and no new programs.

    Args:
        artifact: its folder, with a manifest of its own.
        loop: forms of the denoising loop that every profile has, with and without guidance.
        max_steps: what the scan form is built for.
    """
    manifest = read_manifest(artifact)
    old = next(iter(manifest.profiles.values()))
    options = msgspec.structs.replace(old.options, loop=loop, max_steps=max_steps)
    profiles = [
        msgspec.structs.replace(old, guidance=guidance, index=index, options=options)
        for index, guidance in enumerate((True, False))
    ]
    one = manifest.components["transformer"]
    with_model(
        with_profiles(manifest, profiles),
        {"guidance_scale": 4.0},
        options={"guidance_scale_2": 3.0, "boundary": 0.875},
    ).changed(
        components={
            **manifest.components,
            "transformer_2": Component("weights/transformer_2", one.parameters),
        },
    ).write(artifact)
