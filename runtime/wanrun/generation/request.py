"""The options of a generation: one typed record, with a row for each option.

The command line, the lines of a prompts file, the keywords of ``Pipeline.generate``, the metadata of a video,
the table in README.md and a JSON schema derive from ``Request``. A new option is one row here, and the line
that uses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from wanrun.artifact.model import MAX_FLOAT32, MAX_STEPS, SolverName
from wanrun.errors import UsageError, field, quoted, shortened
from wanrun.generation.plain import as_plain

RANDOM = "random"
"""The seed that is drawn anew for each prompt."""

ARTIFACT = "the artifact's"
"""The help's text for a default that is in the manifest."""

Steps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Seed = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]
"""The bound above does not fit msgspec's: ``wanrun.denoising.noise`` checks it."""
Scale = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Positive = Annotated[float, Meta(gt=0, le=MAX_FLOAT32)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,4}[xX*][1-9][0-9]{0,4}\Z")]
Rate = Annotated[float, Meta(ge=0.1, le=240)]
"""Frames per second that every container can hold."""
Path = Annotated[str, Meta(min_length=1)]
Timesteps = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_STEPS)]


def _row(
    help: str,
    *,
    default: str | None = None,
    models: str | None = None,
    value: str | None = None,
    also: str = "",
) -> Meta:
    """Returns the texts about an option for users.

    Args:
        help: the option's effect.
        default: the default in words, if it is not a constant.
        models: the models that have the option; None for all.
        value: the value's name, with its unit, if the type does not imply it.
        also: names that are understood too, and that no help shows: those of diffusers' pipelines, of Wan's
            own ``generate.py``, and what is often written.
    """
    extra = {"default": default, "models": models, "value": value, "also": tuple(also.split())}
    return Meta(description=help, extra=extra)


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt and its options; None means the default.

    Field names are the Python keywords. ``steps`` and ``frames`` are shorter on the command line and in JSON.
    Files are relative to the working directory. The order is that of the help and of README.md.
    """

    prompt: Annotated[str, _row("Description of the video; may be empty.")]
    negative_prompt: Annotated[
        str | None,
        _row("Description of what to avoid.", default=ARTIFACT, also="n_prompt neg_prompt negative"),
    ] = None
    image: Annotated[
        Path | None,
        _row(
            "First frame of the video; for Animate the character.",
            models="I2V, FLF2V, TI2V, Animate",
            also="first_frame input_image",
        ),
    ] = None
    last_image: Annotated[
        Path | None,
        _row("Last frame of the video; optional for I2V.", models="FLF2V, Wan 2.2 I2V", also="last_frame"),
    ] = None
    video: Annotated[
        Path | None,
        _row("Control video, or the video to edit.", models="VACE", value="DIR|FILE", also="src_video"),
    ] = None
    mask: Annotated[
        Path | None,
        _row(
            "White where --video gets new content.",
            default="all",
            models="VACE",
            value="DIR|FILE",
            also="src_mask",
        ),
    ] = None
    reference_image: Annotated[
        Path | tuple[Path, ...],
        _row("Image of a subject of the video; repeatable.", models="VACE", also="ref_image"),
    ] = ()
    pose_video: Annotated[
        Path | None, _row("Video of the poses to take.", models="Animate", value="DIR|FILE")
    ] = None
    face_video: Annotated[
        Path | None,
        _row("Video of the face whose expressions to take.", models="Animate", value="DIR|FILE"),
    ] = None
    background_video: Annotated[
        Path | None,
        _row("Video that the character is put into.", models="Animate with --mode replace", value="DIR|FILE"),
    ] = None
    mask_video: Annotated[
        Path | None,
        _row("White where the character goes.", models="Animate with --mode replace", value="DIR|FILE"),
    ] = None
    mode: Annotated[
        Literal["animate", "replace"] | None,
        _row(
            "Animate the character, or put it in somebody's place in a video.",
            default="animate",
            models="Animate",
        ),
    ] = None
    conditioning_scale: Annotated[
        Scale | None, _row("Strength of the control video.", default=ARTIFACT, models="VACE")
    ] = None
    segment_overlap: Annotated[
        Literal[1, 5] | None,
        _row(
            "Frames that a window of a long video shares with the one before.", default="1", models="Animate"
        ),
    ] = None
    profile: Annotated[
        str | None,
        _row(
            "Name of a built profile, which has the size, the frames and the number of videos.",
            default="chosen by the other options",
            value="NAME",
        ),
    ] = None
    size: Annotated[
        Size | None,
        _row("Width and height in pixels.", default="the first built", value="WxH", also="resolution"),
    ] = None
    num_frames: Annotated[
        Count | None,
        _row(
            "Frames of the video; for Animate, of a window.",
            default="the first built",
            also="frame_num frames",
        ),
    ] = msgspec.field(default=None, name="frames")
    num_steps: Annotated[
        Steps | None,
        _row("Denoising steps.", default=ARTIFACT, also="num_inference_steps sample_steps steps"),
    ] = msgspec.field(default=None, name="steps")
    guidance_scale: Annotated[
        Scale | None,
        _row(
            "Strength of guidance; at most 1 turns it off. With two experts, that of the high-noise one.",
            default=ARTIFACT,
            also="cfg cfg_scale sample_guide_scale",
        ),
    ] = None
    guidance_scale_2: Annotated[
        Scale | None,
        _row(
            "Strength of guidance of the low-noise expert, if --guidance-scale is above 1.",
            default="the given --guidance-scale, else the artifact's",
            models="two experts",
        ),
    ] = None
    boundary: Annotated[
        Share | None,
        _row(
            "Share of the training timesteps below which the low-noise expert runs.",
            default=ARTIFACT,
            models="two experts",
            also="boundary_ratio",
        ),
    ] = None
    flow_shift: Annotated[
        Positive | None, _row("Shift of the sigmas.", default=ARTIFACT, also="sample_shift shift")
    ] = None
    solver: Annotated[
        SolverName | None,
        _row(
            "Solver, on its diffusers class's own grid; lcm, for distilled models, adds noise between steps.",
            default=ARTIFACT,
            also="sample_solver sampler",
        ),
    ] = None
    timesteps: Annotated[
        Timesteps | None,
        _row(
            "Explicit timesteps instead of the solver's own, falling from at most 1000.",
            default="the artifact's, unless --steps, --solver or --flow-shift is given",
            value="X,X,...",
        ),
    ] = None
    loop: Annotated[
        Literal["step", "scan"] | None,
        _row(
            "Form of the loop: one call per step, or one call for all steps of an expert, which shows no "
            "progress and ends before Ctrl-C takes effect.",
            default="step if it is built, else scan",
        ),
    ] = None
    seed: Annotated[
        Seed,
        _row(
            "Seed of the noise; the numbers are those of diffusers' CPU generator. random: another one each "
            "time, which is printed and recorded.",
            value="N|random",
            also="base_seed",
        ),
    ] = 0
    num_videos: Annotated[Count, _row("Videos per prompt, as built.", also="num_videos_per_prompt")] = 1
    fps: Annotated[
        Rate | None, _row("Frames per second of the video file.", default=ARTIFACT, also="frame_rate")
    ] = None


@dataclass(frozen=True)
class Row:
    """The facts about one option that its users see.

    Attributes:
        name: the Python keyword.
        key: the name in JSON; with dashes, that of the command line.
        type: the type that msgspec converts a value to.
        base: ``str``, ``int`` or ``float``.
        many: whether several values may be given.
        numbers: whether the value is a list of numbers; ``base`` is the type of each.
        choices: the possible values; empty if any value is possible.
        bounds: least and most value; None for no bound.
        positive: whether the value must be above 0.
        help: the option's effect.
        value: the value's name, with its unit.
        default: the default in words; empty if the option is required or has no default.
        models: the models that have the option; empty for all.
        also: further names that are understood.
    """

    name: str
    key: str
    type: Any
    base: type[Any]
    many: bool
    numbers: bool
    choices: tuple[Any, ...]
    bounds: tuple[float | None, float | None]
    positive: bool
    help: str
    value: str
    default: str
    models: str
    also: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The option's spelling on the command line."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def kind(self) -> str:
        """The value's type in words."""
        if self.numbers:
            return "a list of numbers"
        words = {str: "a string", int: "an integer", float: "a number"}[self.base]
        return f"{words} or a list of strings" if self.many else words

    @property
    def expected(self) -> str:
        """The possible values in words."""
        if self.choices:
            return " or ".join(map(str, self.choices))
        if self.numbers:
            return f"1 to {MAX_STEPS} positive numbers"
        least, most = self.bounds
        if None not in self.bounds and most != MAX_FLOAT32:
            return f"{least:g} to {most:g}"
        if self.positive:
            return "a positive number"
        if least is not None and least >= 0:
            return f"{self.kind}, at least {least:g}" + (f", or {RANDOM}" if RANDOM in self.value else "")
        return self.kind if self.base is not str else f"{self.kind} such as 832x480"


_BASES: Mapping[type[Any], type[Any]] = MappingProxyType(
    {msgspec.inspect.StrType: str, msgspec.inspect.IntType: int, msgspec.inspect.FloatType: float}
)


def _bare(info: Any) -> Any:
    """Returns a type without metadata; of a union its first type, which leaves out None and tuples of it."""
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if isinstance(info, msgspec.inspect.UnionType):
        return _bare(info.types[0])
    return info


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Returns the values of a ``Literal`` inside an annotation, in the written order: msgspec sorts them."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _row_of(info: msgspec.structs.FieldInfo) -> Row:
    described = msgspec.inspect.type_info(info.type)
    assert isinstance(described, msgspec.inspect.Metadata) and described.extra is not None
    bare, choices = _bare(described), _choices(info.type)
    numbers = isinstance(bare, msgspec.inspect.VarTupleType)
    if isinstance(bare, msgspec.inspect.VarTupleType):
        bare = _bare(bare.item_type)
    base = type(choices[0]) if choices else _BASES[type(bare)]
    least, most = getattr(bare, "ge", None), getattr(bare, "le", None)
    many, extra = isinstance(info.default, tuple), described.extra
    default = extra["default"]
    if default is None and info.default not in (None, (), msgspec.NODEFAULT):
        default = str(info.default)
    value = "|".join(map(str, choices)) or {str: "TEXT", int: "N", float: "X"}[base]
    if getattr(bare, "min_length", None):
        value = "FILE"
    return Row(
        name=info.name,
        key=info.encode_name,
        type=info.type,
        base=base,
        many=many,
        numbers=numbers,
        choices=choices,
        bounds=(least, most),
        positive=getattr(bare, "gt", None) == 0,
        help=(described.extra_json_schema or {})["description"],
        value=extra["value"] or value,
        default=default or "",
        models=extra["models"] or "",
        also=extra["also"],
    )


@lru_cache
def rows(kind: type[Request] = Request) -> tuple[Row, ...]:
    """Returns the options of a request, or of a subclass with more options, in the order of the help."""
    return tuple(map(_row_of, msgspec.structs.fields(kind)))


@lru_cache
def aliases(kind: type[Request] = Request) -> Mapping[str, str]:
    """Returns the further names that are understood, with the Python name of the option that each means."""
    return MappingProxyType({other: row.name for row in rows(kind) for other in row.also})


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a request; a missing option has its default, and null is not a value."""
    whole = msgspec.json.schema(Request)["$defs"][Request.__name__]
    for item in whole["properties"].values():
        kinds = [kind for kind in item.pop("anyOf", ()) if kind != {"type": "null"}]
        if item.get("default") is None:
            item.pop("default", None)
        item |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}
    return dict(whole)


_Kind = TypeVar("_Kind", bound=Request)


def read_request(given: Iterable[tuple[str, Any]], kind: type[_Kind]) -> _Kind:
    """Checks values by the options' Python names, and makes a request of them.

    Args:
        given: names and values, None among none of them: strings, paths, and numbers, or lists of them, of
            Python or NumPy.
        kind: ``Request``, or a kind of it with more options.

    Raises:
        UsageError: naming every problem, in one line.
    """
    known = {row.name: row for row in rows(kind)}
    values: dict[str, Any] = {}
    problems: list[UsageError] = []
    for written, value in given:
        name = aliases(kind).get(written, written)
        if name in values:
            problems.append(UsageError(f"{field(name)} is given twice"))
        elif name not in known:
            expected = "one of " + ", ".join(map(field, known))
            problems.append(UsageError(f"unknown option {shortened(name)}", expected=expected))
        else:
            plain = as_plain(value)
            if name == "seed" and plain == RANDOM:
                plain = int.from_bytes(os.urandom(4), "little")
            if name == "size" and isinstance(plain, tuple):
                plain = "x".join(map(str, plain))
            found = list(_problems(known[name], plain))
            problems += found
            if not found:
                plain = msgspec.convert(plain, known[name].type)
        values[name] = plain if name in known else None
    if "prompt" not in values:
        problems.append(UsageError("there is no prompt", expected='"prompt": "..."'))
    raise_all(problems)
    return kind(**values)


def raise_all(problems: Sequence[UsageError]) -> None:
    """Raises the only problem, or one error that names all; does nothing without a problem."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UsageError("; ".join(problem.text for problem in problems))


def _problems(row: Row, value: Any) -> Iterator[UsageError]:
    """Yields the problems of a value."""
    if not _fits(value, row):
        what = f"{field(row.name)} has the wrong type"
        yield UsageError(what, expected=row.kind, found=quoted(value))
        return
    if row.value in ("FILE", "DIR|FILE"):
        names = [value] if isinstance(value, str) else value or ()
        yield from (_no_file(row, name) for name in names if not _names_a_file(name))
        return
    try:
        msgspec.convert(value, row.type)
    except msgspec.ValidationError:
        what = "cannot be used" if row.choices and row.base is str else "is out of range"
        found = value if type(value) is float else quoted(value)
        yield UsageError(f"{field(row.name)} {what}", expected=row.expected, found=found)


def _fits(value: Any, row: Row) -> bool:
    """Returns whether a value has the option's type; True is not a number, and 3 may stand for 3.0."""
    if row.many and isinstance(value, list | tuple):
        return all(type(item) is str for item in value)
    kinds = (int, float) if row.base is float else (row.base,)
    if row.numbers:
        return isinstance(value, list | tuple) and all(type(item) in kinds for item in value)
    return type(value) in kinds


def _names_a_file(name: str) -> bool:
    """Returns whether a file can have this name. An empty name would be the working directory."""
    try:
        return bool(name) and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _no_file(row: Row, name: str) -> UsageError:
    return UsageError(f"{field(row.name)} is no file name", found=quoted(name))
