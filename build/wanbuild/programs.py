"""The programs of a profile: pure functions of named arrays to named arrays, with static shapes.

All weights are arguments; guidance scale, timesteps and solver coefficients are inputs, so changing
them needs no new executable. A program's arguments are listed by name, and its result is a dict, so the
runtime passes the outputs of one program to the next without knowing what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.components import KINDS, DtypePolicy
from wanbuild.denoiser import Denoiser
from wanbuild.models.attention import ATTENTION
from wanbuild.models.convolution import Algorithm
from wanbuild.models.params import abstract_params, bind
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.umt5 import UMT5Encoder
from wanbuild.models.vae import WanVAE
from wanrun.denoise import HISTORY
from wanrun.errors import UsageError
from wanrun.manifest import Manifest
from wanrun.options import LOOP_PROGRAMS, MAX_STEPS
from wanrun.solvers import COLUMNS

ENCODE_BATCH = 1
"""Prompts per ``encode_text`` call, always the same, so an embedding does not depend on its batch.

One, not two: 512 tokens already saturate the matmuls, and a cached or unused negative prompt then costs
nothing (BUILD_NOTES.md, "encode_text").
"""

LOOPS = ("both", *LOOP_PROGRAMS)
"""Which forms of the denoising loop a profile has."""

TEXT_LENGTHS = (64, 128, 256)
"""Tokens of the shorter ``encode_text`` programs: most prompts are short; padding costs what text does."""


@dataclass(frozen=True)
class BuildOptions:
    """Choices that change a profile's programs; recorded in the manifest.

    Args:
        dtype: compute dtype of the text encoder and the transformer.
        vae_dtype: compute dtype of the VAE.
        scheduler_dtype: what latents and solver history are kept in between steps; sums are in float32.
        vae_decode_chunk: latent frames decoded at a time.
        loop: forms of the denoising loop: ``step``, one step a call; ``scan``, all in one; or ``both``.
        max_steps: the most steps of the scan form, which its coefficient table is padded to.
    """

    dtype: str = "bfloat16"
    vae_dtype: str = "float32"
    scheduler_dtype: str = "float32"
    vae_decode_chunk: int = 1
    loop: str = "both"
    max_steps: int = 100

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise UsageError("--loop cannot be built", expected=" or ".join(LOOPS), found=self.loop)
        if not 1 <= self.max_steps <= MAX_STEPS:
            raise UsageError(
                "--max-steps is out of range", expected=f"1 to {MAX_STEPS}", found=self.max_steps
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Kernels:
    """Implementations chosen by the target's platform; they compute the same.

    Args:
        attention: a name in ``models.attention.ATTENTION``.
        convolution: the form of the VAE's convolutions.
        weight_bits: whether bfloat16 weights are passed as uint16 (``models.loops`` says why).
    """

    attention: str
    convolution: Algorithm
    weight_bits: bool


@dataclass(frozen=True)
class Shape:
    """What a profile's name says: the static shape of one generation.

    Args:
        width: pixels.
        height: pixels.
        num_frames: frames, 4n + 1.
        num_videos: videos per prompt.
        guidance: whether classifier-free guidance doubles the batch.
    """

    width: int
    height: int
    num_frames: int
    num_videos: int
    guidance: bool


@dataclass(frozen=True)
class ProgramSpec:
    """A program before it is exported.

    Args:
        name: its name.
        function: takes the inputs in order and returns a dict of outputs.
        inputs: argument names; a component's name stands for its weights.
        arguments: abstract arguments, one pytree per input.
        donate: names of donated inputs.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    inputs: tuple[str, ...]
    arguments: tuple[Any, ...]
    donate: tuple[str, ...] = ()

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(self.inputs.index(name) for name in self.donate)


class ProgramBuilder:
    """Makes the programs of one profile from an artifact's manifest.

    Args:
        manifest: the artifact's manifest, for configs, dtypes and model facts.
        shape: the profile's static shape.
        options: build options.
        kernels: the implementations that suit the target.

    Raises:
        UsageError: if the model cannot make a video of this shape.
    """

    def __init__(self, manifest: Manifest, shape: Shape, options: BuildOptions, kernels: Kernels) -> None:
        self._kernels = kernels
        self._model, self._shape, self._options = manifest.model, shape, options
        self._max_length = manifest.tokenizer["max_length"]
        self._configs: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        for name in manifest.components:
            kind, dtypes = KINDS[name], manifest.dtypes[name]
            config = kind.parse(manifest.configs[name], f"config of {name}")
            module: nnx.Module = kind.module(config, DtypePolicy(dtypes["weights"], dtypes["norms"]))
            self._configs[name], self._modules[name] = config, module
            self._weights[name] = self._arguments(abstract_params(module))
        self._dtype, self._vae_dtype = jnp.dtype(options.dtype), jnp.dtype(options.vae_dtype)
        self._check_shape()

    def _arguments(self, params: Any) -> Any:
        """Abstract weights as the program takes them."""

        def argument(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            as_bits = self._kernels.weight_bits and leaf.dtype == jnp.bfloat16
            return jax.ShapeDtypeStruct(leaf.shape, jnp.uint16) if as_bits else leaf

        return jax.tree.map(argument, params)

    def _check_shape(self) -> None:
        model, shape = self._model, self._shape
        patch = self._configs["transformer"].patch_size
        multiples = [model["vae_spatial"] * size for size in (patch[2], patch[1])]
        for what, size, multiple in zip(
            ("width", "height"), (shape.width, shape.height), multiples, strict=True
        ):
            if size < multiple or size % multiple:
                raise UsageError(
                    f"{what} {size} cannot be built", expected=f"a multiple of {multiple}", found=size
                )
        temporal = model["vae_temporal"]
        below = max(shape.num_frames - 1, 0) // temporal * temporal + 1
        if shape.num_frames != below:
            raise UsageError(
                f"{shape.num_frames} frames cannot be built",
                expected=f"{temporal}n + 1 frames",
                found=shape.num_frames,
                remedy=f"use {below} or {below + temporal}",
            )
        if shape.num_videos < 1:
            raise UsageError("--num-videos cannot be built", expected="1 or more", found=shape.num_videos)
        try:
            self._configs["transformer"].grid(self.latent_shape)
        except ValueError as error:
            raise UsageError(f"{shape.width}x{shape.height} cannot be built: {error}") from None

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns."""
        spatial, temporal = self._model["vae_spatial"], self._model["vae_temporal"]
        frames = (self._shape.num_frames - 1) // temporal + 1
        return frames, self._shape.height // spatial, self._shape.width // spatial

    def programs(self) -> tuple[ProgramSpec, ...]:
        """Every program of the profile."""
        texts = [self.encode_text(length) for length in (*TEXT_LENGTHS, self._max_length)]
        steps = [
            make()
            for form, make in (("step", self.denoise_step), ("scan", self.denoise_loop))
            if self._options.loop in (form, "both")
        ]
        return (*texts, self.prepare(), *steps, self.decode_video())

    def encode_text(self, length: int) -> ProgramSpec:
        """ids, mask (1, L) int32 -> embeddings (1, L, text_dim), zero past the prompt's length.

        Args:
            length: L. Padding is masked, so a prompt of n tokens has the same embedding for every L >= n.
        """
        module: UMT5Encoder = self._modules["text_encoder"]
        tokens = jax.ShapeDtypeStruct((ENCODE_BATCH, length), jnp.int32)

        def encode_text(weights: Any, ids: jax.Array, mask: jax.Array) -> dict[str, Any]:
            return {"embeddings": bind(module, weights)(ids, mask, self._dtype)}

        return ProgramSpec(
            "encode_text" if length == self._max_length else f"encode_text_{length}",
            encode_text,
            ("text_encoder", "ids", "mask"),
            (self._weights["text_encoder"], tokens, tokens),
        )

    def prepare(self) -> ProgramSpec:
        """embeddings (P, 512, text_dim), positive first -> the cross-attention cache and RoPE tables."""
        module: WanTransformer = self._modules["transformer"]

        def prepare(weights: Any, embeddings: jax.Array) -> dict[str, Any]:
            kv, rope = bind(module, weights).prepare(embeddings, self.latent_shape, self._dtype)
            return {"kv": kv, "rope": rope}

        return ProgramSpec(
            "prepare",
            prepare,
            ("transformer", "embeddings"),
            (self._weights["transformer"], self._embeddings()),
        )

    def _embeddings(self) -> jax.ShapeDtypeStruct:
        prompts = 2 if self._shape.guidance else 1
        width = self._configs["transformer"].text_dim
        return jax.ShapeDtypeStruct((prompts, self._max_length, width), self._dtype)

    def _latents(self) -> jax.ShapeDtypeStruct:
        channels = self._model["latent_channels"]
        return jax.ShapeDtypeStruct((self._shape.num_videos, channels, *self.latent_shape), jnp.float32)

    def _denoising(self, form: str, **rows: jax.ShapeDtypeStruct) -> ProgramSpec:
        """A form of the loop; rows are the arguments that say which steps it takes."""
        config = self._configs["transformer"]
        denoiser = Denoiser(
            self._modules["transformer"],
            ATTENTION[self._kernels.attention],
            self._dtype,
            config.grid(self.latent_shape)[0] if self._model["expand_timesteps"] else 1,
        )
        latents = jax.ShapeDtypeStruct(self._latents().shape, jnp.dtype(self._options.scheduler_dtype))
        prepared = self.prepare()
        arguments = {
            "transformer": self._weights["transformer"],
            **jax.eval_shape(prepared.function, *prepared.arguments),
            "latents": latents,
            "history": dict.fromkeys(HISTORY, latents),
            **rows,
        }
        if self._shape.guidance:
            arguments["guidance_scale"] = jax.ShapeDtypeStruct((), jnp.float32)
        return ProgramSpec(
            f"denoise_{form}",
            getattr(denoiser, form),
            tuple(arguments),
            tuple(arguments.values()),
            donate=("latents", "history"),
        )

    def denoise_step(self) -> ProgramSpec:
        """One step: latents (B, C, T, h, w) and solver history -> the same, one step on.

        ``coefficients`` is a row of the solver's table (``wanrun.solvers.COLUMNS``), ``timestep`` and
        ``guidance_scale`` are float32 scalars. Latents and history are donated.
        """
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        row = jax.ShapeDtypeStruct((len(COLUMNS),), jnp.float32)
        return self._denoising("step", coefficients=row, timestep=scalar)

    def denoise_loop(self) -> ProgramSpec:
        """The steps [first, last): what ``denoise_step`` does, with the loop on the device.

        ``coefficients`` (max_steps, 9) and ``timesteps`` (max_steps,) are float32 and padded with anything;
        ``first`` and ``last`` are int32 scalars, so any number of steps is one program. With two experts it
        is called once for each: a branch inside would take both trees of weights as arguments.
        """
        steps, index = self._options.max_steps, jax.ShapeDtypeStruct((), jnp.int32)
        return self._denoising(
            "loop",
            coefficients=jax.ShapeDtypeStruct((steps, len(COLUMNS)), jnp.float32),
            timesteps=jax.ShapeDtypeStruct((steps,), jnp.float32),
            first=index,
            last=index,
        )

    def decode_video(self) -> ProgramSpec:
        """latents (C, T, h, w) float32 of one video, normalised -> frames (T, H, W, 3) uint8."""
        module: WanVAE = self._modules["vae"]
        config = self._configs["vae"]
        # The reference divides by a rounded 1/std; the same order of roundings keeps uint8 equal.
        inverse_std = 1.0 / jnp.asarray(config.latents_std, jnp.float32)
        mean = jnp.asarray(config.latents_mean, jnp.float32)

        def to_uint8(frames: jax.Array) -> jax.Array:
            unit = jnp.clip(frames.astype(jnp.float32) / 2 + 0.5, 0, 1)
            return jnp.round(unit * 255).astype(jnp.uint8)

        def decode_video(weights: Any, latents: jax.Array) -> dict[str, Any]:
            z = latents / inverse_std[:, None, None, None] + mean[:, None, None, None]
            frames = bind(module, weights).decode(
                z[None],
                self._options.vae_decode_chunk,
                dtype=self._vae_dtype,
                algorithm=self._kernels.convolution,
                finish=to_uint8,
            )
            return {"frames": frames[0]}

        one = jax.ShapeDtypeStruct(self._latents().shape[1:], jnp.float32)
        return ProgramSpec("decode_video", decode_video, ("vae", "latents"), (self._weights["vae"], one))
