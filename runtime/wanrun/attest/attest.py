"""Attests the executables of a profile: runs all of them, and what this chip's compiler makes of the
same StableHLO, with inputs that all decide the result.

What is wrong in the StableHLO is wrong in both: that is a matter of ``wanbuild verify`` where it was built. A
custom kernel's own fault too: so each kernel has its own program, whose other form uses none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS
from wanrun.artifact.programs import Program
from wanrun.artifact.roles import FORMS
from wanrun.artifact.select import named_profile
from wanrun.artifact.slots import slots_of
from wanrun.attest.random_inputs import attention_inputs, drawn_lora
from wanrun.attest.twins import Twins
from wanrun.errors import VerificationError, WanError
from wanrun.generation.chunks import BEGIN
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.machine.jax_process import own_options
from wanrun.replay.golden import NEGATIVE_PROMPT, PROMPT, recorded_generation
from wanrun.replay.guided import guidances
from wanrun.replay.proof import check_all_ran
from wanrun.replay.random_steps import DrawnSteps, LoopStart, drawn
from wanrun.trust.verdict import Verdict

Tell = Callable[[Verdict], None]

SCALE = 0.75
"""Of guidance: each half counts differently, and none of their rounding is enlarged."""


def attested(folder: Path, target: str, profile: str, tell: Tell, **how: Any) -> Verdict:
    """Runs a profile's executables beside the same programs compiled here, and compares the results.

    ``target`` was built elsewhere. ``tell`` gets a refusal for what is about to be done, which holds if this
    process does not come back. ``how`` are keywords of ``load``: with ``memory="stream"`` the stream form
    runs, else the others.

    The verdict of a try that could not begin, or that could not be compared, is not to be kept. For programs
    that differ, those compiled here are kept in the user's cache.
    """
    try:
        artifact = open_artifact(folder)
        wanted = named_profile(artifact, profile)
        kernels = artifact.manifest.program_sets[artifact.manifest.targets[target].program_set].kernels
        pipeline = load(  # opens the device and checks all files; nothing is loaded yet
            artifact, profile=wanted.name, target=target, embeddings="none", lazy=True, trial=True, **how
        )
    except Exception as error:
        return Verdict(outcome="refused", reason=_one_line(error), keep=False)
    with pipeline:
        device = {name: pipeline.environment[name] for name in ("device_kind", "platform_version")}

        def refused(reason: str, keep: bool = True) -> Verdict:
            return Verdict(outcome="refused", reason=reason, keep=keep, **device)

        twins = Twins(wanted.options, kernels.w8a8, lambda what, keep: tell(refused(what, keep)))
        try:
            tell(refused("while they were loaded"))
            pipeline.session(wanted).programs.weights.executables.run_twice(twins)
            pipeline.load_executables()
            run_all(pipeline, how.get("memory") == "stream")
        except Exception as error:
            fails = f"; {twins.said()}" if twins.unusable else ""
            return refused(_one_line(error) + fails, _is_kept(error))
        if any(name in twins.native() for name in _kernels(pipeline)):  # what is compiled here has it too
            return refused(f"a kernel is wrong: {twins.said()}")
        twins.keep()
        # What did not run, of another form of the loop, is not known to be right.
        unknown = (name for name in pipeline.session(wanted).programs if name not in twins.found)
        native = tuple(dict.fromkeys((*twins.native(), *unknown)))
    return Verdict(outcome="passed", reason=twins.said(), native=native, **device)


def run_all(pipeline: Pipeline, streams: bool) -> None:
    """Runs every program of the loaded profile, with inputs that all decide the result.

    ``streams`` chooses the forms of the loop that stream layers, or the others; all run if none of those is
    built. Raises VerificationError, naming a program that has not run.
    """
    built = pipeline.profile.options.forms
    forms = [form for form in built if FORMS[form].streams == streams] or built
    for prompt in (PROMPT, NEGATIVE_PROMPT):
        for length, rows in pipeline.encoded_at_lengths(prompt).items():
            pipeline.encoded_at_lengths(" ".join([prompt] * (length // len(rows))))  # fills this one
    generation = recorded_generation(pipeline, loop=forms[0])
    start = LoopStart.of(pipeline, generation, generation.read_media())
    _encode_drawn(pipeline)
    pipeline.session(pipeline.profile).text.spare()
    for form in forms:
        _make_steps(pipeline, start, form)
    pipeline.decode(start.noise)
    if TINY_VAE in pipeline.manifest.components:
        pipeline.decode(start.noise, decoder="tiny")
    _compare_kernels(pipeline)
    check_all_ran(pipeline, forms)


def _kernels(pipeline: Pipeline) -> dict[str, Program]:
    """Returns the programs of custom kernels, which no generation runs, by name."""
    programs = pipeline.session(pipeline.profile).programs.weights.opened.programs(pipeline.profile)
    return {name: program for name, program in programs.items() if program.plain is not None}


@own_options()
def _compare_kernels(pipeline: Pipeline) -> None:
    """Runs each custom kernel with inputs that show its faults."""
    executables = pipeline.session(pipeline.profile).programs.weights.executables
    for name, program in _kernels(pipeline).items():
        (loading,) = executables.request(pipeline.profile, [name])
        for inputs in attention_inputs(program.avals["inputs"]):
            loading.result()(**inputs)


@own_options()
def _encode_drawn(pipeline: Pipeline) -> None:
    """Encodes drawn images and videos, also as a later window does, where there are such."""
    programs = pipeline.session(pipeline.profile).programs
    for name in programs.with_role("window") if pipeline.manifest.model.task.windows is not None else ():
        for number in (0, 1):
            programs.bound(name)(**drawn(programs[name].avals["inputs"], number))


@own_options()
def _make_steps(pipeline: Pipeline, start: LoopStart, form: str) -> None:
    """Makes drawn steps with each program of a form, each expert, each guider, and filled slots of LoRAs."""
    sampler, options = pipeline.session(pipeline.profile), pipeline.profile.options
    slots = slots_of(pipeline.manifest.components[TRANSFORMERS[0]], options.lora_rank)
    loras = (drawn_lora(slots, options.dtype, start.experts),) if slots else ()
    for name in sampler.programs.with_role(BEGIN) if FORMS[form].chunked else ():
        sampler.programs.bound(name)()
    for maker, expert, guidance in product(FORMS[form].makers, start.experts, guidances(sampler)):
        for name in sampler.programs.with_role(maker):
            steps = DrawnSteps.drawn(sampler, start, form, maker, expert, SCALE, name=name, **guidance)
            steps = replace(steps, run=replace(steps.run, loras=loras))
            steps.made(sampler, start)
            if FORMS[form].chunked:
                steps.remembered(sampler, start)


def _is_kept(error: Exception) -> bool:
    """Returns whether an error blames the executables, not memory, a compiler or another file."""
    if isinstance(error, WanError):
        return isinstance(error, VerificationError)
    return not (isinstance(error, MemoryError | OSError) or "RESOURCE_EXHAUSTED" in str(error))


def _one_line(error: Exception) -> str:
    if isinstance(error, WanError):  # the remedy is another here
        return WanError(error.code, error.what, expected=error.expected, found=error.found).text
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
