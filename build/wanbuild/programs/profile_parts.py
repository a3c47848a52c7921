"""The parts from which a profile's programs are made: its models and their weights, shape and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec.structs import replace

from wanbuild.build_options import BuildOptions
from wanbuild.components import kind_of
from wanbuild.models.low_rank import abstract_slots, declare_slots
from wanbuild.models.params import abstract_params, parameter_axes
from wanbuild.models.partition import ROTARY
from wanbuild.models.tiles import TILE_UNIT
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_blocks, check_mesh, weights_placed
from wanbuild.programs.spec import ProgramSpec, program
from wanbuild.variants.table import variant_named, variants
from wanrun import EIGHT_BITS
from wanrun.artifact.layout import BITS
from wanrun.artifact.manifest import TINY_VAE, Manifest
from wanrun.artifact.mesh import Sizes, jax_mesh
from wanrun.artifact.parameters import Component
from wanrun.artifact.possible import check_possible
from wanrun.artifact.programs import Kernels
from wanrun.artifact.slots import LORA
from wanrun.errors import ArtifactError, UsageError, field

MAX_REFERENCES = 16
"""The most reference images of a profile. Each costs a latent frame; published examples use up to 3."""


class ProfileParts:
    """The parts of the programs of one profile, from an artifact's manifest.

    Attributes:
        configs: the components' parsed configs by name.
        modules: their abstract models.
        weights: nested dicts of their abstract weights, as a program takes them.
        lora: the argument with the transformer's slots, by its name; empty without slots.
        components: their records in the manifest.
        max_length: tokens of a prompt, padding included.
        mesh: the mesh; None for one device.
        dtype: compute dtype of the text encoder and the transformer.
        vae_dtype: compute dtype of the VAE.
        vae_precision: of its float32 products on chips.

    Raises UsageError if the model cannot make a video of this shape, or not on this mesh, and ArtifactError
    if an earlier version has converted the artifact, with another order of rows.
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
        stored = {EIGHT_BITS[form] for form in manifest.dtypes["transformer"].eight_bit.values()}
        if kernels.w8a8 and all(one.block for one in stored):
            formats = " or ".join(one.name for one in EIGHT_BITS.values() if not one.block)
            raise UsageError(
                "unsupported",
                "a target of W8A8 multiplies rows of 8-bit weights, and the transformer has none",
                expected=f"weights of wanbuild convert --quantise {formats}",
                remedy="leave -w8a8 out, or convert, or plan, with --quantise",
            )
        self.kernels = kernels
        self.model, self.shape, self.options = manifest.model, shape, options
        self.variant = variant_named(self.model.variant, Path("the artifact"))
        self.max_length, self.components = manifest.tokenizer.max_length, manifest.components
        self.configs: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        for name in manifest.components:
            data = manifest.configs[name]
            kind = kind_of(name, data.get("_class_name"))
            config = kind.parse(data, f"config of {name}")
            module: nnx.Module = kind.module(config, manifest.dtypes[name])
            _check_order(name, manifest.components[name], parameter_axes(module))
            self.configs[name], self.modules[name] = config, module
            self.weights[name] = self.passed(abstract_params(module))
        self.dtype, self.vae_dtype = jnp.dtype(options.dtype), jnp.dtype(options.vae_dtype)
        transformer = declare_slots(self.modules["transformer"], options.lora_rank, self.dtype)
        slots = self.passed(abstract_slots(transformer))
        self.lora = {LORA: slots} if slots else {}
        if mesh:
            check_mesh(mesh, self.configs["transformer"], shape, len(devices), options.nag)
        self.mesh = jax_mesh(mesh, devices)
        if self.mesh is not None:
            for name, module in self.modules.items():
                axes = parameter_axes(module)
                self.weights[name] = weights_placed(self.weights[name], axes, self.mesh)
                check_blocks(self.weights[name], manifest.dtypes[name].eight_bit)
            axes = parameter_axes(transformer)
            self.lora = {name: weights_placed(tree, axes, self.mesh) for name, tree in self.lora.items()}
        self._outputs: dict[Maker, dict[str, Any]] = {}
        self.vae_precision = options.vae_precision
        self._check_shape()

    def passed(self, arrays: Any) -> Any:
        """Returns abstract arrays as programs pass them: those of ``BITS`` as integers if kernels ask."""

        def argument(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            as_bits = self.kernels.weight_bits and leaf.dtype.name in BITS
            return jax.ShapeDtypeStruct(leaf.shape, BITS[leaf.dtype.name]) if as_bits else leaf

        return jax.tree.map(argument, arrays)

    def spec(
        self,
        function: Callable[..., dict[str, Any]],
        arguments: Mapping[str, Any],
        donate: tuple[str, ...] = (),
    ) -> ProgramSpec:
        """Makes a program for this mesh and these kernels; arguments as of ``spec.program``."""
        kernels = self.kernels
        if {"vae", TINY_VAE} & arguments.keys() and kernels.float32_precision != "default":
            kernels = replace(kernels, float32_precision=self.vae_precision)
        return program(function.__name__, function, arguments, donate, self.mesh, kernels)

    def outputs(self, make: Maker) -> dict[str, Any]:
        """Returns the abstract outputs of a program, by name; a program is traced for them once."""
        if make not in self._outputs:
            self._outputs[make] = make(self).outputs
        return self._outputs[make]

    def _check_shape(self) -> None:
        model, shape = self.model, self.shape
        size = shape.width, shape.height
        check_possible(model, size, shape.num_frames)
        if shape.num_videos < 1:
            raise UsageError(
                "unsupported",
                f"{field('num_videos')} cannot be built",
                expected="1 or more",
                found=shape.num_videos,
            )
        if shape.num_videos > 1 and self.variant.previous_frames:
            raise UsageError(
                "unsupported",
                f"{field('num_videos')} cannot be built",
                expected="1: windows follow one another",
                found=shape.num_videos,
            )
        most = MAX_REFERENCES if "reference_image" in self.variant.inputs else 0
        if not 0 <= shape.num_references <= most:
            raise UsageError(
                "unsupported",
                f"{field('reference_images')} cannot be built",
                expected=f"0 to {most}" if most else f"0: {model.variant} takes no reference images",
                found=shape.num_references,
            )
        try:
            self.configs["transformer"].grid(self.latent_shape)
        except ValueError as error:
            raise UsageError(
                "unsupported", f"{shape.width}x{shape.height} cannot be built: {error}"
            ) from None
        if self.options.video_to_video and not self.variant.from_video:
            raise UsageError(
                "unsupported",
                f"--video-to-video cannot be built for {model.variant}",
                expected=" or ".join(one.name for one in variants().values() if one.from_video),
                remedy="leave it out",
            )
        self._check_tile()
        self._check_chunks()

    def _check_tile(self) -> None:
        """Raises UsageError for tiles that no cells of latents make, or that devices would share."""
        tile, unit = self.options.vae_tile, TILE_UNIT * self.model.vae_spatial
        if tile % unit:
            raise UsageError(
                "unsupported",
                f"{field('vae_tile')} cannot be built",
                expected=f"a multiple of {unit}",
                found=tile,
            )
        if tile and self.mesh is not None:
            raise UsageError(
                "no_effect", "--vae-tile is for one device", remedy="leave it out: a mesh shares the columns"
            )

    def _check_chunks(self) -> None:
        """Raises UsageError for options that a video of chunks cannot have."""
        refused = {
            "guidance": self.shape.guidance and not self.model.guided,
            "guider": bool(self.options.guiders) and not self.shape.guidance,
            "num_videos": self.shape.num_videos > 1,
            "nag": self.options.nag,
            "video_to_video": self.options.video_to_video,
            "vae_tile": self.options.vae_tile > 0,
        }
        for name in (name for name, given in refused.items() if given and self.chunks):
            raise UsageError(
                "unsupported",
                f"{field(name)} cannot be built for {self.model.variant}, which makes a video in chunks",
                remedy="pass --no-guidance" if name == "guidance" else "leave it out",
            )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Latent frames of each chunk of a video; empty for a model that makes it at once."""
        return () if self.model.chunks is None else self.model.chunks.lengths(self.latent_shape[0])

    @property
    def leading(self) -> int:
        """Number of latent frames in front of the video's own."""
        return self.variant.leading_latents + self.shape.num_references

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Latent frames (with those in front of the video's own), rows and columns."""
        spatial, frames = self.model.vae_spatial, self.model.latent_frames(self.shape.num_frames)
        return frames + self.leading, self.shape.height // spatial, self.shape.width // spatial

    @property
    def latents(self) -> jax.ShapeDtypeStruct:
        """The latents (B, C, T, h, w), float32."""
        channels = self.model.latent_channels
        return jax.ShapeDtypeStruct((self.shape.num_videos, channels, *self.latent_shape), jnp.float32)

    @property
    def embeddings(self) -> jax.ShapeDtypeStruct:
        """The prompts' embeddings (P, L, text_dim); with guidance of any kind P is 2."""
        prompts = 2 if self.shape.guidance or self.options.nag else 1
        width = self.configs["transformer"].text_dim
        return jax.ShapeDtypeStruct((prompts, self.max_length, width), self.dtype)


Maker = Callable[[ProfileParts], ProgramSpec]
"""Makes one program."""


def _check_order(name: str, component: Component, axes: Mapping[str, tuple[str | None, ...]]) -> None:
    """Raises ArtifactError if rows of a component lie in another order than its programs take."""
    for path, parameter in component.parameters.items():
        if (ROTARY in parameter.axes) != (ROTARY in axes.get(path, ())):
            raise ArtifactError(
                "other_release",
                f"{name}/{path} was stored by an earlier version, with rotated pairs of rows side by side",
                expected="the even rows of each head first",
                remedy="convert the checkpoint again: wanbuild convert --force",
            )
