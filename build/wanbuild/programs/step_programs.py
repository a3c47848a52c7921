"""The programs of the denoising loop, and those that compute its conditions.

``wanbuild.programs.kinds`` says which profiles have them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention_forms import attention_form
from wanbuild.models.clip import CLIPImageEncoder
from wanbuild.models.low_rank import with_slots
from wanbuild.models.params import bind
from wanbuild.models.transformer import WanTransformer
from wanbuild.programs.denoiser import Denoiser
from wanbuild.programs.profile_parts import ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.variants.conditioner import Conditioner
from wanbuild.variants.from_video import PastFrames, VideoStart
from wanrun.artifact.guiders import NAG, NAG_DEFAULTS, inputs_of
from wanrun.denoising.solvers import COLUMNS, HISTORY
from wanrun.denoising.steps import TABLES
from wanrun.errors import UsageError


def encode_image(parts: ProfileParts) -> ProgramSpec:
    """Returns the program pixels (N, S, S, 3) float32 -> image_tokens (N, tokens, image_dim)."""
    module: CLIPImageEncoder = parts.modules["image_encoder"]
    size = parts.configs["image_encoder"].image_size

    def encode_image(image_encoder: Any, pixels: jax.Array) -> dict[str, Any]:
        return {"image_tokens": bind(module, image_encoder)(pixels, parts.dtype)}

    pixels = jax.ShapeDtypeStruct((parts.variant.encoded_images, size, size, 3), jnp.float32)
    return parts.spec(encode_image, {"image_encoder": parts.weights["image_encoder"], "pixels": pixels})


def encode_video(parts: ProfileParts) -> ProgramSpec:
    """Returns the program images, videos -> condition of the steps: see ``wanbuild.variants``."""
    kind = parts.variant.conditioner
    assert kind is not None
    conditioner = _of_kind(parts, kind)

    def encode_video(vae: Any, **media: jax.Array) -> dict[str, Any]:
        return conditioner(vae, **media)

    return parts.spec(encode_video, {"vae": parts.weights["vae"], **conditioner.arguments()})


def encode_start(parts: ProfileParts) -> ProgramSpec:
    """Returns the program start_video (F, H, W, 3) uint8 -> start (C, T, h, w): see ``VideoStart``."""
    conditioner = _of_kind(parts, VideoStart)

    def encode_start(vae: Any, **media: jax.Array) -> dict[str, Any]:
        return dict(conditioner.condition(vae, media))

    return parts.spec(encode_start, {"vae": parts.weights["vae"], **conditioner.arguments()})


def encode_past(parts: ProfileParts) -> ProgramSpec:
    """Returns the program frames of a chunk -> mean, deviation (C, T, h, w): see ``PastFrames``."""
    conditioner = _of_kind(parts, PastFrames, parts.model.chunk_frames)

    def encode_past(vae: Any, **media: jax.Array) -> dict[str, Any]:
        return dict(conditioner.condition(vae, media))

    return parts.spec(encode_past, {"vae": parts.weights["vae"], **conditioner.arguments()})


def _of_kind(parts: ProfileParts, kind: type[Conditioner], num_frames: int | None = None) -> Conditioner:
    """Returns the conditioner of a profile's images and videos, or of so many frames."""
    return kind(
        module=parts.modules["vae"],
        config=parts.configs["vae"],
        inputs=parts.variant.inputs,
        width=parts.shape.width,
        height=parts.shape.height,
        num_frames=num_frames or parts.shape.num_frames,
        num_references=parts.shape.num_references,
        chunk=parts.options.vae_encode_chunk,
        dtype=parts.vae_dtype,
        algorithm=parts.kernels.convolution,
        alike=parts.kernels.pieces_alike,
        tile=parts.options.vae_tile,
    )


def prepare(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the arrays that all steps share: cross-attention cache and RoPE tables.

    A model of chunks has no tables that all of them share.

    Inputs: embeddings (P, L, text_dim) of P prompts, the positive one first; for a model that takes them,
    image_tokens of ``encode_image`` and face_video (F, S, S, 3) uint8.
    """
    module: WanTransformer = parts.modules["transformer"]
    arguments, extra = prompted_of(parts)

    def prepare(
        transformer: Any, embeddings: jax.Array, lora: Any = None, **inputs: jax.Array
    ) -> dict[str, Any]:
        model = bind(module, with_slots(transformer, lora))
        kv, rope = model.prepare(embeddings, parts.latent_shape, parts.dtype, **inputs, **extra)
        return {"kv": kv, **({"rope": rope} if rope else {})}

    weights = {"transformer": parts.weights["transformer"], **parts.lora}
    return parts.spec(prepare, {**weights, **arguments})


def prompted_of(parts: ProfileParts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the abstract arguments of the steps that are computed before them, and the constant ones."""
    arguments, extra = {"embeddings": parts.embeddings}, dict[str, Any]()
    if "image_encoder" in parts.modules:
        arguments |= parts.outputs(encode_image)
        extra["image_multiple"] = parts.kernels.image_multiple
    config = parts.configs["transformer"]
    return arguments | parts.variant.prepare_arguments(config, parts.shape.num_frames), extra


def step(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of a step: latents (B, C, T, h, w), solver history -> those after the step.

    ``coefficients`` is a row of the solver's table (``solvers.COLUMNS``), ``timestep``, ``next_timestep`` of
    a flow map and ``guidance_scale`` are float32 scalars; at a scale of 1 a step makes one pass. Latents and
    history are donated.
    """
    return _denoising(parts, "step")


def scan(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the steps [first, last): ``step`` in a loop on the device.

    ``coefficients`` (max_steps, 9), ``timesteps`` and ``guidance_scales`` (max_steps,) are float32, and their
    padding is not read;
    ``first`` and ``last`` are int32 scalars, so any number of steps is one program. With two experts it is
    called once for each: a branch inside it would take the weights of both as arguments.
    """
    return _denoising(parts, "scan")


def _denoising(parts: ProfileParts, form: str) -> ProgramSpec:
    """Returns the program of a form of the loop."""
    denoiser = Denoiser(parts.modules["transformer"], attention_form(parts.kernels), parts.dtype)
    state, given = state_of(parts), given_of(parts)
    weights = {"transformer": parts.weights["transformer"], **parts.lora}
    arguments = {**weights, **parts.outputs(prepare), **state, **_rows_of(parts, form), **given}
    function = denoiser.step if form == "step" else denoiser.loop
    return parts.spec(function, arguments, donate=tuple(state))


def given_of(parts: ProfileParts) -> dict[str, Any]:
    """Returns the abstract arguments of steps that come from options, images and videos."""
    config, given = parts.configs["transformer"], dict[str, Any]()
    if parts.options.nag:
        given[NAG] = jax.ShapeDtypeStruct((len(NAG_DEFAULTS),), jnp.float32)
    if parts.variant.conditioner:
        given |= parts.outputs(encode_video)
    _check_channels(parts, given.get("condition", {}))
    return given | parts.variant.step_arguments(config, config.grid(parts.latent_shape)[0])


def state_of(parts: ProfileParts) -> dict[str, Any]:
    """Returns the abstract arrays that the steps pass on."""
    latents = jax.ShapeDtypeStruct(parts.latents.shape, jnp.dtype(parts.options.scheduler_dtype))
    return {"latents": latents, "history": dict.fromkeys(HISTORY, latents)}


def row_of(parts: ProfileParts) -> dict[str, Any]:
    """Returns the abstract arguments that may differ from step to step."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    row = {"coefficients": jax.ShapeDtypeStruct((len(COLUMNS),), jnp.float32), "timestep": scalar}
    if parts.model.flow_map:
        row["next_timestep"] = scalar
    if not parts.shape.guidance:
        return row
    guiding = inputs_of(parts.options.guiders, parts.configs["transformer"].num_layers)
    more = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in guiding.items()}
    return {**row, "guidance_scale": scalar, **more}


def _rows_of(parts: ProfileParts, form: str) -> dict[str, Any]:
    """Returns the abstract arguments that choose the steps of a call."""
    row = row_of(parts)
    if form == "step":
        return row
    most = parts.options.max_steps
    tables = {TABLES[name]: jax.ShapeDtypeStruct((most, *one.shape), one.dtype) for name, one in row.items()}
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return {**tables, "first": index, "last": index}


def _check_channels(parts: ProfileParts, condition: dict[str, Any]) -> None:
    """Refuses a transformer whose input channels are not those of the latents and of the condition."""
    latents, taken = parts.model.latent_channels, parts.configs["transformer"].in_channels
    given = condition["channels"].shape[0] if "channels" in condition else 0
    if taken != latents + given:
        raise UsageError(
            "mismatch",
            f"the transformer's input channels do not fit the conditioner of {parts.model.variant}",
            expected=f"{latents} channels of latents and {taken - latents} of the condition",
            found=f"a condition of {given}",
            remedy="give the variant a conditioner that returns so many channels",
        )
