"""Compares programs over a mesh of virtual CPU devices with the same programs on one device.

It runs in a process of its own, because the number of CPU devices is fixed when JAX starts:

    python -m helpers.mesh_comparison ARTIFACT [MESH ...] [--programs NAME,...] [--all] [...]

The artifact gives the model; its transformer gets eight heads. All weights and inputs are random. It prints a
line of JSON per mesh: the largest difference of each program's results, relative to their largest value.
Without arguments it takes such arguments from each line of its input, and prints an empty line after each.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.compiling import FAST_COMPILE
from wanbuild.build_options import BuildOptions
from wanbuild.models.params import bind
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import mesh_problem
from wanbuild.programs.spec import ProgramSpec, program
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.guiders import BUILT, SKIPPED_LAYERS
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.mesh import AXES, Sizes, jax_mesh, mesh_text, normal, num_devices
from wanrun.artifact.programs import Kernels
from wanrun.denoising.solvers import fitted_rows
from wanrun.executables.lowering import lower

DEVICES, HEADS, HEAD_DIM = 8, 8, 12
KERNELS = Kernels("cpu", "winograd", weight_bits=True, image_multiple=3)
"""Image tokens are padded, as on a TPU, so that the masks of the cache are compared too."""

ONE = mesh_text({})

DECODERS = frozenset({"decode", "decode_alike"})

PROGRAMS = ("encode_text", "encode_image", "encode_video", "prepare", "denoise_step", *DECODERS)


@dataclass
class Comparison:
    """The programs of one model, and their results on one device.

    Args:
        manifest: the model; the transformer's heads are replaced.
        shape: the profile's shape.
        dtype: compute dtype of transformer and text encoder on one device.
        mesh_dtype: the same on the mesh.
        lora_rank: rank of the transformer's slots, which are filled.
        guiders: those beside ``cfg``; all of them act, and the middle layer is skipped.
    """

    manifest: Manifest
    shape: Shape
    dtype: str
    mesh_dtype: str
    lora_rank: int
    guiders: Sequence[str] = ()
    results: dict[str, Any] = field(default_factory=dict)

    def builder(self, sizes: Sizes, dtype: str) -> ProgramBuilder:
        begins = any(one.options.video_to_video for one in self.manifest.profiles.values())
        options = BuildOptions(
            dtype=dtype, lora_rank=self.lora_rank, guiders=self.guiders, video_to_video=begins
        )
        return ProgramBuilder(self.manifest, self.shape, options, KERNELS, sizes, jax.devices())

    def specs(self, sizes: Sizes, names: Sequence[str], dtype: str) -> Iterator[ProgramSpec]:
        builder = self.builder(sizes, dtype)
        for spec in builder.programs():
            if spec.name in names:
                yield spec
        for name in DECODERS.intersection(names):
            yield unrounded(builder, name)

    def differences(self, sizes: Sizes, names: Sequence[str]) -> dict[str, float]:
        """Returns each program's largest relative difference from one device."""
        whole = {spec.name: spec for spec in self.specs({}, names, self.dtype)}
        found: dict[str, float] = {}
        for spec in self.specs(sizes, names, self.mesh_dtype):
            arguments = {
                name: values(tree)
                for name, tree in zip(whole[spec.name].inputs, whole[spec.name].arguments, strict=True)
            }
            if spec.name == "denoise_step":  # the latents less the velocity, and of all that is carried some
                row = np.append(1.0, fitted_rows([(0.4, 1.0, -0.2, 0.1)])[0])
                arguments["coefficients"] = row.astype(np.float32)
            if spec.name == "denoise_loop":
                arguments |= {"first": np.int32(0), "last": np.int32(2)}
            if SKIPPED_LAYERS in arguments:
                layers = np.arange(len(arguments[SKIPPED_LAYERS]))
                arguments[SKIPPED_LAYERS] = np.float32(layers == len(layers) // 2)
            if spec.name not in self.results:
                self.results[spec.name] = run(whole[spec.name], {}, arguments)
            padded = fitted(arguments, dict(zip(spec.inputs, spec.arguments, strict=True)))
            found[spec.name] = largest_difference(self.results[spec.name], run(spec, sizes, padded))
        return found


def unrounded(builder: ProgramBuilder, name: str) -> ProgramSpec:
    """The decoder of a profile with its result in float32: uint8 would hide a small difference.

    One device decodes at once, and a mesh the first frame and then a piece of all others, which are alike if
    the name says so.
    """

    def decode(vae: Any, latents: jax.Array) -> dict[str, Any]:
        decoder, latents = bind(builder.modules["vae"], vae), latents[None]
        if builder.mesh is None:
            return {"video": decoder.decode(latents, 1, algorithm="winograd")}
        piece = jax.jit(functools.partial(decoder.decode_piece, algorithm="winograd"))
        begin, rest = latents[:, :, :1], latents[:, :, 1:]
        if name == "decode":
            frame, past = piece(begin, None)
            following, _ = piece(rest, past)
        else:
            filled = jnp.pad(begin, ((0, 0), (0, 0), (rest.shape[2] - 1, 0), (0, 0), (0, 0)))
            left = jax.eval_shape(lambda x: piece(x, None, first=jnp.bool_(True))[1], filled)
            past = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), left)
            frame, past = piece(filled, past, first=jnp.bool_(True))
            following, _ = piece(rest, past, first=jnp.bool_(False))
        return {"video": jnp.concatenate([frame[:, -1:], following], 1)}

    latents = jax.ShapeDtypeStruct(builder.latents.shape[1:], builder.latents.dtype)
    arguments = {"vae": builder.weights["vae"], "latents": latents}
    return program(name, decode, arguments, mesh=builder.mesh)


def values(tree: Any) -> Any:
    """Random values for abstract arrays, the same for the same tree."""
    generator = np.random.default_rng(7)

    def one(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype == jnp.bool_:
            return np.arange(leaf.shape[-1]) < leaf.shape[-1] - 2 + np.zeros(leaf.shape, bool)
        if jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype != jnp.uint16:
            most = 256 if leaf.dtype == jnp.uint8 else 2
            return generator.integers(0, most, leaf.shape).astype(leaf.dtype)
        array = generator.standard_normal(leaf.shape) * 0.2
        if leaf.dtype == jnp.uint16:  # the bits of bfloat16
            return np.asarray(array, jnp.bfloat16).view(np.uint16)
        return np.asarray(array, leaf.dtype)

    return jax.tree.map(one, tree)


def fitted(arguments: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one device in the dtypes of the mesh's program, and with its padding of tokens."""

    def padded(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        array = array.astype(leaf.dtype)
        if array.shape == leaf.shape:
            return array
        extra = [(0, more - size) for size, more in zip(array.shape, leaf.shape, strict=True)]
        return np.pad(array, extra, constant_values=9)  # no zeros: what is padding must not count

    return {name: jax.tree.map(padded, tree, wanted[name]) for name, tree in arguments.items()}


def run(spec: ProgramSpec, sizes: Sizes, arguments: Mapping[str, Any]) -> Any:
    """Exports, loads and runs a program."""
    where = jax_mesh(sizes, jax.devices()) or jax.devices()[0]
    lowered = lower(export_program(spec, "cpu"), spec.name, (), where)
    return jax.block_until_ready(lowered.compile(compiler_options=dict(FAST_COMPILE))(**arguments))


def largest_difference(expected: Any, found: Any) -> float:
    """Of all results, each relative to its largest value; padding of tokens is left out."""

    def one(expected: jax.Array, found: jax.Array) -> float:
        a = np.asarray(expected, np.float64)
        b = np.asarray(found, np.float64)[: len(a)]
        assert np.isfinite(b).all()
        return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, expected, found)))


def all_meshes(comparison: Comparison) -> Iterator[Sizes]:
    """Yields every mesh of 1, 2, 4 and 8 devices that works."""
    config = comparison.builder({}, comparison.dtype).configs["transformer"]
    counts = (1, 2, 4, 8)

    def every(axes: Sequence[str], devices: int) -> Iterator[dict[str, int]]:
        if not axes:
            if devices == 1:
                yield {}
            return
        for size in counts:
            if devices % size == 0:
                for rest in every(axes[1:], devices // size):
                    yield {axes[0]: size, **rest}

    for devices in counts:
        for sizes in map(normal, every(AXES, devices)):
            if mesh_problem(sizes, config, comparison.shape, DEVICES) is None:
                yield sizes


def with_heads(manifest: Manifest) -> Manifest:
    """The manifest of a toy with as many heads as there are devices."""
    configs = {name: dict(config) for name, config in manifest.configs.items()}
    for name in configs.keys() & {"transformer", "transformer_2"}:
        config = configs[name]
        config |= {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
        if config.get("added_kv_proj_dim") is not None:
            config["added_kv_proj_dim"] = HEADS * HEAD_DIM
    return manifest.changed(configs=configs)


def compare(arguments: Sequence[str]) -> None:
    """Does what the command's arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("meshes", nargs="*")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--size", default="112x64x9")
    parser.add_argument("--videos", type=int, default=1)
    parser.add_argument("--no-guidance", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mesh-dtype", help="where it is another than on one device")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--guiders", action="store_true", help="with all that there are")
    parser.add_argument("--all", action="store_true", help="every mesh of 1, 2, 4 and 8 devices that works")
    given = parser.parse_intermixed_args(arguments)
    manifest = with_heads(read_manifest(given.artifact))
    width, height, frames = map(int, given.size.split("x"))
    references = int("reference_image" in manifest.model.task.inputs)
    shape = Shape(width, height, frames, given.videos, not given.no_guidance, references)
    guiders = BUILT if given.guiders else ()
    comparison = Comparison(
        manifest, shape, given.dtype, given.mesh_dtype or given.dtype, given.lora_rank, guiders
    )
    meshes = (
        list(all_meshes(comparison))
        if given.all
        else [parse_mesh(text.replace(ONE, "")) for text in given.meshes]
    )
    decoded: set[int] = set()
    for sizes in meshes:
        names = given.programs.split(",")
        if num_devices(sizes) in decoded:  # the VAE's columns depend on the number of devices alone
            names = [name for name in names if name not in {"encode_video", *DECODERS}]
        decoded |= {num_devices(sizes)} if given.all else set()
        differences = comparison.differences(sizes, names)
        print(json.dumps({"mesh": mesh_text(sizes), "differences": differences}), flush=True)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if sys.argv[1:]:
        compare(sys.argv[1:])
        return
    for line in sys.stdin:
        compare(shlex.split(line))
        print(flush=True)


if __name__ == "__main__":
    main()
