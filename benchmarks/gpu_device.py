"""The parts of gpu.py that run the project's programs on the device: ``python gpu_device.py NAME JSON``.

Programs are exported, lowered and compiled as ``wanbuild compile`` does it, for this machine. Their arguments
are random and made on the device. Only JAX is imported at the top: the ceiling needs nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows import COMPILES, Rows, chip_name, main

Arguments = Mapping[str, Any]
Call = Callable[..., Any]
GIGA, TERA = 1e9, 1e12
MATRICES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (65520, 5120, 13824))
"""Rows, sums and columns of the ceiling's matrices; the last are of a 14B feed-forward at 832x480x81."""
SEQUENCES = ((32760, 12), (32760, 40), (75600, 12), (75600, 40))
"""Tokens and heads of the attentions: 832x480x81 and 1280x720x81, 1.3B and 14B."""
LARGE = 2**20
"""Values of an array that is made on the device; smaller ones are cheaper to send than to compile for."""


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform in ±0.03, or any int8; a stack is made layer by layer: it may have more than 2**31 values."""

    def part(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if dtype == jnp.int8:
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)
        return jax.random.uniform(key, shape, jnp.float32, -0.03, 0.03).astype(dtype)

    if len(shape) < 3:
        return part(key, shape)
    return jax.lax.map(lambda key: part(key, shape[1:]), jax.random.split(key, shape[0]))


def random_arrays(tree: Any, device: jax.Device) -> Any:
    """Returns random arrays of a tree of shapes and dtypes: uniform in ±0.03, int8 of all values, other
    integers 0."""

    def array(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        dtype, seed = jnp.dtype(leaf.dtype), zlib.crc32(jax.tree_util.keystr(path).encode())
        if dtype == jnp.int8 and leaf.size >= LARGE:
            return _uniform(jax.random.key(seed, impl="rbg"), tuple(leaf.shape), dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return jax.device_put(np.zeros(leaf.shape, dtype), device)
        if leaf.size < LARGE:
            values = np.random.default_rng(seed).uniform(-0.03, 0.03, leaf.shape)
            return jax.device_put(values.astype(dtype), device)
        return _uniform(jax.random.key(seed, impl="rbg"), tuple(leaf.shape), dtype)

    with jax.default_device(device):
        return jax.block_until_ready(jax.tree_util.tree_map_with_path(array, tree))


@dataclass(frozen=True)
class Timed:
    """Seconds of each timing, and the last result."""

    seconds: list[float]
    result: Any

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def timed(call: Call, make: Call, repeats: int, until: float, calls: int = 1) -> Timed:
    """Times calls, after one that does not count; fewer if the time is up.

    Args:
        call: takes the arguments that ``make`` returns, anew for each timing, because some are donated.
        make: makes the arguments; its time does not count.
        repeats: timings.
        until: on time.monotonic(); a timing that would end later is left out, but never all.
        calls: calls of one timing, of which a call's share is returned.
    """
    seconds: list[float] = []
    for number in range(repeats + 1):
        arguments = jax.block_until_ready(make())
        started = time.perf_counter()
        for _ in range(calls):
            result = call(**arguments)
        del arguments
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - started) / calls)
        if number and time.monotonic() + 1.5 * calls * seconds[-1] > until:
            break
    return Timed(seconds[1:], result)


def peak_bytes(device: jax.Device) -> int | None:
    """Returns the most bytes that this process has held on the device; None where JAX does not count them."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def ceiling(rows: Rows, arguments: Arguments) -> None:
    """Matrix products in bfloat16, of which the fastest is the ceiling; and the attention alone."""
    device, smoke, until = jax.devices()[0], arguments["smoke"], arguments["until"]
    product = jax.jit(lambda a, b: a @ b)
    for m, k, n in ((128, 128, 128),) if smoke else MATRICES:
        what = f"matmul {m}x{k}x{n}"
        with rows.attempt(what):
            shapes = {"a": (m, k), "b": (k, n)}
            found = timed(product, _makes(shapes, device), 5, until, calls=10)
            best = min(found.seconds)
            tflops = 2 * m * k * n / best / TERA
            rows.add(what, best * 1e3, "ms", tflops=tflops, seconds=found.seconds, ceiling=True)
    how = "xla" if device.platform == "cpu" else "cudnn"
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=how))
    for tokens, heads in ((64, 2),) if smoke else SEQUENCES:
        what = f"attention {tokens} tokens, 2 x {heads} heads, {how}"
        with rows.attempt(what):
            shapes = dict.fromkeys(("query", "key", "value"), (2, tokens, heads, 128))
            found = timed(attend, _makes(shapes, device), 5, until)
            tflops = 4 * 2 * heads * tokens**2 * 128 / found.median / TERA
            rows.add(what, found.median * 1e3, "ms", tflops=tflops, seconds=found.seconds)
    if (peak := peak_bytes(device)) is not None:
        rows.add("peak memory", peak / GIGA, "GB")


def _makes(shapes: Mapping[str, tuple[int, ...]], device: jax.Device) -> Call:
    """Returns a function of the same bfloat16 arrays, for calls that donate nothing."""
    abstract = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arrays = random_arrays(abstract, device)
    return lambda: dict(arrays)


def step_flops(config: Any, tokens: int, text_tokens: int, halves: int) -> float:
    """Returns the operations of a denoising step in matrix products.

    For each of L layers of width D and feed-forward width F, with S tokens and T of the text: projections of
    self-attention 8 S D², its scores and sums 4 S² D; of cross-attention query and output 4 S D² (keys and
    values are made before the first step), scores and sums 4 S T D; feed-forward 4 S D F. Then the patches'
    projections in and out. Both halves of a guidance pair count; norms, modulation, RoPE and timestep do not.

    Args:
        config: the transformer's config.
        tokens: S.
        text_tokens: T.
        halves: 2 with guidance, else 1.
    """
    S, D, F = tokens, config.dim, config.ffn_dim
    layer = 8 * S * D**2 + 4 * S**2 * D + 4 * S * D**2 + 4 * S * text_tokens * D + 4 * S * D * F
    ends = 2 * S * D * config.patch_volume * (config.in_channels + config.out_channels)
    return float(halves * (config.num_layers * layer + ends))


@dataclass(frozen=True)
class Choice:
    """Changed fields of ``BuildOptions``, and 8 bits.

    Args:
        label: what rows say.
        options: the changed fields.
        quantise: the form of ``--quantise``; None for none.
        w8a8: whether products are in 8 bits too.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quantise: str | None = None
    w8a8: bool = False


@dataclass(frozen=True)
class Compiled:
    """A program, the seconds to compile it, and the bytes of one call: arguments, outputs, temporaries."""

    call: Call
    seconds: float
    nbytes: int


class Programs:
    """Compiles a model's programs for this machine.

    Args:
        model: one of ``checkpoints.MODELS``, or ``toy``.
        choice: what differs from the defaults. The toy's convolutions are direct, as on every GPU.
    """

    def __init__(self, model: str, choice: Choice) -> None:
        import msgspec

        from checkpoints import MODELS
        from wanbuild.build_options import BuildOptions
        from wanbuild.conversion.chosen import parse_quantise
        from wanbuild.plan.published_model import model_manifest, published_manifest
        from wanbuild.programs.jax_flags import pinned
        from wanbuild.targets.target import resolve_target
        from wanbuild.toy.toy_configs import TOY_VARIANTS
        from wanbuild.variants.table import variants

        toy = "wan2.1-t2v" if model == "toy" else None
        target = resolve_target("local")
        target = target.in_eight_bits() if choice.w8a8 else target
        quantise = parse_quantise(choice.quantise, ())
        kernels = {"convolution": "direct"} if toy else {}
        self.target = dataclasses.replace(target, kernels=msgspec.structs.replace(target.kernels, **kernels))
        self.device = target.device
        self._flags = ExitStack()  # held until the process ends
        self._flags.enter_context(pinned(target.platform))
        if toy:
            self._manifest = model_manifest(variants()[toy], TOY_VARIANTS[toy].configs, quantise=quantise)
        else:
            self._manifest = published_manifest(MODELS[model][1], quantise=quantise)
        self._options = BuildOptions(**choice.options)

    def builder(self, width: int, height: int, frames: int) -> Any:
        """Returns the builder of a profile with guidance."""
        from wanbuild.programs.kinds import ProgramBuilder
        from wanbuild.programs.shape import Shape

        shape = Shape(width, height, frames, 1, True)
        return ProgramBuilder(self._manifest, shape, self._options, *self.target.programs_for)

    def compile(self, spec: Any) -> Compiled:
        """Compiles a program.

        Raises:
            MemoryError: if a call needs more than JAX may use of the device's memory.
        """
        from wanbuild.programs.export import export_program
        from wanbuild.programs.xla import compiled_for

        data = export_program(spec, self.target.platform)
        started = time.perf_counter()
        compiled = compiled_for(self.target, spec.name, data, spec.donate)
        seconds = time.perf_counter() - started
        memory: Any = compiled.memory_analysis()
        used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        used += memory.output_size_in_bytes - memory.alias_size_in_bytes
        limit = (self.device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and used > limit:
            raise MemoryError(
                f"{spec.name} needs {used / GIGA:.1f} GB, and JAX may use {limit / GIGA:.1f} GB"
            )
        return Compiled(compiled, seconds, used)

    def report(self, rows: Rows, what: str, compiled: Compiled, found: Timed, **facts: Any) -> None:
        """Adds the rows of one program.

        Raises:
            ArithmeticError: if its result is not finite.
        """
        note = f"median of {len(found.seconds)}; arguments + temporaries {compiled.nbytes / GIGA:.2f} GB"
        rows.add(what, found.median, "s", note, seconds=found.seconds, **facts)
        rows.add(f"{what}: compile", compiled.seconds, "s", tolerance=COMPILES)
        if (peak := peak_bytes(self.device)) is not None:
            rows.add(f"{what}: peak memory", peak / GIGA, "GB", "of this process so far")
        for leaf in jax.tree.leaves(found.result):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
                raise ArithmeticError("the result is not finite")


def step(rows: Rows, arguments: Arguments) -> None:
    """The denoising step of one model, with guidance, at each size.

    Args:
        rows: gets the times.
        arguments: ``model``, ``sizes``, ``repeats``; ``quantise`` and ``w8a8``, of a ``Choice``;
            ``lora_rank``, of slots.
    """
    model, form, w8a8 = arguments["model"], arguments.get("quantise"), arguments.get("w8a8", False)
    rank = arguments.get("lora_rank", 0)
    programs = Programs(model, Choice("default", {"lora_rank": rank}, form, w8a8))
    bits = f" {form} in {'8 bits' if w8a8 else 'bfloat16'}" if form else ""
    bits += f", slots of rank {rank}" if rank else ""
    rows.add("kernels", note=", ".join(f"{k} {v}" for k, v in _fields(programs.target.kernels).items()))
    weights: Any = None
    for size in arguments["sizes"]:
        what = "step {} {}x{}x{}".format(model, *size) + bits
        with rows.attempt(what):
            builder = programs.builder(*size)
            spec, before = builder.first("step"), builder.first("prepare")
            compiled, prepare = programs.compile(spec), programs.compile(before)
            abstract = dict(zip(before.inputs, before.arguments, strict=True))
            if weights is None:
                weights = _weights(rows, model, abstract["transformer"], programs.device)
            before_steps = random_arrays(abstract | {"transformer": None}, programs.device)
            before_steps["transformer"], embeddings = weights, before_steps["embeddings"]
            given = {"transformer": weights, **prepare.call(**before_steps)}
            rest = {name: a for name, a in zip(spec.inputs, spec.arguments, strict=True) if name not in given}
            make = _fresh(given, random_arrays(rest, programs.device))
            found = timed(compiled.call, make, arguments["repeats"], arguments["until"])
            config = builder.configs["transformer"]
            tokens = int(np.prod(config.grid(builder.latent_shape)))
            flops = step_flops(config, tokens, embeddings.shape[1], 2)
            tflops = flops / found.median / TERA
            programs.report(rows, what, compiled, found, tflops=tflops, flops=flops)


def _fields(record: Any) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(record)


def _weights(rows: Rows, model: str, abstract: Any, device: jax.Device) -> Any:
    started = time.perf_counter()
    weights = random_arrays(abstract, device)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    rows.add(f"weights {model}", nbytes / GIGA, "GB", f"made in {time.perf_counter() - started:.1f} s")
    return weights


def _fresh(given: Mapping[str, Any], copied: Any) -> Call:
    """Returns a function of arguments of which some, those that may be donated, are copied for each call."""
    return lambda: {**given, **jax.tree.map(jnp.copy, copied)}


VAE_CHOICES = (
    Choice("TF32 products"),
    Choice("exact products", {"vae_precision": "highest"}),
    Choice("bfloat16", {"vae_dtype": "bfloat16"}),
)


def decode(rows: Rows, arguments: Arguments) -> None:
    """The VAE's decode at each size, with each of the ``choices``, which are numbers of ``VAE_CHOICES``."""
    for choice in (VAE_CHOICES[number] for number in arguments["choices"]):
        programs = Programs(arguments["model"], choice)
        for size in arguments["sizes"]:
            what = "decode {}x{}x{}, {}".format(*size, choice.label)
            with rows.attempt(what):
                spec = programs.builder(*size).named("decode_video")
                compiled = programs.compile(spec)
                given = random_arrays(dict(zip(spec.inputs, spec.arguments, strict=True)), programs.device)
                make = functools.partial(dict, given)
                found = timed(compiled.call, make, arguments["repeats"], arguments["until"])
                programs.report(rows, what, compiled, found)


def device(rows: Rows, arguments: Arguments) -> None:
    """The device that JAX prefers; it must be a GPU, except in a smoke run.

    Raises:
        RuntimeError: if it is another.
    """
    first = jax.devices()[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    facts = {"platform": first.platform, "chip": _chip(first.device_kind), "versions": _versions()}
    rows.add("device", limit and limit / GIGA, "GB", first.device_kind, **facts)
    rows.add("platform", note=" ".join(first.client.platform_version.split()))
    try:
        from wanbuild.targets.target import attached_platform
    except ImportError as error:
        rows.add("local target", note=f"not known: {error}")
    else:
        rows.add("local target", note=attached_platform())
    if first.platform != "gpu" and not arguments["smoke"]:
        raise RuntimeError(f"JAX sees no GPU: its default device is {first.device_kind}")


def _chip(device_kind: str) -> str:
    """The project's name of a chip, or one made of JAX's."""
    try:
        from wanbuild.targets.chips import CHIPS
    except ImportError:
        return chip_name(device_kind)
    names = (name for name, chip in CHIPS.items() if device_kind in chip.device_kinds)
    return next(names, chip_name(device_kind))


def _versions() -> dict[str, str]:
    """The versions of CUDA and cuDNN that JAX has loaded; none without its plug-in."""
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return {}
    cuda, cudnn = cuda_versions.cuda_runtime_get_version(), cuda_versions.cudnn_get_version()
    return {
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "cudnn": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
    }


if __name__ == "__main__":
    main(MappingProxyType({"device": device, "ceiling": ceiling, "step": step, "decode": decode}))
