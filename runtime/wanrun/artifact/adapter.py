"""The records of an adapter: low-rank changes of the transformers, in a file of the artifact's layout.

The file is of safetensors. Of each product it has ``EXPERT/PATH/lora_a`` (L, r, in) and
``EXPERT/PATH/lora_b`` (L, out, r), where PATH is the path of the product's layer among the artifact's
parameters and L counts the layers of a stack; a product outside the stacks has no first axis. Small
parameters have their change itself, ``EXPERT/PATH`` in float32. The file's metadata has an
``AdapterContent``, as JSON.
"""

from __future__ import annotations

__all__ = [
    "ADAPTER_FORMAT",
    "ADAPTER_METADATA",
    "LORA_A",
    "LORA_B",
    "NAME",
    "SUFFIX",
    "Adapter",
    "AdapterContent",
    "Lora",
    "PlacedAdapter",
    "SamplingDefaults",
]

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from wanrun.artifact.model import MAX_STEPS, Number, Positive, Rate, Share, SolverName
from wanrun.artifact.record import FileBytes, ListedFile, NotNegative, Record
from wanrun.units import in_bytes

ADAPTER_FORMAT: Final = 1
"""The format of adapters' files that this release writes and reads."""

ADAPTER_METADATA: Final = "wan-adapter"
"""The key of an ``AdapterContent`` in a file's metadata."""

SUFFIX: Final = ".safetensors"
"""Of adapters' files."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""The last parts of the names of a product's two matrices: y = x Wᵀ + (x Aᵀ) Bᵀ."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
"""The names of adapters: those that a file may have, without what an option ``--lora`` separates by."""


Expert = Annotated[str, Meta(pattern=r"^transformer(_2)?\Z")]
"""A transformer of the model."""


class Lora(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA that was merged at conversion, or that an adapter was made of.

    Attributes:
        file: its name, without a folder.
        sha256: digest of its bytes, hexadecimal.
        scale: its strength, the factor of all that it changes.
        component: the transformer that it changes; None for every one.
        adapter_config_sha256: digest of PEFT's configuration beside it; empty if there is none.
        left_out: tensors of the file that belong to layers which the model does not have.
    """

    file: str
    sha256: str
    scale: int | float
    component: str | None
    adapter_config_sha256: str = ""
    left_out: NotNegative = 0

    def __str__(self) -> str:
        where = "" if self.component is None else f" in {self.component}"
        return f"{self.file} at strength {self.scale:g}{where}"

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of a video's metadata."""
        return {
            "file": self.file,
            "scale": self.scale,
            "sha256": self.sha256,
            "component": self.component,
        }


class SamplingDefaults(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults of options that an adapter brings, as a distilled one does; None where it brings none.

    Attributes:
        num_steps: denoising steps.
        guidance_scale: strength of guidance; with two experts, that of the high-noise one.
        guidance_scale_2: that of the low-noise expert.
        guidance_start: share of the steps after which they have guidance.
        guidance_end: share of the steps before which they have it.
        boundary: share of the training timesteps below which the low-noise expert runs.
        flow_shift: shift of the sigmas.
        solver: name of the solver.
        timesteps: explicit decreasing timesteps.
        fps: frames per second of the video file.
    """

    num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Number | None = None
    guidance_scale_2: Number | None = None
    guidance_start: Share | None = None
    guidance_end: Share | None = None
    boundary: Share | None = None
    flow_shift: Positive | None = None
    solver: SolverName | None = None
    timesteps: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_STEPS)] | None = None

    fps: Rate | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Returns the defaults that it brings, by the option's name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def describe(self) -> str:
        """Says what it brings, in a line; nothing if it brings nothing."""
        texts = {
            name: ", ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else value
            for name, value in self.given.items()
        }
        return ", ".join(f"{name} {value}" for name, value in texts.items())


class AdapterContent(Record, frozen=True, kw_only=True):
    """The content of an adapter, and the options that it brings; the same in its file and in a manifest.

    Attributes:
        format: number of the file's format.
        variant: the variant of the model that it is for.
        rank: the largest rank of a product; 0 if it changes only small parameters.
        experts: the transformers that it changes.
        loras: the published files, in the order they were added.
        left_out: layers of those files that the model does not have, with a * for each number.
        options: the defaults that a video with this adapter has.
    """

    format: Literal[1]
    variant: str
    rank: NotNegative
    experts: Annotated[tuple[Expert, ...], Meta(min_length=1)]
    loras: Annotated[tuple[Lora, ...], Meta(min_length=1)]
    left_out: tuple[str, ...] = ()
    options: SamplingDefaults = SamplingDefaults()


class Adapter(ListedFile, frozen=True, kw_only=True):
    """An adapter of an artifact.

    Attributes:
        nbytes: size of the file.
        content: what its metadata says.
    """

    what: ClassVar[str] = "an adapter"

    nbytes: FileBytes
    content: AdapterContent

    def describe(self) -> str:
        """Says what it is and brings, in a line."""
        content, brought = self.content, self.content.options.describe()
        text = f"rank {content.rank}, {in_bytes(self.nbytes)}, of {' and '.join(map(str, content.loras))}"
        return f"{text}; {brought}" if brought else text


class PlacedAdapter(NamedTuple):
    """An adapter, and where its file is."""

    path: Path
    adapter: Adapter


def check_names(adapters: Mapping[str, Adapter]) -> None:
    """Raises ValueError for a name of an adapter that no option could give."""
    for name in adapters:
        if not NAME.fullmatch(name):
            raise ValueError(f"an adapter is named {name!r}")
