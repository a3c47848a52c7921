"""The options of ``wanbuild convert``, and of the section ``convert`` of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

import wanrun
from wanbuild.published.samplings import SAMPLINGS
from wanrun.rows import Row, option

STORED = ("bfloat16", "float32")
"""The dtypes that are computed and stored in."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]

SAME_TENSORS = ("self-forcing-wan2.1",)
"""The variants whose weights have the tensors of another one's."""

_EIGHT_BITS = tuple(one.name for one in wanrun.EIGHT_BITS.values())

_WEIGHTS = "a .safetensors or .gguf file, or the folder or the index of its shards"


class PlainConvert(Struct, frozen=True, kw_only=True):
    """The options of ``wanbuild convert`` that a conversion takes as they are given."""

    variant: Annotated[
        str | None,
        option(
            "The variant, where the transformer's tensors are those of another one.",
            choices=SAME_TENSORS,
            default="what the tensors or SOURCE say",
        ),
    ] = None

    revision: Annotated[
        str | None, option("Branch, tag or commit, where SOURCE is a hub id.", default="main")
    ] = None
    force: Annotated[
        bool, option("Replace an existing artifact; programs that stay valid are kept.", recipe=False)
    ] = False
    strict: Annotated[
        bool, option("Refuse a LoRA with tensors of layers that the model lacks; else they are left out.")
    ] = False
    negative_prompt: Annotated[str | None, option("Default negative prompt of the artifact.")] = None
    threads: Annotated[Count | None, option("Worker threads.", default="one per core", recipe=False)] = None


class Convert(Struct, frozen=True, kw_only=True):
    """The options of ``wanbuild convert``, and of the section ``convert`` of a recipe."""

    transformer: Annotated[
        Path | None, option(f"The transformer, or the high-noise expert: {_WEIGHTS}.", value="FILE|DIR")
    ] = None
    transformer_2: Annotated[Path | None, option(f"The low-noise expert: {_WEIGHTS}.", value="FILE|DIR")] = (
        None
    )
    vae: Annotated[Path | None, option(f"The VAE: {_WEIGHTS}.", value="FILE|DIR")] = None
    tiny_vae: Annotated[
        Path | None,
        option(
            "A tiny decoder to add, for --decoder tiny: taew2_1.safetensors, or taew2_2.safetensors for "
            "TI2V.",
            value="FILE",
        ),
    ] = None
    text_encoder: Annotated[Path | None, option(f"The text encoder: {_WEIGHTS}.", value="FILE|DIR")] = None
    image_encoder: Annotated[Path | None, option(f"The image encoder: {_WEIGHTS}.", value="FILE|DIR")] = None
    tokenizer: Annotated[
        Path | None,
        option(
            "The tokenizer's folder, its tokenizer.json, or the hub id of a repository that has one.",
            value="DIR",
        ),
    ] = None
    config: Annotated[
        Sequence[str],
        option(
            "Configs in place of SOURCE's or of assumed ones: a folder in the diffusers layout, or files. "
            "PART is transformer, transformer_2, vae, text_encoder, image_encoder or scheduler; repeatable.",
            value="DIR|PART=FILE,...",
            commands={
                "recipe": {
                    "help": "Configs in place of the source's, or of assumed ones: a folder or files.",
                    "many": False,
                }
            },
        ),
    ] = ()
    weights_dtype: Annotated[
        str | None, option("Stored dtype of the transformers.", choices=STORED, default="bfloat16")
    ] = None
    vae_weights_dtype: Annotated[
        str | None, option("Stored dtype of the VAE.", choices=STORED, default="float32")
    ] = None
    text_weights_dtype: Annotated[
        str | None,
        option("Stored dtype of the text encoder and the image encoder.", choices=STORED, default="bfloat16"),
    ] = None
    lora: Annotated[
        Sequence[str], option("Merged into every transformer; repeatable.", value="FILE[:SCALE]")
    ] = ()
    lora_high: Annotated[
        Sequence[str], option("Merged into the high-noise expert.", value="FILE[:SCALE]")
    ] = ()
    lora_low: Annotated[Sequence[str], option("Merged into the low-noise expert.", value="FILE[:SCALE]")] = ()
    sampling: Annotated[
        str | None,
        option(
            f"Defaults of a distilled model: {', '.join(SAMPLINGS)}, or a file (.toml).",
            value="NAME|FILE",
        ),
    ] = None
    defaults: Annotated[
        Sequence[str],
        option(
            f"Default option of a generation; repeatable. NAME is {', '.join(DEFAULTS[:-1])} or "
            f"{DEFAULTS[-1]}; timesteps are separated by commas.",
            flag="--default",
            value="NAME=VALUE",
            recipe=False,
        ),
    ] = ()
    quantise: Annotated[
        str | None,
        option(
            "Store the weights of the transformers' blocks and of the text encoder's feed-forward in 8 bits, "
            "with a scale for each row, or for each 32 of its values (q8_0, as GGUF); source: as a source of "
            "8 bits has them.",
            choices=(*_EIGHT_BITS, "source"),
            commands={
                "plan": {
                    "help": "Plan weights of 8 bits, as of wanbuild convert.",
                    "choices": _EIGHT_BITS,
                    "default": "as a recipe says",
                }
            },
        ),
    ] = None
    keep: Annotated[
        Sequence[str],
        option(
            "Layers that --quantise leaves unchanged, such as 'blocks/attn2/*' or 'text_encoder/*'; "
            "repeatable.",
            value="PATTERN",
        ),
    ] = ()
    plain: PlainConvert = PlainConvert()


DEFAULTS = (
    "steps",
    "guidance_scale",
    "guidance_scale_2",
    "guidance_start",
    "guidance_end",
    "boundary",
    "flow_shift",
    "solver",
    "timesteps",
    "fps",
)
"""The options of a generation that a model may have defaults for, by key."""


def default_rows() -> dict[str, Row]:
    """Returns the options that can be defaults, by their keys."""
    by_key = {row.key: row for row in wanrun.options()}
    return {key: by_key[key] for key in DEFAULTS}
