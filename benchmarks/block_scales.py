"""Measures what weights of 8 bits cost a denoising step on this CPU, in each form.

Four layers of 1.3B's shapes with random weights, in bfloat16. The forms take turns, and each turn's CPU
seconds are divided by those of bfloat16 in the same turn: so the ratio holds during other work too. A product
of weights with a scale for each row is scaled afterwards; blocks have to be widened and scaled before.

    python benchmarks/block_scales.py [--size 256x256x13] [--turns 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpus import cpu_name
from wanbuild.models.attention import blocked_attention
from wanbuild.models.eight_bit import linear_layers, store_in_eight_bits
from wanbuild.models.params import LAYERS, abstract_params, bind
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.targets.target import multiplies_bfloat16
from wanrun import EIGHT_BITS
from wanrun.artifact.layout import BITS
from wanrun.machine.cpu import cpu_features

CONFIG = TransformerConfig(12, 128, 8960, 4, 4096)
FORMS = {one.name: form for form, one in EIGHT_BITS.items()}


def stored(module: Any, form: str) -> Any:
    """Returns the module with weights of 8 bits in its blocks."""
    linear = linear_layers(module)
    stacked = [path for path, one in linear.items() if one.weight.get_metadata()["axes"][0] == LAYERS]
    return store_in_eight_bits(module, dict.fromkeys(stacked, form))


def drawn(leaf: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    """Returns random values of a parameter, as a program for a CPU takes them."""
    values = 0.02 * rng.standard_normal(leaf.shape, np.float32)
    values = np.rint(2000 * values) if leaf.dtype == jnp.int8 else values
    array = values.astype(leaf.dtype)
    name = leaf.dtype.name
    return jnp.asarray(array.view(BITS[name]) if name in BITS else array)


def step_of(module: Any, size: tuple[int, ...]) -> Callable[[], None]:
    """Returns a call of the compiled step of a module with random weights."""
    rng = np.random.default_rng(1)
    given = jax.tree.map(lambda leaf: drawn(leaf, rng), abstract_params(module))
    width, height, frames = size
    x = rng.standard_normal((1, 16, (frames + 3) // 4, height // 8, width // 8), np.float32)
    embeddings = rng.standard_normal((1, 512, CONFIG.text_dim), np.float32)

    def step(params: Any, x: jax.Array, embeddings: jax.Array) -> jax.Array:
        model = bind(module, params)
        kv, rope = model.prepare(embeddings, x.shape[2:], jnp.bfloat16)
        return model(x, jnp.float32(700), kv, rope, {}, blocked_attention, jnp.bfloat16)

    with tracing_with(TraceOptions(widened=not multiplies_bfloat16(cpu_features()))):
        compiled = jax.jit(step).lower(given, x, embeddings).compile()

    def run() -> None:
        jax.block_until_ready(compiled(given, x, embeddings))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="256x256x13", help="width, height and frames")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    size = tuple(int(number) for number in arguments.size.split("x"))

    def plain() -> Any:
        return WanTransformer(CONFIG, jnp.bfloat16)

    modules = {"bfloat16": plain()}
    modules |= {name: stored(plain(), form) for name, form in FORMS.items()}
    steps = {name: step_of(module, size) for name, module in modules.items()}
    seconds = dict[str, list[float]]()
    for run in steps.values():
        run()
    for _ in range(arguments.turns):
        for name, run in steps.items():
            begun = time.process_time()
            run()
            seconds.setdefault(name, []).append(time.process_time() - begun)
    print(f"{cpu_name()}, four layers of 1.3B, {arguments.size}, {arguments.turns} turns\n")
    print("| weights | fewest CPU seconds | of bfloat16's in the same turn |\n|---|---|---|")
    for name, taken in seconds.items():
        ratios = [one / base for one, base in zip(taken, seconds["bfloat16"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        spread = f"{statistics.median(ratios):.3f} ({quarters[0]:.3f} to {quarters[2]:.3f})"
        print(f"| {name} | {min(taken):.3f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
