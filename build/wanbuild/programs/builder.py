"""The programs of a profile: pure functions of named arrays to named arrays, with static shapes.

All weights are arguments; guidance_scale, timesteps and solver coefficients are inputs, so changing
them needs no new executable. A program's arguments are listed by name, and its result is a dict, so the
runtime passes the outputs of one program to the next without knowing their meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.components import kind_of
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.clip import CLIPImageEncoder
from wanbuild.models.params import abstract_params, bind, parameter_axes
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.umt5 import UMT5Encoder
from wanbuild.models.vae import WanVAE
from wanbuild.programs.build_options import BuildOptions, Shape
from wanbuild.programs.denoiser import HISTORY, Denoiser
from wanbuild.programs.shardings import check_mesh, weights_placed
from wanbuild.programs.spec import ProgramSpec, program
from wanbuild.programs.spreading import spread
from wanbuild.variants.table import variant_named
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.mesh import Sizes, jax_mesh
from wanrun.artifact.programs import Kernels
from wanrun.denoising.solvers import COLUMNS
from wanrun.errors import UsageError

ENCODE_BATCH = 1
"""Prompts per ``encode_text`` call. The number is fixed, so an embedding does not depend on its batch.

It is one, not two: 512 tokens already saturate the matmuls, and a cached or unused negative prompt then costs
nothing (docs/notes/cpu.md, "encode_text").
"""

MAX_REFERENCES = 16
"""The most reference images of a profile. Each costs a latent frame; published examples use up to 3."""

TEXT_LENGTHS = (64, 128, 256)
"""Tokens of the shorter ``encode_text`` programs: most prompts are short, and padding costs like text."""


class ProgramBuilder:
    """Makes the programs of one profile from an artifact's manifest.

    Args:
        manifest: the artifact's manifest, for configs, dtypes and model facts.
        shape: the profile's static shape.
        options: build options.
        kernels: the implementations that suit the target.
        mesh: devices by axis; empty for one device.
        devices: the devices of the mesh.

    Raises:
        UsageError: if the model cannot make a video of this shape, or not on this mesh.
    """

    def __init__(
        self,
        manifest: Manifest,
        shape: Shape,
        options: BuildOptions,
        kernels: Kernels,
        mesh: Sizes = MappingProxyType({}),
        devices: Sequence[jax.Device] = (),
    ) -> None:
        self._kernels = kernels
        self._model, self._shape, self._options = manifest.model, shape, options
        self._variant = variant_named(self._model.variant, Path("the artifact"))
        self._max_length, self._components = manifest.tokenizer.max_length, manifest.components
        self._configs: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        for name in manifest.components:
            data = manifest.configs[name]
            kind = kind_of(name, data.get("_class_name"))
            config = kind.parse(data, f"config of {name}")
            module: nnx.Module = kind.module(config, manifest.dtypes[name])
            self._configs[name], self._modules[name] = config, module
            self._weights[name] = self._arguments(abstract_params(module))
        if mesh:
            check_mesh(mesh, self._configs["transformer"], shape, len(devices))
        self._mesh = jax_mesh(mesh, devices)
        if self._mesh is not None:
            for name, module in self._modules.items():
                axes = parameter_axes(module)
                self._weights[name] = weights_placed(self._weights[name], axes, self._mesh)
        self._dtype, self._vae_dtype = jnp.dtype(options.dtype), jnp.dtype(options.vae_dtype)
        self._check_shape()

    @property
    def configs(self) -> Mapping[str, Any]:
        """The components' parsed configs by name."""
        return self._configs

    def _arguments(self, params: Any) -> Any:
        """Returns the abstract weights that a program takes; bfloat16 as uint16 if the kernels take bits."""

        def argument(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            as_bits = self._kernels.weight_bits and leaf.dtype == jnp.bfloat16
            return jax.ShapeDtypeStruct(leaf.shape, jnp.uint16) if as_bits else leaf

        return jax.tree.map(argument, params)

    def _program(
        self,
        name: str,
        function: Callable[..., dict[str, Any]],
        arguments: Mapping[str, Any],
        donate: tuple[str, ...] = (),
    ) -> ProgramSpec:
        """Makes a program for this builder's mesh; arguments as of ``spec.program``."""
        return program(name, function, arguments, donate, self._mesh, self._kernels)

    def _check_shape(self) -> None:
        model, shape = self._model, self._shape
        patch = self._configs["transformer"].patch_size
        multiples = [model.vae_spatial * size for size in (patch[2], patch[1])]
        for what, size, multiple in zip(
            ("width", "height"), (shape.width, shape.height), multiples, strict=True
        ):
            if size < multiple or size % multiple:
                raise UsageError(
                    f"{what} {size} cannot be built", expected=f"a multiple of {multiple}", found=size
                )
        temporal = model.vae_temporal
        below = max(shape.num_frames - 1, 0) // temporal * temporal + 1
        if shape.num_frames != below:
            raise UsageError(
                f"{shape.num_frames} frames cannot be built",
                expected=f"{temporal}n + 1 frames",
                found=shape.num_frames,
                remedy=f"use {below} or {below + temporal}",
            )
        least, why = self._variant.least_frames
        if shape.num_frames < least:
            raise UsageError(
                f"{shape.num_frames} frames cannot be built",
                expected=f"{least} or more: {why}",
                found=shape.num_frames,
                remedy=f"use {least}",
            )
        if shape.num_videos < 1:
            raise UsageError("--num-videos cannot be built", expected="1 or more", found=shape.num_videos)
        if shape.num_videos > 1 and self._variant.previous_frames:
            raise UsageError(
                "--num-videos cannot be built",
                expected="1: windows follow one another",
                found=shape.num_videos,
            )
        most = MAX_REFERENCES if "reference_image" in self._variant.inputs else 0
        if not 0 <= shape.num_references <= most:
            raise UsageError(
                "--reference-images cannot be built",
                expected=f"0 to {most}" if most else f"0: {model.variant} takes no reference images",
                found=shape.num_references,
            )
        try:
            self._configs["transformer"].grid(self.latent_shape)
        except ValueError as error:
            raise UsageError(f"{shape.width}x{shape.height} cannot be built: {error}") from None

    @property
    def _leading(self) -> int:
        """Number of latent frames in front of the video's own."""
        return self._variant.leading_latents + self._shape.num_references

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Latent frames (with those in front of the video's own), rows and columns."""
        spatial, temporal = self._model.vae_spatial, self._model.vae_temporal
        frames = (self._shape.num_frames - 1) // temporal + 1 + self._leading
        return frames, self._shape.height // spatial, self._shape.width // spatial

    def programs(self) -> tuple[ProgramSpec, ...]:
        """Returns every program of the profile."""
        texts = [self.encode_text(length) for length in (*TEXT_LENGTHS, self._max_length)]
        images = [self.encode_image()] if "image_encoder" in self._modules else []
        videos = [self.encode_video()] if self._variant.conditioner else []
        steps = [
            make()
            for form, make in (("step", self.denoise_step), ("scan", self.denoise_loop))
            if self._options.loop in (form, "both")
        ]
        others = (*texts, *images, *videos, self.prepare(), *steps, self.decode_video())
        return (*others, *self.spreads())

    def spreads(self) -> Iterator[ProgramSpec]:
        """Yields the programs that spread weights over a mesh; two experts share one."""
        for name, component in self._components.items():
            if self._mesh is not None and name != TRANSFORMERS[1]:
                spec = spread(name, component, self._weights[name], PARAMETERS, self._mesh)
                if spec is not None:
                    yield spec

    def encode_text(self, length: int) -> ProgramSpec:
        """Returns the program ids, mask (1, L) int32 -> embeddings (1, L, text_dim).

        Embeddings are zero after the prompt's length.

        Args:
            length: L. Padding is masked, so a prompt of n tokens has the same embedding for every L >= n.
        """
        module: UMT5Encoder = self._modules["text_encoder"]
        tokens = jax.ShapeDtypeStruct((ENCODE_BATCH, length), jnp.int32)

        def encode_text(text_encoder: Any, ids: jax.Array, mask: jax.Array) -> dict[str, Any]:
            return {"embeddings": bind(module, text_encoder)(ids, mask, self._dtype)}

        return self._program(
            "encode_text" if length == self._max_length else f"encode_text_{length}",
            encode_text,
            {"text_encoder": self._weights["text_encoder"], "ids": tokens, "mask": tokens},
        )

    def encode_image(self) -> ProgramSpec:
        """Returns the program pixels (N, S, S, 3) float32 -> image_tokens (N, tokens, image_dim)."""
        module: CLIPImageEncoder = self._modules["image_encoder"]
        size = self._configs["image_encoder"].image_size

        def encode_image(image_encoder: Any, pixels: jax.Array) -> dict[str, Any]:
            return {"image_tokens": bind(module, image_encoder)(pixels, self._dtype)}

        pixels = jax.ShapeDtypeStruct((self._variant.encoded_images, size, size, 3), jnp.float32)
        arguments = {"image_encoder": self._weights["image_encoder"], "pixels": pixels}
        return self._program("encode_image", encode_image, arguments)

    def encode_video(self) -> ProgramSpec:
        """Returns the program images, videos -> condition of ``denoise_step``: see ``wanbuild.variants``."""
        kind = self._variant.conditioner
        assert kind is not None
        conditioner = kind(
            module=self._modules["vae"],
            config=self._configs["vae"],
            inputs=self._variant.inputs,
            width=self._shape.width,
            height=self._shape.height,
            num_frames=self._shape.num_frames,
            num_references=self._shape.num_references,
            chunk=self._options.vae_encode_chunk,
            dtype=self._vae_dtype,
            algorithm=self._kernels.convolution,
            alike=self._kernels.pieces_alike,
        )

        def encode_video(vae: Any, **media: jax.Array) -> dict[str, Any]:
            return conditioner(vae, **media)

        arguments = {"vae": self._weights["vae"], **conditioner.arguments()}
        return self._program("encode_video", encode_video, arguments)

    def prepare(self) -> ProgramSpec:
        """Returns the program of the arrays that all steps share: cross-attention cache and RoPE tables.

        Inputs: embeddings (P, L, text_dim) of P prompts, the positive one first; for a model that takes them,
        image_tokens of ``encode_image`` and face_video (F, S, S, 3) uint8.
        """
        module: WanTransformer = self._modules["transformer"]
        arguments = {"transformer": self._weights["transformer"], "embeddings": self._embeddings()}
        extra: dict[str, Any] = {}
        if "image_encoder" in self._modules:
            arguments |= self.encode_image().outputs
            extra["image_multiple"] = self._kernels.image_multiple
        config = self._configs["transformer"]
        arguments |= self._variant.prepare_arguments(config, self._shape.num_frames)

        def prepare(transformer: Any, embeddings: jax.Array, **inputs: jax.Array) -> dict[str, Any]:
            model = bind(module, transformer)
            kv, rope = model.prepare(embeddings, self.latent_shape, self._dtype, **inputs, **extra)
            return {"kv": kv, "rope": rope}

        return self._program("prepare", prepare, arguments)

    def _embeddings(self) -> jax.ShapeDtypeStruct:
        prompts = 2 if self._shape.guidance else 1
        width = self._configs["transformer"].text_dim
        return jax.ShapeDtypeStruct((prompts, self._max_length, width), self._dtype)

    def _latents(self) -> jax.ShapeDtypeStruct:
        channels = self._model.latent_channels
        return jax.ShapeDtypeStruct((self._shape.num_videos, channels, *self.latent_shape), jnp.float32)

    @functools.cached_property
    def _prepared(self) -> dict[str, Any]:
        """The outputs of ``prepare``, inputs of both forms of the loop."""
        return self.prepare().outputs

    @functools.cached_property
    def _encoded(self) -> dict[str, Any]:
        """The outputs of ``encode_video``, inputs of both forms of the loop."""
        return self.encode_video().outputs

    def _denoising(self, form: str, **rows: jax.ShapeDtypeStruct) -> ProgramSpec:
        """Returns a form of the loop; ``rows`` are the arguments that select its steps."""
        config = self._configs["transformer"]
        denoiser = Denoiser(self._modules["transformer"], attention_form(self._kernels), self._dtype)
        latents = jax.ShapeDtypeStruct(self._latents().shape, jnp.dtype(self._options.scheduler_dtype))
        arguments = {
            "transformer": self._weights["transformer"],
            **self._prepared,
            "latents": latents,
            "history": dict.fromkeys(HISTORY, latents),
            **rows,
        }
        if self._shape.guidance:
            arguments["guidance_scale"] = jax.ShapeDtypeStruct((), jnp.float32)
        if self._variant.conditioner:
            arguments |= self._encoded
        arguments |= self._variant.step_arguments(config, config.grid(self.latent_shape)[0])
        return self._program(
            f"denoise_{form}", getattr(denoiser, form), arguments, donate=("latents", "history")
        )

    def denoise_step(self) -> ProgramSpec:
        """Returns the program of a step: latents (B, C, T, h, w), solver history -> those after the step.

        ``coefficients`` is a row of the solver's table (``solvers.COLUMNS``), ``timestep`` and
        ``guidance_scale`` are float32 scalars. Latents and history are donated.
        """
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        row = jax.ShapeDtypeStruct((len(COLUMNS),), jnp.float32)
        return self._denoising("step", coefficients=row, timestep=scalar)

    def denoise_loop(self) -> ProgramSpec:
        """Returns the program of the steps [first, last): ``denoise_step`` in a loop on the device.

        ``coefficients`` (max_steps, 9) and ``timesteps`` (max_steps,) are float32, and their padding is not
        read; ``first`` and ``last`` are int32 scalars, so any number of steps is one program. With two
        experts it is called once for each: a branch inside it would take the weights of both as arguments.
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
        """Returns the program normalised latents (C, T, h, w) float32 of one video -> uint8 (F, H, W, 3).

        T is without the latent frames in front of the video's own, so that profiles which differ only in
        those share the program. Its output is frames; for a model with windows also last_frames, float32 in
        [-1, 1]: the next window may begin with them.
        """
        module: WanVAE = self._modules["vae"]
        config = self._configs["vae"]
        # The reference divides by a rounded 1/std; the same order of roundings keeps uint8 equal.
        inverse_std = 1.0 / jnp.asarray(config.latents_std, jnp.float32)
        mean = jnp.asarray(config.latents_mean, jnp.float32)
        keep = self._variant.previous_frames

        def to_uint8(frames: jax.Array) -> jax.Array:
            unit = jnp.clip(frames.astype(jnp.float32) / 2 + 0.5, 0, 1)
            return jnp.round(unit * 255).astype(jnp.uint8)

        def decode_video(vae: Any, latents: jax.Array) -> dict[str, Any]:
            z = latents / inverse_std[:, None, None, None] + mean[:, None, None, None]
            decoded = bind(module, vae).decode(
                z[None],
                self._options.vae_decode_chunk,
                dtype=self._vae_dtype,
                algorithm=self._kernels.convolution,
                alike=self._kernels.pieces_alike,
                finish=to_uint8,
                keep_last=keep,
            )
            if not keep:
                return {"frames": decoded[0]}
            frames, last = decoded
            return {"frames": frames[0], "last_frames": last[0]}

        channels, frames, *cells = self._latents().shape[1:]
        one = jax.ShapeDtypeStruct((channels, frames - self._leading, *cells), jnp.float32)
        return self._program("decode_video", decode_video, {"vae": self._weights["vae"], "latents": one})
