"""The prompts of a calibration: some to choose steps by, some that decide, and some that only report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from wanrun.denoising.guided_steps import GUIDED
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
    "A dog shakes off water on a pier, drops fly in the sunlight, slow motion",
    "A crane lifts a steel beam at a building site, workers look up",
    "Pencil sketch of an owl that turns its head and blinks",
    "Bread dough rises in a glass bowl, time lapse",
    "A cyclist rides down a narrow street of an old town, seen from behind",
    "A jellyfish glows and pulses in dark water",
    "A girl blows out the candles of a birthday cake, her family claps",
    "Lava flows slowly into the sea, steam rises",
    "A sailing boat leans in strong wind, spray over the bow",
    "A blacksmith hammers glowing iron, sparks fly",
    "Autumn leaves fall on a bench in a park, soft light",
    "A toy train circles a Christmas tree, close to the ground, stop motion",
    "A barista pours milk into a cup of coffee, seen from above",
    "A herd of elephants walks through dust at sunset",
    "A neon sign flickers in a foggy alley, a cat runs past",
)
"""The prompts if no file is given: long and short, slow and fast, of several styles."""

SETS = 3
"""Prompts go into the three sets in turn: the first into the first one."""

LEAST = 12
"""The least prompts of a set that judges; with fewer, an interval may be wrong where results are bimodal."""

_DECIDED = (
    "num_steps",
    "flow_shift",
    "solver",
    "timesteps",
    "schedule",
    "guidance_scale",
    "guidance_scale_2",
    *GUIDED,
)
_SHAPE = ("profile", "size", "num_frames", "num_videos", "boundary", "loop", "output")


@dataclass(frozen=True)
class PromptSets:
    """Requests, each with a separate seed: a run of one noise would choose steps that suit that noise.

    Lines that differ only in their seeds are one prompt, so that no prompt is in two sets: steps are chosen
    by ``chosen_by``, and ``decided_by`` decides between them and the solver's. ``reported_by`` decides
    nothing, and the figures are from it, because a set that decides flatters its choice.
    """

    chosen_by: Sequence[Line]
    decided_by: Sequence[Line]
    reported_by: Sequence[Line]

    def lines(self) -> list[Line]:
        """Returns all of them."""
        return [*self.chosen_by, *self.decided_by, *self.reported_by]

    def doubts(self) -> Iterator[str]:
        """Yields a warning if few prompts judge."""
        few = min(len(set(map(prompt_of, lines))) for lines in (self.decided_by, self.reported_by))
        if few < LEAST:
            yield (
                f"only {few} of the prompts judge, so the figures say little about others: give "
                f"{SETS * LEAST} or more, of which a third chooses, a third decides and a third reports"
            )


def prompt_of(line: Line) -> Line:
    """Returns the line without its seed: lines of one prompt differ only in that."""
    return structs.replace(line, seed=0)


def read_prompts(file: Path | None) -> PromptSets:
    """Reads prompts as ``wanrun --prompts`` does, or takes ``PROMPTS``.

    Raises UsageError if the file cannot be read, has fewer than three different prompts, or a line that is
    not a request or has an option which the calibration decides.
    """
    if file is None:
        lines = [Line(prompt=prompt) for prompt in PROMPTS]
    else:
        entries, failures = read_entries(file, Line(prompt=""))
        if failures:
            first = failures[min(failures)]
            raise UsageError(first.code, first.spelled(key_of))
        for entry in entries:
            for name in (*_DECIDED, *_SHAPE):
                if getattr(entry.line, name) is not None:
                    raise UsageError(
                        "no_effect",
                        f"{entry.where}: {key_of(name)} has no effect on a calibration",
                        remedy="leave it out",
                    )
        lines = [entry.line for entry in entries]
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(prompt_of, lines)))}
    if len(places) < SETS:
        raise UsageError(
            "out_of_range",
            "there are too few prompts to calibrate by",
            expected=f"{SETS} or more different ones",
            found=len(places),
        )
    sets: tuple[list[Line], ...] = tuple([] for _ in range(SETS))
    for index, line in enumerate(lines):
        sets[places[prompt_of(line)] % SETS].append(structs.replace(line, seed=1000 + index))
    return PromptSets(*sets)
