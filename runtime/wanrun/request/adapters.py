"""The LoRAs of a request: which adapters they are, what they bring, and whether a profile takes them."""

from __future__ import annotations

__all__ = ["placed", "read_adapter"]

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct, structs

from wanrun.artifact.adapter import SUFFIX, Adapter, PlacedAdapter
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import AdapterError, ArtifactError, UsageError, field, shortened
from wanrun.request.lora import EXPERTS, LoraChoice
from wanrun.request.request import Request
from wanrun.weights.adapters import AdapterFile, check_fits, open_adapter
from wanrun.weights.loras import AppliedLora

_NOISE: Mapping[str, str] = MappingProxyType(dict(zip(TRANSFORMERS, EXPERTS, strict=True)))
"""The names of the experts' strengths."""


class ChosenLora(Struct, frozen=True, kw_only=True):
    """A LoRA of a generation.

    ``name`` is that of its file, without a folder, if it is not the artifact's own; ``file`` is None for one
    of the artifact's own. ``sha256`` is hexadecimal. ``strengths`` are the factors of its changes, by the
    transformers that it changes.
    """

    name: str
    sha256: str
    strengths: Mapping[str, float]
    file: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of a video's metadata."""
        return {"name": self.name, "strengths": dict(self.strengths), "sha256": self.sha256}

    def __str__(self) -> str:
        if len(set(self.strengths.values())) == 1:
            return f"{self.name} at strength {next(iter(self.strengths.values())):g}"
        each = (f"{value:g} in {name}" for name, value in self.strengths.items())
        return f"{self.name} at strength {' and '.join(each)}"


class Chosen:
    """The LoRAs of a request in its order, with their adapters.

    Raises UsageError for a LoRA that does not exist or is of another model, a name that is given twice, and
    strengths of other experts than it changes.
    """

    def __init__(self, choices: Sequence[LoraChoice], artifact: Artifact) -> None:
        self._artifact, self._manifest = artifact, artifact.manifest
        self._adapters, found = dict[str, PlacedAdapter](), list[ChosenLora]()
        for choice in choices:
            name, adapter, own = _adapter_of(choice.name, artifact)
            if name in self._adapters:
                raise UsageError(
                    "conflict", f"{field('lora')} {shortened(name)} is given twice", remedy="give it once"
                )
            self._adapters[name] = adapter
            found.append(
                ChosenLora(
                    name=name,
                    sha256=adapter.adapter.sha256,
                    strengths=_strengths(choice, name, adapter.adapter.content.experts, self._manifest),
                    file=None if own else str(adapter.path.absolute()),
                )
            )
        self.loras = tuple(found)

    @property
    def _working(self) -> list[ChosenLora]:
        """The LoRAs that change something."""
        return [one for one in self.loras if any(one.strengths.values())]

    def check(self, profile: Profile) -> None:
        """Raises ArtifactError if a profile is built without slots, or for smaller ranks."""
        built = profile.options.lora_rank
        used = {name: sum(self._ranks(name)) for name in TRANSFORMERS}
        needed = max(used.values())
        if not self._working or (built and needed <= built):
            return
        others = [
            f"{one.name} (rank {one.options.lora_rank})"
            for one in self._manifest.profiles.values()
            if one.options.lora_rank >= max(needed, 1)
        ]
        names = " and ".join(one.name for one in self._working)
        build = f"run {self._artifact.compiling(profile, lora_rank=needed or 16)}"
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} takes no {field('lora')}: it has no slots for any"
            if not built
            else f"profile {profile.name} has too few slots for {field('lora')} {names}",
            expected=f"at most rank {built} together" if built else None,
            found=f"rank {needed}" if built else None,
            remedy=f"choose {field('profile')} {' or '.join(others)}, or {build}" if others else build,
        )

    def _ranks(self, expert: str) -> Iterator[int]:
        for one in self._working:
            if one.strengths.get(expert):
                yield self._adapters[one.name].adapter.content.rank

    def with_defaults(self, request: Request) -> Manifest:
        """Returns the manifest with the defaults that the LoRAs bring in the place of its own.

        Raises UsageError if two bring different defaults of an option that the request does not give.
        """
        of_loras, brought = self._brought(), dict[str, Any]()
        for option, values in of_loras.items():
            (first, one), *others = values.items()
            other, two = next((each for each in others if each[1] != one), (first, one))
            if one == two:
                brought[option] = one
            elif not _is_given(option, request):
                raise UsageError(
                    "conflict",
                    f"{field('lora')} {first} and {other} bring different defaults of {field(option)}",
                    found=f"{_shown(one)} and {_shown(two)}",
                    remedy=f"pass {field(option)}",
                )
        if not of_loras:
            return self._manifest
        model = self._manifest.model
        own = model.defaults.__struct_fields__
        if "timesteps" in brought:
            brought["num_steps"] = len(brought["timesteps"])
        elif of_loras.keys() & {"timesteps", "num_steps", "solver", "flow_shift"}:
            brought["timesteps"] = None  # the model's are for other steps
        if "guidance_scale" in brought:
            brought.setdefault("guidance_scale_2", brought["guidance_scale"])
        defaults = structs.replace(model.defaults, **{name: brought[name] for name in own if name in brought})
        options = {name: brought.get(name, value) for name, value in model.options.items()}
        # With the digests that it has: it is the same artifact.
        return structs.replace(
            self._manifest, model=structs.replace(model, defaults=defaults, options=options)
        )

    def _brought(self) -> dict[str, dict[str, Any]]:
        """The defaults that the LoRAs bring: by option, and by LoRA."""
        found = dict[str, dict[str, Any]]()
        for one in self._working:
            for option, value in self._adapters[one.name].adapter.content.options.given.items():
                found.setdefault(option, {})[one.name] = value
        return found

    def warnings(self) -> Iterator[str]:
        """Yields what the request may not expect."""
        experts = {name for one in self._working for name in one.strengths if one.strengths[name]}
        if len(experts) == 1 and TRANSFORMERS[1] in self._manifest.components:
            (changed,) = experts
            names = " and ".join(one.name for one in self._working)
            yield f"{names} changes only the {_NOISE[changed]}-noise expert; the other one stays as it is"


def read_adapter(path: Path) -> AdapterFile:
    """Opens an adapter that is not in an artifact. While the file does not change, its digest is made once.

    Raises:
        UsageError: if it cannot be read, or is no adapter.
        AdapterError: if it is damaged, or of another release.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UsageError("unreadable", f"the adapter {path} cannot be read", found=reason) from None
    return _read_adapter(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_adapter(path: Path, nbytes: int, changed: int) -> AdapterFile:
    """Opens a file of a size and a time of change."""
    return open_adapter(path)


def placed(file: AdapterFile) -> PlacedAdapter:
    """Returns the record of an adapter that is not in an artifact, and its place."""
    name, digest = f"{file.sha256}{SUFFIX}", file.sha256  # its own name may be none that a record has
    return PlacedAdapter(
        file.path, Adapter(file=name, sha256=digest, nbytes=file.nbytes, content=file.content)
    )


def _adapter_of(name: str, artifact: Artifact) -> tuple[str, PlacedAdapter, bool]:
    """Returns the adapter of a name, or in a file: its name, and whether it is one of the artifact's own."""
    if (found := artifact.adapters.get(name)) is not None:
        return name, found, name not in artifact.beside
    if not name.endswith(SUFFIX):
        names = ", ".join(artifact.adapters)
        raise UsageError(
            "unknown_name",
            f"there is no LoRA {shortened(name)}",
            expected=f"one of {names}, or an adapter's file ({SUFFIX})" if names else f"a {SUFFIX} file",
            found=None if names else "no LoRAs in the artifact",
            remedy=f"wanbuild lora FILE --artifact {shlex.quote(str(artifact))} adds one",
        )
    file = read_adapter(Path(name))
    check_fits(file, artifact.manifest)
    return file.path.name.removesuffix(SUFFIX), placed(file), False


def _strengths(choice: LoraChoice, name: str, experts: Sequence[str], manifest: Manifest) -> dict[str, float]:
    """Returns the strength of each expert that an adapter changes."""
    given = {
        expert: choice.of_experts[noise] for expert, noise in _NOISE.items() if noise in choice.of_experts
    }
    if not given:
        return dict.fromkeys(experts, 1.0 if choice.strength is None else choice.strength)
    if TRANSFORMERS[1] not in manifest.components:
        raise UsageError(
            "mismatch",
            f"{field('lora')} {name} has strengths of two experts, and this model has one transformer",
            remedy=f"give one strength: {name}:{next(iter(given.values())):g}",
        )
    for expert, noise in _NOISE.items():
        if expert in experts and expert not in given:
            raise UsageError(
                "missing_parameter",
                f"{field('lora')} {name} has no strength of the {noise}-noise expert, which it changes too",
                remedy=f"add {noise}=0, or another one",
            )
        if expert not in experts and given.get(expert):
            raise UsageError(
                "mismatch",
                f"{field('lora')} {name} does not change the {noise}-noise expert",
                remedy=f"leave {noise}= out",
            )
    return {expert: given[expert] for expert in experts}


def _is_given(option: str, request: Request) -> bool:
    """Whether a request decides an option whose default would be one of several."""
    decided_by = (option, "num_steps", "timesteps") if option in ("num_steps", "timesteps") else (option,)
    return request.schedule is not None or any(getattr(request, name) is not None for name in decided_by)


def _shown(value: Any) -> str:
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else str(value)


def applied_loras(loras: Sequence[ChosenLora], artifact: Artifact) -> tuple[AppliedLora, ...]:
    """Returns LoRAs with their adapters, whose values are read when they are used.

    Raises AdapterError if a file is missing, damaged, or not the one that was chosen; UsageError if it is not
    an adapter.
    """
    found = []
    for lora in loras:
        file = read_adapter(_path_of(lora, artifact))
        if file.sha256 != lora.sha256:
            raise AdapterError(
                "changed",
                f"the adapter {file.path} is not the one that was chosen",
                expected=lora.sha256,
                found=file.sha256,
                remedy="put that file back, or load the artifact again and choose anew",
            )
        found.append(AppliedLora(file, lora.strengths))
    return tuple(found)


def _path_of(lora: ChosenLora, artifact: Artifact) -> Path:
    """Returns the path of a LoRA's adapter; raises AdapterError if the artifact has it no more."""
    if lora.file is not None:
        return Path(lora.file)
    if (own := artifact.adapters.get(lora.name)) is None:
        raise AdapterError(
            "changed",
            f"the artifact has no adapter {lora.name} any more",
            remedy="load it again and choose one that it has",
        )
    return own.path
