"""The table of programs: their names, when the runtime runs them, which profiles have them, how each is made.

All weights are arguments; guidance_scale, timesteps and solver coefficients are inputs, so changing them
needs no new executable. A program's arguments are listed by name, and its result is a dict, so the runtime
passes the outputs of one program to the next without knowing their meaning.

A new kind of program is a function here, or in a module of its own, and a row of ``PROGRAMS``. The manifest
records its role, and everything else follows from that: see ``wanrun.artifact.programs.Role``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.components import KINDS
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.clip import CLIPImageEncoder
from wanbuild.models.params import bind
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.umt5 import UMT5Encoder
from wanbuild.models.vae import WanVAE
from wanbuild.programs.denoiser import HISTORY, Denoiser
from wanbuild.programs.parts import Maker, Parts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.spreading import is_staged, spread
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.programs import Role
from wanrun.artifact.staged import spread_name
from wanrun.denoising.solvers import COLUMNS
from wanrun.errors import UsageError

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
    role: Role
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


def encode_image(parts: Parts) -> ProgramSpec:
    """Returns the program pixels (N, S, S, 3) float32 -> image_tokens (N, tokens, image_dim)."""
    module: CLIPImageEncoder = parts.modules["image_encoder"]
    size = parts.configs["image_encoder"].image_size

    def encode_image(image_encoder: Any, pixels: jax.Array) -> dict[str, Any]:
        return {"image_tokens": bind(module, image_encoder)(pixels, parts.dtype)}

    pixels = jax.ShapeDtypeStruct((parts.variant.encoded_images, size, size, 3), jnp.float32)
    return parts.spec(encode_image, {"image_encoder": parts.weights["image_encoder"], "pixels": pixels})


def encode_video(parts: Parts) -> ProgramSpec:
    """Returns the program images, videos -> condition of the steps: see ``wanbuild.variants``."""
    kind = parts.variant.conditioner
    assert kind is not None
    conditioner = kind(
        module=parts.modules["vae"],
        config=parts.configs["vae"],
        inputs=parts.variant.inputs,
        width=parts.shape.width,
        height=parts.shape.height,
        num_frames=parts.shape.num_frames,
        num_references=parts.shape.num_references,
        chunk=parts.options.vae_encode_chunk,
        dtype=parts.vae_dtype,
        algorithm=parts.kernels.convolution,
        alike=parts.kernels.pieces_alike,
    )

    def encode_video(vae: Any, **media: jax.Array) -> dict[str, Any]:
        return conditioner(vae, **media)

    return parts.spec(encode_video, {"vae": parts.weights["vae"], **conditioner.arguments()})


def prepare(parts: Parts) -> ProgramSpec:
    """Returns the program of the arrays that all steps share: cross-attention cache and RoPE tables.

    Inputs: embeddings (P, L, text_dim) of P prompts, the positive one first; for a model that takes them,
    image_tokens of ``encode_image`` and face_video (F, S, S, 3) uint8.
    """
    module: WanTransformer = parts.modules["transformer"]
    arguments = {"transformer": parts.weights["transformer"], "embeddings": parts.embeddings}
    extra: dict[str, Any] = {}
    if "image_encoder" in parts.modules:
        arguments |= parts.outputs(encode_image)
        extra["image_multiple"] = parts.kernels.image_multiple
    config = parts.configs["transformer"]
    arguments |= parts.variant.prepare_arguments(config, parts.shape.num_frames)

    def prepare(transformer: Any, embeddings: jax.Array, **inputs: jax.Array) -> dict[str, Any]:
        model = bind(module, transformer)
        kv, rope = model.prepare(embeddings, parts.latent_shape, parts.dtype, **inputs, **extra)
        return {"kv": kv, "rope": rope}

    return parts.spec(prepare, arguments)


def step(parts: Parts) -> ProgramSpec:
    """Returns the program of a step: latents (B, C, T, h, w), solver history -> those after the step.

    ``coefficients`` is a row of the solver's table (``solvers.COLUMNS``), ``timestep`` and ``guidance_scale``
    are float32 scalars. Latents and history are donated.
    """
    return _denoising(parts, "step")


def scan(parts: Parts) -> ProgramSpec:
    """Returns the program of the steps [first, last): ``step`` in a loop on the device.

    ``coefficients`` (max_steps, 9) and ``timesteps`` (max_steps,) are float32, and their padding is not read;
    ``first`` and ``last`` are int32 scalars, so any number of steps is one program. With two experts it is
    called once for each: a branch inside it would take the weights of both as arguments.
    """
    return _denoising(parts, "scan")


def _denoising(parts: Parts, form: Role) -> ProgramSpec:
    """Returns the program of a form of the loop."""
    config, given = parts.configs["transformer"], dict[str, Any]()
    denoiser = Denoiser(parts.modules["transformer"], attention_form(parts.kernels), parts.dtype)
    state = _state_of(parts)
    if parts.shape.guidance:
        given["guidance_scale"] = jax.ShapeDtypeStruct((), jnp.float32)
    if parts.variant.conditioner:
        given |= parts.outputs(encode_video)
    _check_channels(parts, given.get("condition", {}))
    given |= parts.variant.step_arguments(config, config.grid(parts.latent_shape)[0])
    weights = {"transformer": parts.weights["transformer"]}
    arguments = {**weights, **parts.outputs(prepare), **state, **_rows_of(parts, form), **given}
    function = denoiser.step if form == "step" else denoiser.loop
    return parts.spec(function, arguments, donate=tuple(state))


def _state_of(parts: Parts) -> dict[str, Any]:
    """Returns the abstract arrays that the steps pass on."""
    latents = jax.ShapeDtypeStruct(parts.latents.shape, jnp.dtype(parts.options.scheduler_dtype))
    return {"latents": latents, "history": dict.fromkeys(HISTORY, latents)}


def _rows_of(parts: Parts, form: Role) -> dict[str, Any]:
    """Returns the abstract arguments that choose the steps of a call."""
    steps = () if form == "step" else (parts.options.max_steps,)
    rows = {
        "coefficients": jax.ShapeDtypeStruct((*steps, len(COLUMNS)), jnp.float32),
        "timestep" if form == "step" else "timesteps": jax.ShapeDtypeStruct(steps, jnp.float32),
    }
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return rows if form == "step" else {**rows, "first": index, "last": index}


def _check_channels(parts: Parts, condition: dict[str, Any]) -> None:
    """Checks that the transformer's input channels are those of the latents and of the condition.

    Raises:
        UsageError: if they are not: the variant has no conditioner, or another one.
    """
    latents, taken = parts.model.latent_channels, parts.configs["transformer"].in_channels
    given = condition["channels"].shape[0] if "channels" in condition else 0
    if taken != latents + given:
        raise UsageError(
            f"the transformer's input channels do not fit the conditioner of {parts.model.variant}",
            expected=f"{latents} channels of latents and {taken - latents} of the condition",
            found=f"a condition of {given}",
            remedy="give the variant a conditioner that returns so many channels",
        )


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
        )
        if not keep:
            return {"frames": decoded[0]}
        frames, last = decoded
        return {"frames": frames[0], "last_frames": last[0]}

    channels, frames, *cells = parts.latents.shape[1:]
    one = jax.ShapeDtypeStruct((channels, frames - parts.leading, *cells), jnp.float32)
    return parts.spec(decode_video, {"vae": parts.weights["vae"], "latents": one})


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


def _loop(form: Role) -> Callable[[Parts], bool]:
    """Returns whether a profile is built with a form of the loop."""
    return lambda parts: parts.options.loop in (form, "both")


PROGRAMS: tuple[ProgramKind, ...] = (
    *(
        ProgramKind(f"encode_text_{length}", "text", functools.partial(encode_text, length=length))
        for length in TEXT_LENGTHS
    ),
    ProgramKind("encode_text", "text", encode_text),
    ProgramKind("encode_image", "once", encode_image, lambda parts: "image_encoder" in parts.modules),
    ProgramKind("encode_video", "window", encode_video, lambda parts: parts.variant.conditioner is not None),
    ProgramKind("prepare", "prepare", prepare),
    ProgramKind("denoise_step", "step", step, _loop("step")),
    ProgramKind("denoise_loop", "scan", scan, _loop("scan")),
    ProgramKind("decode_video", "decode", decode_video),
    *(_spread(name) for name in KINDS if name != TRANSFORMERS[1]),  # two experts share one
)
"""All kinds of programs. Programs of one role run in this order; the first step is the full one."""
