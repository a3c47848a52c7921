"""The prompts of a calibration: some to choose steps by, and some that only judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from wanrun.errors import UsageError
from wanrun.request.prompts_file import Line, key_of, read_entries

PROMPTS = (
    "A cat walks on the grass, realistic",
    "A red fox runs through fresh snow at dawn",
    "Waves roll onto a black beach under a grey sky, slow motion",
    "A woman in a yellow raincoat crosses a busy street at night, neon lights in the puddles",
    "A hot air balloon rises over green hills, aerial view",
    "A chef slices vegetables on a wooden board, close up",
    "A steam train leaves an old station, people wave from the platform",
    "An astronaut drifts past a window of a space station, the earth turns below",
    "Two children fly a kite on a windy beach",
    "A glass of water falls from a table and breaks, slow motion",
    "An old man plays the violin in a candlelit room",
    "A school of silver fish turns in blue water, a shark swims by",
    "A watercolour painting of a village in the mountains, clouds move over the roofs",
    "A drummer plays a solo on a stage, coloured lights flash behind him",
    "A paper boat floats down a small stream in a forest",
    "A car drives along a coast road at sunset, seen from a drone",
    "A potter shapes a bowl on a wheel, wet clay on her hands",
    "A white horse gallops across a shallow river, water splashes",
    "A city street in the rain, time lapse from day to night",
    "A robot waters flowers on a balcony, cartoon style",
    "Northern lights move over a frozen lake, stars behind them",
)
"""The prompts where no file is given: long and short, slow and fast, of several styles."""

HELD_OUT_EVERY = 3
"""Every third prompt is held out: it judges, and no step is chosen by it."""

HELD_OUT_SEEDS = 2
"""Each held-out prompt is made with so many seeds."""

_DECIDED = (
    "num_steps",
    "flow_shift",
    "solver",
    "timesteps",
    "schedule",
    "guidance_scale",
    "guidance_scale_2",
)
_SHAPE = ("profile", "size", "num_frames", "num_videos", "boundary", "loop", "output")


@dataclass(frozen=True)
class Prompts:
    """Requests, each with a seed of its own: a run of one noise would choose steps that suit that noise.

    Args:
        chosen_by: those that steps are chosen by.
        held_out: those that judge.
    """

    chosen_by: Sequence[Line]
    held_out: Sequence[Line]


def read_prompts(file: Path | None) -> Prompts:
    """Reads prompts as ``wanrun --prompts`` does, or takes ``PROMPTS``.

    Raises:
        UsageError: if the file cannot be read, has fewer than three prompts, or a line that is no request, or
            that has an option which the calibration decides.
    """
    if file is None:
        lines = [Line(prompt=prompt) for prompt in PROMPTS]
    else:
        entries, failures = read_entries(file, Line(prompt=""))
        if failures:
            first = failures[min(failures)]
            raise UsageError(first.spelled(key_of))
        for entry in entries:
            for name in (*_DECIDED, *_SHAPE):
                if getattr(entry.line, name) is not None:
                    raise UsageError(
                        f"{entry.where}: {key_of(name)} has no effect on a calibration", remedy="leave it out"
                    )
        lines = [entry.line for entry in entries]
    if len(lines) < HELD_OUT_EVERY:
        raise UsageError(
            "there are too few prompts to calibrate by",
            expected=f"{HELD_OUT_EVERY} or more",
            found=len(lines),
        )
    seeded = [structs.replace(line, seed=1000 + index) for index, line in enumerate(lines)]
    held_out = seeded[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Prompts(
        [line for line in seeded if line not in held_out],
        [
            structs.replace(line, seed=2000 + HELD_OUT_SEEDS * index + number)
            for index, line in enumerate(held_out)
            for number in range(HELD_OUT_SEEDS)
        ],
    )
