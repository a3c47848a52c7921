"""The common parts of commands: sections of the help, names of other tools, the artifact."""

from __future__ import annotations

__all__ = ["Checked", "InputPath", "OutputPath", "artifact_option", "takes_artifact", "takes_overwrite"]

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wancli.aliases import command_meant, no_option
from wanhub.marker import is_copy
from wanrun.claims import FOLDER, Claims, Place
from wanrun.errors import UsageError, shortened
from wanrun.request.prompts_file import Line
from wanrun.request.schema import rows
from wanrun.terminal.lines import print_error
from wanrun.terminal.status import Status

if TYPE_CHECKING:
    from wanrun import Artifact, Named
    from wanrun.artifact.named import Kind

ENVIRONMENT = "WANRUN_ARTIFACT"
"""The environment variable that names the artifact of wanrun."""


class Option(click.Option):
    """An option of a section of the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def options_of(section: str) -> Callable[..., Callable[[Any], Any]]:
    """Returns ``click.option`` for the options of a section."""
    return functools.partial(click.option, cls=Option, section=section)


class InputPath(click.Path):
    """A click type for a file or a folder that a command reads, so that no output may be there.

    Args:
        base: ``Path``, or ``str`` for a text that may also be something else, such as a hub id.
        tree: whether it is a folder of which all is read, so that no output may be in it.
    """

    def __init__(self, base: type[Path | str] = Path, tree: bool = False) -> None:
        super().__init__(path_type=base, allow_dash=True, readable=base is Path)
        self.tree, self._base = tree, base

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the value as written. Raises click's error for an address where a path is read."""
        if self._base is Path and "://" in str(value):
            self.fail(f"{value} is an address; name a path here.", param, ctx)
        return super().convert(value, param, ctx)

    def claim(self, claims: Claims, value: str | Path, option: str) -> None:
        """Records that a value is read; a folder of frames is checked with its prompt."""
        if self.tree or not os.path.isdir(value):  # noqa: PTH112 - False for a name that is too long
            claims.read(Path(value), option, self.tree)


class OutputPath(click.ParamType):
    """A click type for an output of a command. ``Checked`` checks each such value before anything is done.

    Args:
        place: the kind of file or folder that is written.
        base: the type of the value: ``str`` for a text that may also be an address.
    """

    name = "path"

    def __init__(self, place: Place = FOLDER, base: type[Path | str] = Path) -> None:
        self.place, self._base = place, base

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the value as written. Raises click's error for an address where only a path is possible."""
        if self._base is Path and "://" in str(value):
            self.fail(f"{value} is an address; name a path here.", param, ctx)
        return self._base(value)


def _note_overwrite(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[OVERWRITE] = value


LOCK = "WANRUN_LOCK"
"""The variable that names the lock file of addresses."""

OVERWRITE = "wanrun.overwrite"
"""Where a context has the value of ``takes_overwrite``."""

takes_overwrite = click.option(
    "--overwrite",
    is_flag=True,
    expose_value=False,
    callback=_note_overwrite,
    help="Replace a file that is something else.",
)
"""The option of a command whose files replace only those of the same option."""


def understood(token: str) -> str:
    """Returns an option's declared name, without leading dashes, for any name that is understood."""
    written = token.replace("-", "_")
    return _keys().get(written, written).replace("_", "-")


@functools.cache
def _keys() -> Mapping[str, str]:
    """The option's name on the command line, with underscores, by every name that is understood."""
    return MappingProxyType({name: row.key for row in rows(Line) for name in (row.name, *row.also)})


CONTEXT_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"help_option_names": ["-h", "--help"], "max_content_width": 110, "token_normalize_func": understood}
)
"""Click's settings of every command."""


class Answering(click.Command):
    """A command that says what to do instead of an option that it lacks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments; raises UsageError for an unknown option, with what to do instead."""
        written = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = _as_written(error.option_name, written)
            raise no_option(ctx.command_path, name, error.option_name, _options(self), _others(ctx)) from None


def _as_written(option: str, args: Iterable[str]) -> str:
    """Returns an option as the user has written it: click gives the one that its name stands for."""
    names = (arg.partition("=")[0] for arg in args if arg.startswith("--"))
    return next((name for name in names if f"--{understood(name[2:])}" == option), option)


def _options(command: click.Command) -> list[str]:
    """Returns the options of a command."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return [name for option in options for name in (*option.opts, *option.secondary_opts)]


def _others(context: click.Context) -> dict[str, list[str]]:
    """Returns the options of the other commands of a group, by command."""
    parent = context.parent
    if parent is None or not isinstance(parent.command, click.Group):
        return {}
    return {f"{parent.command_path} {name}": _options(one) for name, one in parent.command.commands.items()}


class Commands(Answering, click.Group):
    """A group of commands that says what to do instead of a command that it lacks."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, context_settings=dict(CONTEXT_SETTINGS), **settings)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that arguments name; raises UsageError for an unknown one."""
        if args[0] not in self.commands:
            remedy = (
                command_meant(ctx.command_path, args[0], self.commands) or f"see {ctx.command_path} --help"
            )
            raise UsageError(
                "unknown_name", f"{ctx.command_path} has no command {shortened(args[0])}", remedy=remedy
            )
        return super().resolve_command(ctx, args)


class Checked(Answering):
    """A command that checks its outputs before it does anything; it needs no group for its help.

    Args:
        name: its name.
        options: makes further options, which follow the arguments and ``--artifact``. It is called when the
            command's options are first needed: the help of a group does not need them.
        settings: click's.
    """

    def __init__(
        self, name: str | None, options: Callable[[], Sequence[click.Option]] | None = None, **settings: Any
    ) -> None:
        self._further = options
        self._params: list[click.Parameter] = []
        super().__init__(name, context_settings=dict(CONTEXT_SETTINGS), **settings)

    @property
    def params(self) -> list[click.Parameter]:
        """The command's arguments and options."""
        if (further := self._further) is not None:
            self._further = None
            first = [one for one in self._params if isinstance(one, click.Argument) or one.name == "artifact"]
            self._params = [*first, *further(), *self._params[len(first) :]]
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params = params

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command.

        Raises:
            UsageError: as ``Claims.write_to``, before anything is done.
        """
        check_outputs(ctx)
        return super().invoke(ctx)


class Command(Checked):
    """A command whose help lists its options by section, in the order in which each is first named."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections; the options without a section come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None and isinstance(param, click.Option):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for name in sorted(sections, key=lambda name: name == "Options"):
            with formatter.section(name):
                formatter.write_dl(sections[name])


def check_outputs(context: click.Context) -> None:
    """Claims the files that a command's options read and write, by their types.

    Raises UsageError as ``Claims.write_to`` does.
    """
    artifact = context.params.get("folder") or context.params.get("artifact")
    claims = Claims()
    if isinstance(artifact, Path):
        claims = Claims(artifact, _origin(artifact))
    if lock := os.environ.get(LOCK):
        claims.read(Path(lock), LOCK)
    overwrite = bool(context.params.get("overwrite") or context.meta.get(OVERWRITE))
    given = [
        (param, value)
        for param in context.command.params
        if (value := context.params.get(param.name or "")) is not None
    ]
    for param, value in given:
        if isinstance(param.type, InputPath):
            for path in value if param.multiple else [value]:
                param.type.claim(claims, path, _spelled(param))
    for param, value in given:
        if isinstance(param.type, OutputPath):
            claims.write_to(param.type.place, str(value), _spelled(param), overwrite)


def _origin(folder: Path) -> str:
    """Returns the address that the files of a folder come from; empty for none."""
    if not is_copy(folder):
        return ""
    from wanhub.origin import read_origin

    origin = read_origin(folder)
    return "" if origin is None else origin.address


def _spelled(param: click.Parameter) -> str:
    """Returns how a parameter is written on the command line."""
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name


class Wanrun(Command):
    """The command ``wanrun``, whose first word is an artifact, or ``serve``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments; raises UsageError for a word that is meant as a command, or an unknown option."""
        remedy = command_meant("wanrun", args[0], ["serve"]) if args else None
        if remedy is None and len(args) > 1 and not args[0].startswith("-") and Path(args[1]).is_dir():
            remedy = "wanrun ARTIFACT --prompt TEXT makes a video"
        if remedy is not None and not Path(args[0]).exists():
            raise UsageError("unknown_name", f"wanrun has no command {args[0]}", remedy=remedy)
        return super().parse_args(ctx, args)


class Written(click.ParamType):
    """A click type for values with a syntax; ``parse`` returns a text's value, or raises UsageError.

    ``name`` is the form that the help shows.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self._parse(value)
        except UsageError as error:
            raise click.BadParameter(str(error), ctx, param) from error


class Number(click.FloatRange):
    """A click type for a finite number in a range: click takes ``nan`` for one in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


def folder_found(place: str) -> Path:
    """Returns an artifact's folder; for an address, its copy's: see ``wanhub.find``."""
    import wanhub

    return wanhub.find(place, print_error)


def fetch(artifact: Artifact, names: Iterable[Named]) -> None:
    """Fetches files of a partial copy, and says how much has come."""
    import wanhub
    from wanrun.timing.spans import Spans

    spans = Spans()
    with Status(lambda: spans.running):
        wanhub.fetch(artifact, names, print_error, lambda progress: spans.phase("fetch", None, progress))


def fetch_all(folder: Path, *kinds: Kind, targets: Collection[str] = ()) -> None:
    """Fetches the files of a partial copy, of these kinds and targets; none for all.

    Raises ArtifactError or UsageError as ``wanhub.open_artifact`` and ``fetch`` do.
    """
    import wanhub

    if is_copy(folder):
        artifact = wanhub.open_artifact(folder)
        names = artifact.only(targets=targets or None).named()
        fetch(artifact, (one for one in names if not kinds or one.kind in kinds))


def takes_artifact(variable: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the decorator that gives a command its artifact: as an argument, or as ``--artifact``.

    ``variable`` is the environment variable that names it if neither is given.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def chosen(*args: Any, folder: Path | None, artifact: Path | None, **options: Any) -> Any:
            return function(*args, artifact=_chosen(folder, artifact, variable), **options)

        also = f", here, as the argument or in {variable}" if variable else ", here or as the argument"
        option = artifact_option(also, envvar=variable)
        path = Written("PATH", folder_found)
        return click.argument("folder", type=path, required=False, metavar="[ARTIFACT]")(option(chosen))

    return decorate


def artifact_option(also: str = "", **settings: Any) -> Callable[[Any], Any]:
    """Returns the decorator that adds ``--artifact``; ``also`` says where else it may be named."""
    help = f"The artifact's folder or address{also}."
    return options_of("Artifact")("--artifact", type=Written("PATH", folder_found), help=help, **settings)


def _chosen(folder: Path | None, option: Path | None, variable: str | None) -> Path:
    """Returns a command's artifact folder, from the argument, the option, or the variable."""
    context = click.get_current_context()
    given = context.get_parameter_source("artifact") is ParameterSource.COMMANDLINE
    if folder is not None and given:
        raise UsageError(
            "conflict",
            "the artifact is given twice",
            found=f"{folder} and --artifact {option}",
            remedy="give it once",
        )
    artifact = option if folder is None else folder
    if artifact is None:
        source = "SOURCE " if "source" in context.params else ""
        ways = f"{context.command_path} {source}DIR, or --artifact DIR" + (
            f", or {variable}=DIR" if variable else ""
        )
        raise UsageError(
            "missing_parameter",
            "no artifact was given",
            remedy=f"name its folder: {ways} (see {context.command_path} --help)",
        )
    return artifact
