"""The programs that make frames of the last latents.

A video's frames leave while later ones are decoded: ``decode_first`` makes the first frame and begins
``past``, the history of the decoder's layers; ``decode_video`` makes the frames of one piece of latents after
all earlier ones, and ``past`` is donated to it. So one program decodes a video of any number of frames, in
memory that does not grow with them. A model with windows passes the last frames on too, which the next window
may begin with. Where ``flows`` says no, ``decode_video`` makes a whole video at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.params import bind
from wanbuild.models.tiny_vae import TinyVAE
from wanbuild.models.vae import HISTORY, WanVAE
from wanbuild.programs.chunk_programs import piece_of
from wanbuild.programs.profile_parts import ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanrun.artifact.manifest import TINY_VAE


def flows(parts: ProfileParts) -> bool:
    """Returns whether frames leave while later ones are decoded.

    They do not for a single frame, nor for tiles: each tile has all frames, so that one history is kept.
    """
    return parts.shape.num_frames > 1 and not parts.options.vae_tile


def begins_apart(parts: ProfileParts) -> bool:
    """Returns whether the first frame has a separate program: where pieces are alike it needs none."""
    return flows(parts) and not parts.kernels.pieces_alike


def decode_first(parts: ProfileParts) -> ProgramSpec:
    """Returns the program normalised latents (C, 1, h, w) float32 -> uint8 (1, H, W, 3), and the state."""
    channels, _, *cells = _one_video(parts).shape

    def decode_first(vae: Any, latents: jax.Array) -> dict[str, Any]:
        return _piece(parts, vae, latents, {})

    latents = jax.ShapeDtypeStruct((channels, 1, *cells), jnp.float32)
    return parts.spec(decode_first, {"vae": parts.weights["vae"], "latents": latents})


def decode_video(parts: ProfileParts) -> ProgramSpec:
    """Returns the program normalised latents (C, n, h, w) float32 of one piece -> uint8 (4 n, H, W, 3).

    It takes the state of the piece before, ``past``, and returns that for the next one. Where pieces are
    alike, ``first`` is 1 for the first one, whose last latent and last frame are the video's first; its
    ``past`` is zeros. For a model with windows ``last_frames``, float32 in [-1, 1] with zeros in front, is
    passed on in the same way: the next window may begin with them.

    A video that is decoded at once: (C, T, h, w) -> (F, H, W, 3), and ``last_frames``. T is without the
    latent frames in front of the video's own, so that profiles which differ only in those share the program.
    """
    if not flows(parts):
        return _decode_whole(parts)
    channels, frames, *cells = _one_video(parts).shape
    latents = jax.ShapeDtypeStruct((channels, _length(parts, frames - 1), *cells), jnp.float32)
    state = _state(parts, latents)
    arguments = {"vae": parts.weights["vae"], "latents": latents, **state}
    if parts.kernels.pieces_alike:
        arguments["first"] = jax.ShapeDtypeStruct((), jnp.int32)

    def decode_video(
        vae: Any, latents: jax.Array, first: jax.Array | None = None, **state: Any
    ) -> dict[str, Any]:
        return _piece(parts, vae, latents, state, None if first is None else first > 0)

    return parts.spec(decode_video, arguments, donate=tuple(state))


def _length(parts: ProfileParts, frames: int) -> int:
    """Returns the latent frames of a piece: as many pieces as the option requires, of equal length."""
    if parts.model.chunks is not None:
        return piece_of(parts)
    # What fills the last piece would be among a window's last frames: with windows none is filled.
    count = -(-frames // parts.options.vae_decode_chunk)
    while parts.variant.previous_frames and frames % count:
        count += 1
    return -(-frames // count)


def _state(parts: ProfileParts, latents: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Returns the abstract state that pieces of these latents pass on."""

    def begun(vae: Any, latents: jax.Array) -> dict[str, Any]:
        return _piece(parts, vae, latents, {}, jnp.bool_(True))

    if parts.kernels.pieces_alike:
        made = parts.spec(begun, {"vae": parts.weights["vae"], "latents": latents}).outputs
    else:
        made = parts.outputs(decode_first)
    return {name: tree for name, tree in made.items() if name != "frames"}


def _piece(
    parts: ProfileParts,
    vae: Any,
    latents: jax.Array,
    state: Mapping[str, Any],
    first: jax.Array | None = None,
) -> dict[str, Any]:
    """Returns the frames of a piece, and the state for the next one, which is empty before the first one."""
    module: WanVAE = parts.modules["vae"]
    keep = parts.variant.previous_frames

    def finish(frames: jax.Array) -> tuple[jax.Array, ...]:
        return (_to_uint8(frames), frames[:, -keep:]) if keep else (_to_uint8(frames),)

    (frames, *kept), left = bind(module, vae).decode_piece(
        _denormalised(parts, latents)[None],
        state.get(HISTORY),
        dtype=parts.vae_dtype,
        algorithm=parts.kernels.convolution,
        first=first,
        finish=finish,
    )
    made = {"frames": frames[0], HISTORY: left}
    if not kept:
        return made
    last = kept[0][0]
    if first is not None:
        before = jnp.arange(len(last)) < len(last) - 1
        last = jnp.where((first & before)[:, None, None, None], 0.0, last)
    earlier = state.get("last_frames", jnp.zeros((keep, *last.shape[1:])))
    return made | {"last_frames": jnp.concatenate([earlier, last])[-keep:]}


def _decode_whole(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of a whole video."""
    module: WanVAE = parts.modules["vae"]
    keep = parts.variant.previous_frames

    def decode_video(vae: Any, latents: jax.Array) -> dict[str, Any]:
        decoded = bind(module, vae).decode(
            _denormalised(parts, latents)[None],
            parts.options.vae_decode_chunk,
            dtype=parts.vae_dtype,
            algorithm=parts.kernels.convolution,
            alike=parts.kernels.pieces_alike,
            finish=_to_uint8,
            keep_last=keep,
            tile=parts.options.vae_tile,
        )
        if not keep:
            return {"frames": decoded[0]}
        frames, last = decoded
        return {"frames": frames[0], "last_frames": last[0]}

    return parts.spec(decode_video, {"vae": parts.weights["vae"], "latents": _one_video(parts)})


def _denormalised(parts: ProfileParts, latents: jax.Array) -> jax.Array:
    """Returns latents (C, T, h, w) with the mean and deviation of the VAE's."""
    config = parts.configs["vae"]
    # The reference divides by a rounded 1/std; the same order of roundings keeps uint8 equal.
    inverse_std = 1.0 / jnp.asarray(config.latents_std, jnp.float32)
    mean = jnp.asarray(config.latents_mean, jnp.float32)
    return latents / inverse_std[:, None, None, None] + mean[:, None, None, None]


def _to_uint8(frames: jax.Array) -> jax.Array:
    unit = jnp.clip(frames.astype(jnp.float32) / 2 + 0.5, 0, 1)
    return jnp.round(unit * 255).astype(jnp.uint8)


def decode_tiny(parts: ProfileParts) -> ProgramSpec:
    """Returns the program that decodes like ``decode_video``, by the tiny decoder, on each device of a mesh.

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


def _one_video(parts: ProfileParts) -> jax.ShapeDtypeStruct:
    """Returns the latents of one video, without those in front of the video."""
    channels, frames, *cells = parts.latents.shape[1:]
    return jax.ShapeDtypeStruct((channels, frames - parts.leading, *cells), jnp.float32)
