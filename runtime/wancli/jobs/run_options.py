"""The options of a whole run: the loading, the paths of results, and the other files that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Struct

from wancli.error_line import JSON_ERRORS_HELP
from wanrun.claims import NAMES, REPORT, TIMINGS
from wanrun.opened.policy import LoadPolicy
from wanrun.request.prompts_file import SEEDS, Seeds
from wanrun.request.request import PROMPTS
from wanrun.request.values import Positive
from wanrun.rows import ARGUMENT, option

if TYPE_CHECKING:
    from wanrun.request.generation import Generation

RESULTS: Final = "Results"
MEASURING: Final = "Measuring"
SEVERAL: Final = "Several processes"

STDOUT: Final = "-"
"""The output that is standard output."""


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of ``wanrun`` that are not options of a generation, with a row for each."""

    prompt: Annotated[
        str | None, option("Description of the video; may be empty.", section=PROMPTS, short="-p")
    ] = None
    prompts: Annotated[
        Path | None,
        option(
            "A file of prompts, one per line, or JSON lines with prompt and any of the options from "
            "--negative-prompt to --fps, and output; - reads standard input. The command line's options "
            "apply to lines without them. A line that fails is reported, and the others are made; finished "
            "ones are skipped.",
            section=PROMPTS,
        ),
    ] = None
    shard: Annotated[
        str | None,
        option(
            "Make every N-th prompt, from number I (counted from 1); auto takes both from the variables of "
            "an array job of Slurm, Kubernetes, SkyPilot or AWS Batch. Without it all prompts are made.",
            value="I/N|auto",
            section=PROMPTS,
        ),
    ] = None
    seeds: Annotated[Seeds | None, SEEDS] = None
    latents: Annotated[
        Path | None, option("Initial noise, float32 .npy (B, C, T, h, w).", section=RESULTS)
    ] = None
    save_latents: Annotated[
        Path | None, option("Write the final latents to this .npy.", section=RESULTS, writes=NAMES)
    ] = None
    output: Annotated[
        str | None,
        option(
            ".mp4, .mov, .webm, .gif, .webp, .png, .npy or .frames (a folder of PNG), also s3:// or gs://; a "
            "live video goes to an .mp4, or by - to standard output. "
            "{index} or {index:04}, {seed} and {slug} (the prompt's first words) are filled in. With several "
            "prompts out.mp4 is out-{index}.mp4.",
            value="PATH",
            default="out.mp4; for a single prompt out-2.mp4 and so on, if that exists",
            short="-o",
            section=RESULTS,
            writes=NAMES,
        ),
    ] = None
    overwrite: Annotated[bool, option("Replace an existing output.", section=RESULTS)] = False
    live: Annotated[
        bool,
        option(
            "Write the video while it is made, as an .mp4 that plays while it grows. --frames or --seconds "
            "is its length; without one it goes on until Ctrl-C.",
            section=RESULTS,
        ),
    ] = False
    seconds: Annotated[
        Positive | None, option("Length of a live video, to the nearest whole latent frame.", section=RESULTS)
    ] = None
    frames: Annotated[int | None, ARGUMENT] = None
    loading: LoadPolicy = LoadPolicy()
    warmup: Annotated[
        bool, option("Execute every program once before the first prompt.", section=MEASURING)
    ] = False
    timing: Annotated[bool, option("Print a timing summary.", section=MEASURING)] = False
    timing_json: Annotated[
        Path | None, option("Write the timings to this file.", section=MEASURING, writes=TIMINGS)
    ] = None
    report: Annotated[
        Path | None, option("Write a page about the run (.html).", section=MEASURING, writes=REPORT)
    ] = None
    distributed: Annotated[
        bool,
        option(
            "Run with the other processes of this TPU pod, Slurm step or Kubernetes job.", section=SEVERAL
        ),
    ] = False
    coordinator: Annotated[
        str | None,
        option(
            "Where process 0 of a run of several processes waits for the others.",
            value="HOST:PORT",
            section=SEVERAL,
        ),
    ] = None
    num_processes: Annotated[int | None, option("How many processes there are.", section=SEVERAL)] = None
    process_id: Annotated[
        int | None, option("The number of this one; 0 prints and writes the video.", section=SEVERAL)
    ] = None
    yes: Annotated[
        bool,
        option("Do not ask before a run that takes more than 20 minutes.", short="-y", section="Options"),
    ] = False
    debug: Annotated[bool, option("Print tracebacks.", section="Options")] = False
    json_errors: Annotated[bool, option(JSON_ERRORS_HELP, section="Options")] = False

    @property
    def of_several(self) -> bool:
        """Whether the options ask for a run of several processes."""
        numbers = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed or any(value is not None for value in numbers)

    @property
    def to_stdout(self) -> bool:
        """Whether the video goes to standard output."""
        return self.live and self.output == STDOUT

    def length(self, generation: Generation) -> int | None:
        """Returns the frames of a live video; None for no end."""
        if self.seconds is None:
            return self.frames
        from wanrun.request.lengths import length_of  # not for --help

        return length_of(generation.manifest.model, self.seconds, generation.fps)
