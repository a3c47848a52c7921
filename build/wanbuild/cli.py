"""The ``wanbuild`` command: each subcommand parses its options, makes a request and calls one function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wanbuild.adapters.lora_command import lora_command
from wanbuild.build_command import BuildCommand, error_options
from wanbuild.calibrate.calibrate_command import calibrate_command
from wanbuild.check.check_commands import attest_command, embed_command, inspect_command, verify_command
from wanbuild.share.share_commands import COMMANDS
from wanbuild.variants.table import MODULES
from wancli.click_options import given, made_options
from wancli.command import Commands, InputPath, OutputPath, takes_artifact
from wanrun import __version__
from wanrun.errors import UsageError
from wanrun.rows import record_of
from wanrun.terminal.lines import print_result, report, warn

if TYPE_CHECKING:
    from wanbuild.build_options import CompileRequest

_ARTIFACT = takes_artifact()
_VARIANT, _VARIANTS = click.Choice(list(MODULES)), f"{', '.join(MODULES)}.  [default: wan2.1-t2v]"


def _options(command: str) -> list[click.Option]:
    """Makes those options of a command that are in the table."""
    from wanbuild.build_options import rows_for

    return made_options(rows_for(command))


@click.group(cls=Commands)
@error_options
@click.version_option(__version__, prog_name="wanbuild")
def wanbuild() -> None:
    """Turns a published Wan checkpoint into an artifact that wanrun executes."""


@wanbuild.command(cls=BuildCommand, options=partial(_options, "convert"))
@click.argument("source", required=False)
@_ARTIFACT
@error_options
def convert(source: str | None, artifact: Path, **options: Any) -> None:
    """Converts a checkpoint into an artifact's weights.

    SOURCE is a folder in the diffusers layout, the id of such a repository on the hub (owner/name), or an
    all-in-one file of ComfyUI. Single files take the place of its parts, or make a checkpoint by themselves.
    """
    from wanbuild.conversion.defaults import parse_defaults
    from wanbuild.source.configs import parse_configs

    if source is None and options["revision"] is not None:
        raise UsageError(
            "no_effect", "--revision is for a hub id, and there is none", remedy="leave --revision out"
        )
    if source is None and options["transformer"] is None:
        raise UsageError(
            "missing_parameter",
            "there is nothing to convert",
            expected="SOURCE, a checkpoint's folder or hub id, or --transformer with the other single files",
            remedy="wanbuild convert CHECKPOINT --artifact DIR",
        )
    parsed = {
        "defaults": parse_defaults(options.pop("defaults")),
        "configs": parse_configs(options.pop("config")),
    }
    from wanbuild.build import convert_aloud
    from wanbuild.conversion.convert_request import convert_request

    convert_aloud(convert_request(source, artifact, {**options, **parsed}), report, warn)


@wanbuild.command("compile", cls=BuildCommand, options=partial(_options, "compile"))
@_ARTIFACT
@click.option(
    "--again",
    is_flag=True,
    help="Instead rebuild every profile of the artifact, with its options and with this JAX, for each of "
    "its targets that this machine can build.",
)
@click.option(
    "--like",
    metavar="PROFILE",
    help="Take missing options from a built profile, and the mesh from its target.",
)
@error_options
def compile_command(artifact: Path, again: bool, like: str | None, **options: Any) -> None:
    """Adds profiles: exports and compiles their programs."""
    from wanbuild.build_options import CompileRequest

    if like is not None:
        from wanbuild.again import like_profile

        options = like_profile(artifact, like, given(options))
    request = record_of(CompileRequest, {"artifact": artifact, **given(options)})
    if again:
        _compile_again(artifact)
    else:
        _compile(request)


@wanbuild.command(cls=BuildCommand, options=partial(_options, "plan"))
@click.argument("subject")
@click.option("--best", is_flag=True, help="List the fastest known settings for the chip.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@error_options
def plan(subject: str, best: bool, as_json: bool, quantise: str | None, **options: Any) -> None:
    """Predicts memory and time on a chip, without the chip.

    SUBJECT is a published model (wan2.1-t2v-14b), a recipe (.toml), or an artifact's or checkpoint's folder.
    """
    import json

    from wanbuild.build_options import PlanRequest
    from wanbuild.conversion.chosen import parse_quantise
    from wanbuild.plan.best import best_json, best_lines, best_settings
    from wanbuild.plan.plan import make_plan
    from wanbuild.plan.plan_report import as_json as in_json
    from wanbuild.plan.plan_report import table
    from wanbuild.plan.subject import read_subject

    fields = PlanRequest.__struct_fields__
    choices = {name: value for name, value in given(options).items() if name not in fields}
    request = record_of(PlanRequest, {**options, "choices": choices})
    own = parse_quantise(quantise, ())
    if best:
        found = best_settings(lambda quantise: read_subject(subject, quantise or own), request)
        lines = json.dumps(best_json(found), indent=2).split("\n") if as_json else best_lines(found)
        print_result(*lines)
        return
    made = make_plan(read_subject(subject, own), request)
    print_result(*(json.dumps(in_json(made), indent=2).split("\n") if as_json else table(made)))


def _compile(request: CompileRequest) -> None:
    from wanbuild.build import compile_artifact
    from wanbuild.plan.plan import fitting_offered

    with fitting_offered(request.artifact):
        compile_artifact(request, report)


def _compile_again(artifact: Path) -> None:
    """Builds what the manifest records; the options that say what is built are refused."""
    from wanbuild.again import compile_again

    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        own = option.expose_value and option.name not in ("folder", "artifact", "again")
        if given and own:
            flag = option.opts[0]
            raise UsageError("conflict", f"--again and {flag} exclude each other", remedy=f"leave {flag} out")
    compile_again(artifact, report)


@wanbuild.command(cls=BuildCommand)
@click.argument("recipe", type=InputPath())
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@click.option(
    "--if-changed",
    is_flag=True,
    help="Do nothing if the artifact was built from this recipe and the same files, with these versions of "
    "wanbuild and JAX; else replace it.",
)
@error_options
def build(recipe: Path, force: bool, if_changed: bool) -> None:
    """Converts, compiles and records an artifact from a recipe (.toml)."""
    from wanbuild.build import build_recipe

    build_recipe(recipe, report, warn, force, if_changed)


@wanbuild.command(cls=BuildCommand)
@click.argument("directory", type=OutputPath())
@click.option("--variant", type=_VARIANT, metavar="NAME", help=_VARIANTS, default="wan2.1-t2v")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@error_options
def toy(directory: Path, variant: str, seed: int) -> None:
    """Writes a small random checkpoint, and media if it takes any."""
    from wanbuild.toy.toy_checkpoint import write_samples, write_toy, writing
    from wanbuild.variants.table import variants

    with writing(directory):
        write_toy(directory, variant, seed)
        # Next to the finished checkpoint, which is complete without media.
        made = variants()[variant]
        write_samples(directory / "media", made.inputs, SAMPLE_SIZE, made.sample_frames, face=64)
    report(f"wrote {directory}")


SAMPLE_SIZE = (192, 128)
"""Width and height of a toy checkpoint's sample videos."""


for _command in (
    *(attest_command, calibrate_command, embed_command, inspect_command, lora_command),
    *(*COMMANDS, verify_command),
):
    wanbuild.add_command(_command)
