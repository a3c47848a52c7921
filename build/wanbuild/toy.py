"""Writes a small random checkpoint in the published folder layout, offline and without torch.

Every parameter is random and of a size that keeps activations in range: a constant or saturated video
would hide mistakes. Other sizes, up to the published ones, come from overriding config fields.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.published import (
    MODEL_INDEXES,
    PUBLISHED_TEXT_ENCODER,
    PUBLISHED_TRANSFORMERS,
    PUBLISHED_VAE,
    PUBLISHED_VAE_2_2,
    PUBLISHED_VAE_IN_A14B,
    SCHEDULER_CONFIGS,
    Config,
)
from wanbuild.shards import WEIGHT_NAMES
from wanbuild.toy_shapes import Shapes, text_encoder_shapes, transformer_shapes, vae_shapes
from wanbuild.toy_tokenizer import vocabulary, write_tokenizer
from wanbuild.toy_weights import DTYPES, write_json, write_weights
from wanrun.errors import UsageError
from wanrun.manifest import TRANSFORMERS

MARKER = "wanbuild_toy.json"
"""A file that says that a folder was written here, and so may be replaced."""


def _toy(published: Config, **sizes: Any) -> Config:
    return MappingProxyType({**published, **sizes})


# Head size 20 splits into 8, 6 and 6 for RoPE, as uneven as the published 44, 42 and 42. Sizes differ from
# one another where the published ones do, so that a swapped axis cannot pass.
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 2,
        "attention_head_dim": 20,
        "ffn_dim": 56,
        "freq_dim": 64,
        "num_layers": 3,
        "text_dim": 32,
    }
)
TOY_TRANSFORMER = _toy(PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"], **_SIZES)
TOY_VAE = _toy(PUBLISHED_VAE, base_dim=6, num_res_blocks=1)
TOY_VAE_2_2 = _toy(PUBLISHED_VAE_2_2, base_dim=6, decoder_base_dim=8, num_res_blocks=1)
TOY_TEXT_ENCODER = _toy(
    PUBLISHED_TEXT_ENCODER,
    d_ff=37,
    d_kv=8,
    d_model=32,
    num_decoder_layers=2,
    num_heads=4,
    num_layers=2,
    relative_attention_num_buckets=8,
    # Some rows more than the tokenizer has ids, as published.
    vocab_size=len(vocabulary()) + 16,
)


@dataclass(frozen=True)
class _Kind:
    library: str
    shapes: Callable[[Config], Shapes]


_TRANSFORMER = _Kind("diffusers", transformer_shapes)
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "transformer": _TRANSFORMER,
        "transformer_2": _TRANSFORMER,
        "vae": _Kind("diffusers", vae_shapes),
        "text_encoder": _Kind("transformers", text_encoder_shapes),
    }
)


@dataclass(frozen=True)
class ToyVariant:
    """What a toy of one variant is.

    Args:
        configs: config.json by component that holds weights.
        index: model_index.json, but for the scheduler's class.
    """

    configs: Mapping[str, Config]
    index: Config


def _variant(name: str, vae: Config, **transformers: Config) -> ToyVariant:
    configs = {**transformers, "vae": vae, "text_encoder": TOY_TEXT_ENCODER}
    return ToyVariant(MappingProxyType(configs), MODEL_INDEXES[name])


_A14B = _toy(PUBLISHED_TRANSFORMERS["wan2.2-t2v-a14b"], **_SIZES)
TOY_VARIANTS: Mapping[str, ToyVariant] = MappingProxyType(
    {
        "wan2.1-t2v": _variant("wan2.1-t2v", TOY_VAE, transformer=TOY_TRANSFORMER),
        "wan2.2-t2v": _variant(
            "wan2.2-t2v",
            _toy(PUBLISHED_VAE_IN_A14B, base_dim=6, num_res_blocks=1),
            transformer=_A14B,
            transformer_2=_A14B,
        ),
        "wan2.2-ti2v": _variant(
            "wan2.2-ti2v", TOY_VAE_2_2, transformer=_toy(PUBLISHED_TRANSFORMERS["wan2.2-ti2v-5b"], **_SIZES)
        ),
    }
)
"""By variant, as ``wanbuild.families`` spells it."""


def _override(name: str, base: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(changes.keys() - base.keys())
    if unknown:
        raise UsageError(
            f"the {name} config has no field {', '.join(unknown)}", expected="one of " + ", ".join(base)
        )
    return {**base, **changes}


def _check_configs(configs: Mapping[str, Mapping[str, Any]]) -> None:
    vae, text = configs["vae"], configs["text_encoder"]
    z, tokens = vae["z_dim"], len(vocabulary())
    checks = []
    for name in [name for name in TRANSFORMERS if name in configs]:
        checks += [
            (f"{name} text_dim", text["d_model"], configs[name]["text_dim"]),
            (f"{name} in_channels", z, configs[name]["in_channels"]),
            (f"{name} out_channels", z, configs[name]["out_channels"]),
        ]
    checks += [(f"length of vae {name}", z, len(vae[name])) for name in ("latents_mean", "latents_std")]
    for what, expected, found in checks:
        if expected != found:
            raise UsageError(f"{what} does not fit the other configs", expected=expected, found=found)
    if text["vocab_size"] < tokens:
        raise UsageError(
            "text_encoder vocab_size is too small", expected=f"at least {tokens}", found=text["vocab_size"]
        )


def _check_target(directory: Path, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a folder", remedy="give another folder")
    if directory.is_dir() and any(directory.iterdir()) and not (force or (directory / MARKER).exists()):
        raise UsageError(
            f"{directory} is not empty, and not a toy checkpoint",
            remedy="give another folder, or force its replacement",
        )


def _move_into_place(staging: Path, directory: Path) -> None:
    if not directory.exists():
        staging.rename(directory)
        return
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.old-", dir=directory.parent) as aside:
        old = directory.rename(Path(aside) / "old")
        try:
            staging.rename(directory)
        except OSError:
            old.rename(directory)
            raise


def write_toy(
    directory: Path,
    variant: str = "wan2.1-t2v",
    seed: int = 0,
    *,
    transformer: Mapping[str, Any] | None = None,
    transformer_2: Mapping[str, Any] | None = None,
    vae: Mapping[str, Any] | None = None,
    text_encoder: Mapping[str, Any] | None = None,
    scheduler: str = "unipc",
    flow_shift: float = 3.0,
    dtype: str = "float32",
    shards: int = 1,
    sparse: bool = False,
    force: bool = False,
) -> None:
    """Writes a random checkpoint; the same arguments give the same bytes.

    It is built in a sibling folder and renamed, so a failure leaves what was there.

    Args:
        directory: the folder to make. A toy that is already there is replaced.
        variant: one of ``TOY_VARIANTS``.
        seed: of the parameters; not negative.
        transformer: fields of transformer/config.json that differ from the variant's; of both experts where
            there are two.
        transformer_2: fields that differ in the second expert alone: no checkpoint that can be used has any.
        vae: the same for the VAE.
        text_encoder: the same for the text encoder.
        scheduler: ``unipc``, ``dpm++`` or ``euler``.
        flow_shift: the shift that scheduler_config.json states.
        dtype: of every stored tensor: ``float32``, ``float16`` or ``bfloat16``.
        shards: files per component; more than one come with an index.
        sparse: every value is zero and takes no room on the disk: for sizes that would not fit it.
        force: replace the folder whatever it holds.

    Raises:
        UsageError: if an argument is not one of its values, the configs do not fit one another, or the
            folder holds something else.
    """
    for what, value, known in (
        ("variant", variant, TOY_VARIANTS),
        ("scheduler", scheduler, SCHEDULER_CONFIGS),
        ("dtype", dtype, DTYPES),
    ):
        if value not in known:
            raise UsageError(f"unknown {what}", expected=" or ".join(known), found=value)
    if seed < 0 or shards < 1:
        raise UsageError(
            "seed or shards is out of range", expected="seed >= 0, shards >= 1", found=(seed, shards)
        )
    toy = TOY_VARIANTS[variant]
    if transformer_2 and "transformer_2" not in toy.configs:
        raise UsageError(f"{variant} has no transformer_2", remedy="change transformer")
    changes: dict[str, Mapping[str, Any]] = {
        "transformer": transformer or {},
        "transformer_2": {**(transformer or {}), **(transformer_2 or {})},
        "vae": vae or {},
        "text_encoder": text_encoder or {},
    }
    configs = {name: _override(name, base, changes[name]) for name, base in toy.configs.items()}
    configs["text_encoder"]["torch_dtype"] = dtype
    _check_configs(configs)
    directory = Path(directory).resolve()
    _check_target(directory, force)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.new-", dir=directory.parent) as temporary:
        staging = Path(temporary) / directory.name
        for name, config in configs.items():
            folder = staging / name
            folder.mkdir(parents=True)
            write_json(folder / "config.json", config)
            kind = _KINDS[name]
            write_weights(
                folder,
                name,
                WEIGHT_NAMES[kind.library],
                kind.shapes(config),
                seed=seed,
                dtype=dtype,
                shards=shards,
                sparse=sparse,
            )
        scheduler_config = dict(SCHEDULER_CONFIGS[scheduler])
        scheduler_config["shift" if "shift" in scheduler_config else "flow_shift"] = flow_shift
        (staging / "scheduler").mkdir()
        write_json(staging / "scheduler" / "scheduler_config.json", scheduler_config)
        (staging / "tokenizer").mkdir()
        write_tokenizer(staging / "tokenizer")
        index = {**toy.index, "scheduler": ["diffusers", scheduler_config["_class_name"]]}
        write_json(staging / "model_index.json", index)
        write_json(staging / MARKER, {"seed": seed, "variant": variant})
        _move_into_place(staging, directory)
