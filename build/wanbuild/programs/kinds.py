"""The table of programs: their names, when the runtime runs them, which profiles have them, how each is made.

All weights are arguments; guidance_scale, timesteps and solver coefficients are inputs, so changing them
needs no new executable. A program's arguments are listed by name, and its result is a dict, so the runtime
passes the outputs of one program to the next without knowing their meaning.

A new kind of program is a function here, or in a module of its own, and a row of ``PROGRAMS``. The manifest
records its role. When it runs, what it costs and what proves it follow from the role's row: see
``wanrun.artifact.roles``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.components import KINDS
from wanbuild.models.params import bind
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.tiny_vae import TinyVAE
from wanbuild.models.umt5 import UMT5Encoder
from wanbuild.models.vae import WanVAE
from wanbuild.programs import streaming
from wanbuild.programs.parts import Maker, Parts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.spreading import is_staged, spread
from wanbuild.programs.steps import encode_image, encode_start, encode_video, prepare, scan, step
from wanbuild.programs.streaming import STACKS
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS
from wanrun.artifact.roles import RoleName
from wanrun.artifact.staged import spread_name

ENCODE_BATCH = 1
"""Prompts per call of a text encoder. The number is fixed, so an embedding does not depend on its batch.

It is one, not two: 512 tokens already saturate the matmuls, and a cached or unused negative prompt then costs
nothing (docs/notes/cpu.md, "encode_text").
"""

TEXT_LENGTHS = (64, 128, 256)
"""Tokens of the shorter text encoders: most prompts are short, and padding costs like text."""


def _always(parts: Parts) -> bool:
    del parts
    return True


@dataclass(frozen=True)
class ProgramKind:
    """A row of the table.

    Attributes:
        name: the program's name.
        role: when the runtime runs it.
        make: makes the program; its inputs and outputs have names.
        built: whether a profile has it.
    """

    name: str
    role: RoleName
    make: Maker
    built: Callable[[Parts], bool] = _always


def kinds_of(parts: Parts) -> Iterator[ProgramKind]:
    """Yields the rows of the programs that a profile has, in the table's order."""
    return (kind for kind in PROGRAMS if kind.built(parts))


def encode_text(parts: Parts, length: int | None = None) -> ProgramSpec:
    """Returns the program ids, mask (1, L) int32 -> embeddings (1, L, text_dim).

    Embeddings are zero after the prompt's length.

    Args:
        parts: what it is made of.
        length: L; None for the longest. Padding is masked, so a prompt of n tokens has the same embedding for
            every L >= n.
    """
    module: UMT5Encoder = parts.modules["text_encoder"]
    tokens = jax.ShapeDtypeStruct((ENCODE_BATCH, length or parts.max_length), jnp.int32)

    def encode_text(text_encoder: Any, ids: jax.Array, mask: jax.Array) -> dict[str, Any]:
        return {"embeddings": bind(module, text_encoder)(ids, mask, parts.dtype)}

    arguments = {"text_encoder": parts.weights["text_encoder"], "ids": tokens, "mask": tokens}
    return parts.spec(encode_text, arguments)


def decode_video(parts: Parts) -> ProgramSpec:
    """Returns the program normalised latents (C, T, h, w) float32 of one video -> uint8 (F, H, W, 3).

    T is without the latent frames in front of the video's own, so that profiles which differ only in those
    share the program. Its output is frames; for a model with windows also last_frames, float32 in [-1, 1]:
    the next window may begin with them.
    """
    module: WanVAE = parts.modules["vae"]
    config = parts.configs["vae"]
    # The reference divides by a rounded 1/std; the same order of roundings keeps uint8 equal.
    inverse_std = 1.0 / jnp.asarray(config.latents_std, jnp.float32)
    mean = jnp.asarray(config.latents_mean, jnp.float32)
    keep = parts.variant.previous_frames

    def to_uint8(frames: jax.Array) -> jax.Array:
        unit = jnp.clip(frames.astype(jnp.float32) / 2 + 0.5, 0, 1)
        return jnp.round(unit * 255).astype(jnp.uint8)

    def decode_video(vae: Any, latents: jax.Array) -> dict[str, Any]:
        z = latents / inverse_std[:, None, None, None] + mean[:, None, None, None]
        decoded = bind(module, vae).decode(
            z[None],
            parts.options.vae_decode_chunk,
            dtype=parts.vae_dtype,
            algorithm=parts.kernels.convolution,
            alike=parts.kernels.pieces_alike,
            finish=to_uint8,
            keep_last=keep,
            tile=parts.options.vae_tile,
        )
        if not keep:
            return {"frames": decoded[0]}
        frames, last = decoded
        return {"frames": frames[0], "last_frames": last[0]}

    return parts.spec(decode_video, {"vae": parts.weights["vae"], "latents": _one_video(parts)})


def decode_tiny(parts: Parts) -> ProgramSpec:
    """Returns the program that does what ``decode_video`` does by the tiny decoder, on each device of a mesh.

    It takes latents as they are, without mean and deviation. The frames with which a next window may begin
    are its own.
    """
    module: TinyVAE = parts.modules[TINY_VAE]
    keep = parts.variant.previous_frames

    def decode_tiny(tiny_vae: Any, latents: jax.Array) -> dict[str, Any]:
        frames = bind(module, tiny_vae).decode(
            latents[None],
            parts.options.vae_decode_chunk,
            dtype=parts.vae_dtype,
            algorithm=parts.kernels.convolution,
            finish=lambda frames: jnp.round(frames * 255).astype(jnp.uint8),
        )[0]
        if not keep:
            return {"frames": frames}
        last = frames[-keep:].astype(jnp.float32) / 127.5 - 1
        before = ((keep - len(last), 0), (0, 0), (0, 0), (0, 0))
        return {"frames": frames, "last_frames": jnp.pad(last, before)}

    arguments = {TINY_VAE: parts.weights[TINY_VAE], "latents": _one_video(parts)}
    return parts.spec(decode_tiny, arguments)


def _one_video(parts: Parts) -> jax.ShapeDtypeStruct:
    """Returns the latents of one video, without those in front of its own."""
    channels, frames, *cells = parts.latents.shape[1:]
    return jax.ShapeDtypeStruct((channels, frames - parts.leading, *cells), jnp.float32)


def _spread(component: str) -> ProgramKind:
    """Returns the row of the program that spreads a component's weights over a mesh."""

    def make(parts: Parts) -> ProgramSpec:
        assert parts.mesh is not None
        record, weights = parts.components[component], parts.weights[component]
        return spread(component, record, weights, PARAMETERS, parts.mesh)

    def built(parts: Parts) -> bool:
        if parts.mesh is None or component not in parts.components:
            return False
        return any(is_staged(one.layout) for one in parts.components[component].parameters.values())

    return ProgramKind(spread_name(component), "spread", make, built)


def _loop(*forms: str) -> Callable[[Parts], bool]:
    """Returns whether a profile is built with one of these forms of the loop."""
    return lambda parts: any(form in forms for form in parts.options.forms)


def _streamed(name: str, role: RoleName, make: Maker) -> ProgramKind:
    return ProgramKind(f"stream_{name}", role, make, _loop("stream"))


def _streamed_layers(stack: str) -> tuple[ProgramKind, ...]:
    """Returns the rows of the programs of one layer of a stack."""

    def built(parts: Parts) -> bool:
        return _loop("stream")(parts) and stack in parts.modules["transformer"].stacks

    return (
        ProgramKind(f"stream_keys_{stack}", "keys", functools.partial(streaming.keys, stack=stack), built),
        ProgramKind(f"stream_{stack}", "layer", functools.partial(streaming.layer, stack=stack), built),
    )


PROGRAMS: tuple[ProgramKind, ...] = (
    *(
        ProgramKind(f"encode_text_{length}", "text", functools.partial(encode_text, length=length))
        for length in TEXT_LENGTHS
    ),
    ProgramKind("encode_text", "text", encode_text),
    ProgramKind("encode_image", "once", encode_image, lambda parts: "image_encoder" in parts.modules),
    ProgramKind("encode_video", "window", encode_video, lambda parts: parts.variant.conditioner is not None),
    ProgramKind("encode_start", "start", encode_start, lambda parts: parts.options.video_to_video),
    ProgramKind("prepare", "prepare", prepare, _loop("step", "scan")),
    ProgramKind("denoise_step", "step", step, _loop("step")),
    ProgramKind("denoise_loop", "scan", scan, _loop("scan")),
    _streamed("context", "context", streaming.context),
    _streamed("enter", "enter", streaming.enter),
    *(kind for stack in STACKS for kind in _streamed_layers(stack)),
    _streamed("leave", "leave", streaming.leave),
    ProgramKind("decode_video", "decode", decode_video),
    ProgramKind("decode_tiny", "decode_tiny", decode_tiny, lambda parts: TINY_VAE in parts.modules),
    *(_spread(name) for name in KINDS if name != TRANSFORMERS[1]),  # two experts share one
)
"""All kinds of programs. Programs of one role run in this order; the first step is the full one."""
