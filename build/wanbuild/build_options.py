"""The options of ``wanbuild``'s commands and of recipes: typed records, with a row for each option.

The options and the help of ``convert``, ``compile`` and ``plan``, the sections of recipes, the requests of
``compile`` and ``plan`` and the tables in docs/commands.md and docs/recipes.md derive from these records
(``wanrun.rows``). A new option is one row here, and the line that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs
from msgspec.structs import force_setattr

from wanbuild.convert_options import STORED, Convert, Count
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import USES, parse_mesh
from wanrun.artifact.guiders import BUILT
from wanrun.artifact.mesh import Sizes
from wanrun.artifact.model import MAX_STEPS
from wanrun.artifact.parameters import DtypePolicy
from wanrun.artifact.programs import Precision, ProfileOptions
from wanrun.artifact.record import MAX_SIZE
from wanrun.artifact.roles import FORMS, LOOPS, forms_of
from wanrun.artifact.target_names import W8A8
from wanrun.errors import UsageError, field
from wanrun.machine.cpu import CPU_LEVEL_FEATURES
from wanrun.request.written import parse_size
from wanrun.rows import ARGUMENT, Row, option, rows_of

Whole = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_PLANNED: Mapping[str, Mapping[str, Any]] = MappingProxyType({"plan": MappingProxyType({})})
"""The option is also one of ``plan``."""

DTYPE_OF: Mapping[str, str] = MappingProxyType(
    {
        "transformer": "weights_dtype",
        "transformer_2": "weights_dtype",
        "vae": "vae_weights_dtype",
        "tiny_vae": "vae_weights_dtype",
        "text_encoder": "text_weights_dtype",
        "image_encoder": "text_weights_dtype",
    }
)
"""The option of each component's dtype in storage."""


class BuildOptions(Struct, frozen=True, kw_only=True):
    """Choices that change a profile's programs; recorded in the manifest.

    Sums of the scheduler are in float32, whatever its dtype. The scan form's table of coefficients is padded
    to ``max_steps``. The constructor raises UsageError for the first option that is out of range.
    """

    dtype: Annotated[str, option("Compute dtype.", choices=STORED, commands=_PLANNED)] = "bfloat16"
    vae_dtype: Annotated[str, option("Compute dtype of the VAE.", choices=STORED, commands=_PLANNED)] = (
        "float32"
    )
    vae_precision: Annotated[
        Precision,
        option(
            "Precision of the VAE's float32 products on chips: high is three passes in bfloat16 on a TPU, "
            "and TF32 on an NVIDIA GPU.",
            commands=_PLANNED,
        ),
    ] = "high"
    scheduler_dtype: Annotated[
        str, option("Dtype of latents and solver history between steps.", choices=STORED)
    ] = "float32"
    vae_decode_chunk: Annotated[Count, option("Latent frames decoded at a time.", commands=_PLANNED)] = 1
    vae_encode_chunk: Annotated[Count, option("Latent frames encoded at a time.", commands=_PLANNED)] = 1
    vae_tile: Annotated[
        NotNegative,
        option(
            "Side in pixels of the tiles that the VAE works in, blended as diffusers does; 0 for none.",
            commands=_PLANNED,
        ),
    ] = 0
    loop: Annotated[
        str,
        option(
            "Forms of the denoising loop: a call per step, all steps in one call, both of these, a call per "
            "layer for wanrun --memory stream, or all.",
            choices=LOOPS,
            commands={
                "plan": {"help": "Form of the loop.", "choices": tuple(FORMS), "default": "step"},
            },
        ),
    ] = "both"
    max_steps: Annotated[Count, option("The most steps of the scan form.")] = 100
    lora_rank: Annotated[
        NotNegative,
        option(
            "Room for LoRAs that a run chooses: the largest sum of their ranks; 0 for none.",
            commands=_PLANNED,
        ),
    ] = 0
    guiders: Annotated[
        Sequence[str],
        option(
            "Guidance that a run may choose instead of cfg, for one more input of a step; repeatable.",
            choices=BUILT,
            default="none",
            flag="--guider",
            commands=_PLANNED,
        ),
    ] = ()
    video_to_video: Annotated[
        bool, option("For text to video: let a run begin with a video.", commands=_PLANNED)
    ] = False

    nag: Annotated[
        bool, option("Room for a negative prompt without guidance: for --nag-scale.", commands=_PLANNED)
    ] = False

    def __post_init__(self) -> None:
        force_setattr(self, "guiders", tuple(name for name in BUILT if name in self.guiders))
        if self.loop not in LOOPS:
            raise UsageError(
                "unsupported",
                f"{field('loop')} cannot be built",
                expected=" or ".join(LOOPS),
                found=self.loop,
            )
        if not 1 <= self.max_steps <= MAX_STEPS:
            raise UsageError(
                "out_of_range",
                f"{field('max_steps')} is out of range",
                expected=f"1 to {MAX_STEPS}",
                found=self.max_steps,
            )
        for name, least in {
            "vae_decode_chunk": 1,
            "vae_encode_chunk": 1,
            "vae_tile": 0,
            "lora_rank": 0,
        }.items():
            if not least <= (found := getattr(self, name)) <= MAX_SIZE:
                raise UsageError(
                    "out_of_range",
                    f"{field(name)} is out of range",
                    expected=f"{least} to {MAX_SIZE}",
                    found=found,
                )

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the denoising loop."""
        return forms_of(self.loop)

    @classmethod
    def of(cls, recorded: ProfileOptions) -> BuildOptions:
        """Returns the choices that a profile was built with."""
        return cls(**{name: getattr(recorded, name) for name in cls.__struct_fields__})

    def recorded(self, dtypes: Mapping[str, DtypePolicy]) -> ProfileOptions:
        """Returns the manifest's record of these choices and the storage dtypes, which change programs."""
        stored = {
            option: dtypes[name].weights
            for option, name in (
                ("weights_dtype", "transformer"),
                ("text_weights_dtype", "text_encoder"),
                ("image_weights_dtype", "image_encoder"),
                ("vae_weights_dtype", "vae"),
            )
            if name in dtypes
        }
        return msgspec.convert({**structs.asdict(self), **stored}, ProfileOptions)


class CompileRequest(Struct, frozen=True):
    """The options of ``wanbuild compile``, and of a recipe's section ``compile``: profiles and their targets.

    Every combination of size, frames and guidance is built. Without any, size and frames are as the model was
    published, and guidance as the artifact's default scale says.
    """

    artifact: Annotated[Path, ARGUMENT]
    """The artifact's folder."""
    targets: Annotated[
        Sequence[str],
        option(
            "Repeatable: local (this machine's accelerator, or else its CPU), cpu (its CPU), an x86-64 CPU "
            f"level ({', '.join(CPU_LEVEL_FEATURES)}), or a chip that need not be here: {', '.join(CHIPS)}, "
            "or what is short for one, such as 4090. "
            f"With {W8A8} at its end, layers of 8-bit weights multiply in 8 bits.",
            default="local",
            flag="--target",
        ),
    ] = ("local",)
    sizes: Annotated[
        Sequence[tuple[int, int]],
        option(
            "Repeatable.",
            default="the model's published size",
            flag="--size",
            value="WxH",
            parse=parse_size,
            commands={"plan": {"help": "", "many": False}},
        ),
    ] = ()
    frames: Annotated[
        Sequence[Whole],
        option(
            "4n + 1; repeatable.",
            default="the model's published frame count",
            commands={"plan": {"help": "4n + 1.", "many": False}},
        ),
    ] = ()
    guidance: Annotated[
        Sequence[bool],
        option(
            "Whether steps can have guidance. Without it a second prompt's keys take no memory.",
            default="if the artifact's guidance_scale is above 1",
            commands={"plan": {"default": "the model's", "many": False}},
        ),
    ] = ()
    num_videos: Annotated[Count, option("Videos per prompt.", commands=_PLANNED)] = 1
    num_references: Annotated[
        NotNegative,
        option("Reference images of each video (VACE).", flag="--reference-images", commands=_PLANNED),
    ] = 0
    mesh: Annotated[
        Sizes,
        option(
            "Devices by axis, of: " + "; ".join(f"{axis} ({use})" for axis, use in USES.items()) + ".",
            default="one device",
            value="AXIS=N,...",
            parse=parse_mesh,
            commands={"plan": {"help": "Devices by axis.", "default": "the fastest mesh that fits"}},
        ),
    ] = msgspec.field(default_factory=dict)
    attention: Annotated[
        str | None,
        option(
            "Attention in the steps of an NVIDIA GPU: cudnn, or mosaic (h100, h200, h20, b200), which is "
            "compiled without the GPU.",
            choices=("cudnn", "mosaic"),
            default="as the target was built before; else mosaic for such a GPU that is not here and heads "
            "of 128, or cudnn",
        ),
    ] = None
    options: BuildOptions = BuildOptions()


class PlanRequest(Struct, frozen=True):
    """The options of ``wanbuild plan``; one that is not given is as the subject says, else as published."""

    target: Annotated[
        str,
        option("A chip, and how many: v7x-8, 4090, v6e-w8a8; this machine: cpu, local.", value="CHIP[-N]"),
    ]
    choices: Annotated[Mapping[str, Any], ARGUMENT] = msgspec.field(default_factory=dict)
    """Options of ``wanbuild compile`` by name, each with one value."""
    steps: Annotated[Count | None, option("Denoising steps.", default="the model's")] = None
    all_meshes: Annotated[bool, option("List every mesh.")] = False


RECORDS: Mapping[str, type[Struct]] = MappingProxyType(
    {"compile": CompileRequest, "convert": Convert, "plan": PlanRequest}
)
"""The records by command."""


def rows_for(command: str) -> tuple[Row, ...]:
    """Returns a command's options, required ones first; they include those it shares with other commands."""
    shared = [
        row.of(command)
        for other, record in RECORDS.items()
        for row in rows_of(record)
        if other != command and command in row.commands
    ]
    return tuple(sorted((*shared, *rows_of(RECORDS[command])), key=lambda row: not row.required))


def recipe_rows(section: str) -> tuple[Row, ...]:
    """Returns the options of a section of a recipe, which has the name of its command."""
    rows = [row for row in rows_of(RECORDS[section]) if row.recipe]
    return tuple(row.of("recipe") if "recipe" in row.commands else row for row in rows)
