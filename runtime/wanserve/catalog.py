"""The artifacts that are served: what each is built for, and which options its model has."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import structs

import wanrun
from wanrun.artifact.guiders import GUIDERS
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.select import UnbuiltError
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.request.lora import EXPERTS
from wanrun.request.offered import offered
from wanserve.field_names import page_text
from wanserve.refusal import RefusedError

if TYPE_CHECKING:
    from wanrun import Generation
    from wanrun.artifact.adapter import PlacedAdapter
    from wanrun.rows import Row

LARGER = 2
"""Times the pixels of its largest profile that a shape of a model may have to be built, by default."""

PYTHON_ONLY = ("profile",)
"""Options that a client has no use for, besides those of its shape; they are understood."""


@dataclass(frozen=True)
class ServedModel:
    """One artifact that is served.

    Attributes:
        name: the model's name for clients.
        artifact: the artifact as it was at the start, with what was built since.
        loop: the form of the denoising loop that is loaded; None for the profile's own.
        most: pixels of all frames of a shape that may be built for a request; None if none is built.
    """

    name: str
    artifact: wanrun.Artifact
    loop: str | None = None
    most: int | None = None

    @property
    def manifest(self) -> wanrun.Manifest:
        """The artifact's manifest."""
        return self.artifact.manifest

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The rows of the options that have an effect with this model, by Python name."""
        built = [profile.options for profile in self._profiles]
        return {
            row.name: row
            for row in wanrun.options()
            if offered(row, self.manifest)
            and (row.built is None or any(map(row.built, built)))
            and (row.name != "lora" or self.loras)
        }

    @cached_property
    def _guiders(self) -> set[str]:
        """The guiders besides the default one that a profile is built for."""
        return {name for profile in self._profiles for name in profile.options.guiders}

    @cached_property
    def loras(self) -> Mapping[str, PlacedAdapter]:
        """The LoRAs by name that one of the profiles has slots for."""
        most = max((profile.options.lora_rank for profile in self._profiles), default=0)
        every = self.artifact.adapters.items() if most else ()
        return {name: one for name, one in every if one.adapter.content.rank <= most}

    def shown_loras(self) -> list[dict[str, Any]]:
        """Returns its LoRAs as clients see them."""
        return [
            {
                "name": name,
                "rank": (content := one.adapter.content).rank,
                "experts": self._noise(content.experts),
                "defaults": content.options.given,
                "sha256": one.adapter.sha256,
            }
            for name, one in self.loras.items()
        ]

    def _noise(self, experts: Sequence[str]) -> list[str]:
        """Returns the names of the experts' strengths; none for a model with one transformer."""
        called = dict(zip(TRANSFORMERS, EXPERTS, strict=True))
        return [called[name] for name in experts] if TRANSFORMERS[1] in self.manifest.components else []

    @property
    def inputs(self) -> Iterator[tuple[str, str, bool, bool]]:
        """The images and videos that it takes: option, image or video, whether it must, whether several."""
        for name, row in self.options.items():
            item = self.manifest.model.task.inputs.get(name)
            if item is not None:
                yield name, "video" if item.kind == "video" else "image", item.required, row.many

    def shapes(self) -> list[dict[str, Any]]:
        """The built profiles in the order of building, as clients see them."""
        fps = float(self.manifest.model.defaults.fps)
        built = sorted(self._profiles, key=lambda profile: profile.index)
        return [
            {
                "profile": one.name,
                "size": f"{one.width}x{one.height}",
                "num_frames": one.num_frames,
                "fps": fps,
                "seconds": round(one.num_frames / fps, 2),
                "num_videos": one.num_videos,
                "num_references": one.num_references,
                "guidance": one.guidance,
                "lora_rank": one.options.lora_rank,
            }
            for one in built
        ]

    @property
    def live(self) -> bool:
        """Whether it makes videos chunk by chunk, which play meanwhile."""
        return self.manifest.model.chunks is not None

    @property
    def _profiles(self) -> list[Any]:
        """The profiles that have the form of the loop that is loaded."""
        built = self.manifest.profiles.values()
        return [one for one in built if self.loop in (None, *one.options.forms)]

    def resolve(self, options: Mapping[str, Any], spell: Callable[[str], str]) -> Generation:
        """Checks a request against the artifact; reads no file.

        ``options`` are by Python name, with the paths of images and videos; ``spell`` returns the client's
        name of an option, for messages. A profile that is lacking, and may be built, counts as if it were
        built.

        Raises WanError as ``wanrun.resolve``. Raises RefusedError for a schedule or a LoRA that the model
        does not have (no file of the server is read for a request), for another form of the loop than the
        loaded one, and for a shape that is too large to be built.
        """
        if self.loop is not None and options.get("loop") not in (None, self.loop):
            raise RefusedError(
                f"this server runs only loop {self.loop}", param=spell("loop"), code="unsupported"
            )
        schedule = options.get("schedule")
        if isinstance(schedule, str) and schedule not in self.manifest.schedules:
            names = f"one of {', '.join(self.manifest.schedules)}" if self.manifest.schedules else "none"
            raise RefusedError(
                f"there is no {spell('schedule')} {schedule[:60]!r}",
                expected=names,
                param=spell("schedule"),
                code="unknown_name",
            )
        for one in options.get("lora", ()):
            if isinstance(name := one.get("name"), str) and name not in self.loras:
                names = f"one of {', '.join(self.loras)}" if self.loras else "none"
                raise RefusedError(
                    f"there is no {spell('lora')} {name[:60]!r}",
                    expected=f"{names} (v1/loras)",
                    param=spell("lora"),
                    code="unknown_name",
                )
        if "prompt" not in options:
            raise UsageError(
                "missing_parameter",
                "there is no prompt",
                expected="a description of the video in the field prompt",
            )
        loop = {} if self.loop is None else {"loop": self.loop}
        try:
            return wanrun.resolve(self.artifact, **loop | dict(options))
        except UnbuiltError as error:
            if self.most is None:
                raise
            return wanrun.resolve(self._promised(error.lacking, spell), **loop | dict(options))

    def _promised(self, lacking: Any, spell: Callable[[str], str]) -> wanrun.Artifact:
        """Returns the artifact as it will be once a profile is built. Raises RefusedError for a large one."""
        if (pixels := _pixels(lacking)) > (self.most or 0):
            raise RefusedError(
                f"profile {lacking.name} is too large to be built",
                expected=f"at most {self.most} pixels in all frames",
                found=str(pixels),
                param=spell("size"),
                code="not_built",
            )
        profiles = {**self.manifest.profiles, lacking.name: lacking}
        return replace(self.artifact, manifest=structs.replace(self.manifest, profiles=profiles))

    def shown(self, created: float) -> dict[str, Any]:
        """Returns the model as the API answers it."""
        model = self.manifest.model
        hidden = PYTHON_ONLY if self.loop is None else (*PYTHON_ONLY, "loop")
        defaults = {name: value for name, value in model.default_options().items() if value is not None}
        return {
            "id": self.name,
            "object": "model",
            "created": int(created),
            "owned_by": "wanrun",
            "variant": model.variant,
            "content_digest": self.manifest.content_digest,
            "shapes": self.shapes(),
            "build_limit": self.most,
            "live": self.live,
            "defaults": defaults,
            "presets": [
                {"name": name, "description": schedule.describe()}
                for name, schedule in sorted(
                    self.manifest.schedules.items(), key=lambda one: -one[1].evaluations
                )
            ],
            "loras": self.shown_loras(),
            "inputs": [
                {
                    "name": name,
                    "kind": kind,
                    "required": required,
                    "many": many,
                    "description": self._text(self.options[name]),
                }
                for name, kind, required, many in self.inputs
            ],
            "options": (names := [name for name in self.options if name not in (*hidden, "prompt")]),
            "fields": {name: self._field(self.options[name]) for name in names},
        }

    def _field(self, row: Row) -> dict[str, Any]:
        """What of an option the page shows: its text, and the choices that this artifact has."""
        choices = self.choices(row)
        usual = {"default": row.default} if row.default in choices else {}
        return {"description": self._text(row), "choices": choices, **usual}

    def _text(self, row: Row) -> str:
        return page_text(row, self._kinds, self.choices(row))

    @property
    def _kinds(self) -> list[str]:
        """What the model is, in the words of the rows' ``models``."""
        model = self.manifest.model
        facts = {
            "Animate": model.task.windows is not None,
            "two experts": "boundary" in model.default_options(),
            "video to video": model.task.start is not None,
            "AnyFlow-FAR": any(item.count is not None for item in model.task.conditions.values()),
            "Helios": bool(model.task.past),
        }
        return [name for name, is_so in facts.items() if is_so]

    def choices(self, row: Row) -> list[Any]:
        """Returns the values of an option, of those that have a few, that the artifact can be asked for."""
        task = self.manifest.model.task
        possible = {
            "guider": {next(iter(GUIDERS)), *self._guiders},
            "loop": {form for profile in self._profiles for form in profile.options.forms},
            "mode": task.modes.names if task.modes is not None else (),
            "segment_overlap": task.windows.overlaps if task.windows is not None else (),
        }
        return [one for one in row.choices if one in possible.get(row.name, row.choices)]


def _pixels(profile: Any) -> int:
    """The pixels of all frames of a profile's videos."""
    return int(profile.width * profile.height * profile.num_frames * profile.num_videos)


class Catalog:
    """The models of a server, by name; the first is the default.

    ``loop`` is the form of the denoising loop that is loaded; None for that of each profile. ``build`` says
    whether lacking shapes may be built, of at most ``build_limit`` pixels of all frames; None for twice those
    of the largest profile. Raises ArtifactError if an artifact has no profile, or none with this form.
    """

    def __init__(
        self,
        artifacts: Mapping[str, wanrun.Artifact],
        loop: str | None = None,
        build: bool = False,
        build_limit: int | None = None,
    ) -> None:
        self.created = time.time()
        self.models = dict[str, ServedModel]()
        for name, artifact in artifacts.items():
            largest = max(map(_pixels, artifact.alone.manifest.profiles.values()), default=0)
            most = (build_limit or LARGER * largest) if build else None
            self.models[name] = ServedModel(name, artifact, loop, most)
        for model in self.models.values():
            if not model.shapes() and loop is not None:
                built = sorted(model.manifest.profiles.values(), key=lambda one: one.index)
                command = f"wanbuild compile --loop all --artifact {shlex.quote(str(model.artifact))}"
                if built:
                    command = model.artifact.compiling(built[0], "--loop all")
                raise ArtifactError(
                    "not_built",
                    f"{model.artifact} has no profile that was built with loop {loop}",
                    remedy=f"run {command}",
                )

    def prepare(self) -> None:
        """Resolves a request of each model, so that the first client does not wait for imports."""
        for model in self.models.values():
            with contextlib.suppress(WanError):  # it needs an image
                model.resolve({"prompt": ""}, str)

    def find(self, name: str | None) -> ServedModel:
        """Returns a model; None is the only one.

        Raises RefusedError if there is none of this name, or several and none is named.
        """
        names = ", ".join(self.models)
        if name is None and len(self.models) > 1:
            raise RefusedError(
                "there is no model in the request",
                param="model",
                code="missing_parameter",
                expected=f"one of {names}",
            )
        model = next(iter(self.models.values())) if name is None else self.models.get(name)
        if model is None:
            raise RefusedError(
                f"there is no model {name[:60]!r}",  # type: ignore[index]
                param="model",
                expected=f"one of {names}",
                code="model_not_found",
            )
        return model
