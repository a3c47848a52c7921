"""Measures what a block of a 14B transformer loses with weights, or weights and activations, of 8 bits.

A whole transformer of one layer and random weights, whose velocity is compared with that of float32 from the
same weights: once with normal weights and activations, once with tails (Student's t with 4 degrees of
freedom) and twelve channels of activations twenty times as large as the others. Seconds are those of a step
on this CPU.

    python benchmarks/block.py [--size 256x160x5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpus import cpu_name
from wanbuild.conversion.quantise import Quantiser
from wanbuild.models.attention import blocked_attention
from wanbuild.models.eight_bit import linear_layers, store_in_eight_bits
from wanbuild.models.params import LAYERS, abstract_params, bind
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.targets.target import multiplies_bfloat16
from wanrun import EIGHT_BITS
from wanrun.artifact.layout import BITS
from wanrun.artifact.parameters import flat, nest
from wanrun.machine.cpu import cpu_features

CONFIG = TransformerConfig(40, 128, 13824, 1, 4096)
OUTLIERS, TIMES = 12, 20
SCALES = (1, 4)
"""Rows of a block's modulation that scale what its attention and its feed-forward take."""
REPEATS = 3


@dataclass(frozen=True)
class Form:
    """How the layers multiply.

    Args:
        dtype: compute dtype, and stored dtype where ``eight_bit`` is empty.
        eight_bit: the form of the blocks' matrices, of ``EIGHT_BITS``; empty for none.
        w8a8: whether activations are rounded too.
        rounded: whether results of products are.
    """

    dtype: str
    eight_bit: str = ""
    w8a8: bool = False
    rounded: bool = False


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "float32": Form("float32"),
        "bfloat16": Form("bfloat16"),
        "bfloat16, products rounded": Form("bfloat16", rounded=True),
        "int8": Form("bfloat16", "int8"),
        "q8_0": Form("bfloat16", "q8_0"),
        "float8": Form("bfloat16", "float8_e4m3fn"),
        "int8, W8A8": Form("bfloat16", "int8", True),
        "float8, W8A8": Form("bfloat16", "float8_e4m3fn", True),
    }
)


def random_params(outliers: bool) -> dict[str, np.ndarray]:
    """Returns float32 parameters by path."""
    rng = np.random.default_rng(0)
    params = {}
    for path, leaf in flat(abstract_params(WanTransformer(CONFIG, jnp.float32))).items():
        draw = rng.standard_normal(leaf.shape, np.float32)
        if outliers:
            draw /= np.sqrt(rng.standard_gamma(2, leaf.shape, np.float32) / 2)
        matrix = len(leaf.shape) > 2 or path.endswith("weight")
        params[path] = draw * np.float32(leaf.shape[-1] ** -0.5 if matrix else 0.1)
    if outliers:
        channels = rng.choice(CONFIG.dim, OUTLIERS, replace=False)
        for row in SCALES:
            params["blocks/scale_shift_table"][..., row, channels] += TIMES - 1
    return params


def stored(params: Mapping[str, np.ndarray], form: Form, layers: Mapping[str, str]) -> Any:
    """Returns parameters as a program for a CPU takes them."""
    arrays: dict[str, Any] = {}
    for path, values in params.items():
        dtype = jnp.dtype(form.dtype)
        if path.removesuffix("/weight") in layers:
            rows = Quantiser(values.size)(values[0], form.eight_bit)
            dtype, name = jnp.dtype(EIGHT_BITS[form.eight_bit].dtype), path.removesuffix("weight") + "scale"
            values, arrays[name] = rows.stored.view(dtype)[None], rows.scales[None]
        values = np.asarray(values, dtype)
        arrays[path] = values.view(BITS[dtype.name]) if dtype.name in BITS else values
    return nest(jax.tree.map(jnp.asarray, arrays))


def velocity(form: Form, params: Mapping[str, np.ndarray], size: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """Returns the velocity of a step, float32, and the median of its seconds."""
    module: Any = WanTransformer(CONFIG, jnp.dtype(form.dtype))
    linear = linear_layers(module) if form.eight_bit else {}
    layers = {
        path: form.eight_bit
        for path, layer in linear.items()
        if layer.weight.get_metadata()["axes"][0] == LAYERS
    }
    given = stored(params, form, layers)
    module = store_in_eight_bits(module, layers)
    width, height, frames = size
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 16, (frames + 3) // 4, height // 8, width // 8)).astype(np.float32)
    embeddings = rng.standard_normal((1, 512, CONFIG.text_dim)).astype(np.float32)

    def step(params: Any, x: jax.Array, embeddings: jax.Array) -> jax.Array:
        model = bind(module, params)
        kv, rope = model.prepare(embeddings, x.shape[2:], jnp.dtype(form.dtype))
        return model(x, jnp.float32(700), kv, rope, {}, blocked_attention, jnp.dtype(form.dtype))

    widened = not form.rounded and not multiplies_bfloat16(cpu_features())
    with tracing_with(TraceOptions(widened=widened, w8a8=form.w8a8, rounded=form.rounded)):
        compiled = jax.jit(step).lower(given, x, embeddings).compile()
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        made = np.asarray(jax.block_until_ready(compiled(given, x, embeddings)), np.float32)
        times.append(time.perf_counter() - begun)
    return made, statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="256x160x5", help="width, height and frames")
    size = tuple(int(number) for number in parser.parse_args().size.split("x"))
    print(f"{cpu_name()}, one layer of 14B, {'x'.join(map(str, size))}\n")
    print("| form | error, normal | error, tails and outliers | seconds |\n|---|---|---|---|")
    sources = [random_params(outliers) for outliers in (False, True)]
    exact: list[np.ndarray] = []
    for name, form in FORMS.items():
        made, seconds = zip(*(velocity(form, params, size) for params in sources), strict=True)
        exact = exact or list(made)
        errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(made, exact, strict=True)]
        print(f"| {name} | {errors[0]:.1e} | {errors[1]:.1e} | {min(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
