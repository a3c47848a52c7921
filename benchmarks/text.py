"""Times the text encoder on this CPU: JAX's compiled program, and transformers' model in torch.

Both use the same converted weights: UMT5-XXL's width, few layers, random values. Every figure is the median
time for two prompts that are one token shorter than the length in the first column, encoded one after the
other or as one batch. The variants take turns, so that other load on the machine affects all of them.

    python benchmarks/text.py --layers 2 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.build import convert
from wanbuild.components import KINDS
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.models.params import bind
from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_TEXT_ENCODER
from wanbuild.toy.toy_weights import Stored
from wanrun.artifact.manifest import read_manifest
from wanrun.weights.restore import Restore

LENGTHS = (64, 128, 256, 512)
PROMPTS = 2
MAX_LENGTH = 512

Encode = Callable[[np.ndarray, np.ndarray], np.ndarray]


def make_artifact(folder: Path, layers: int) -> None:
    """Converts a random checkpoint whose text encoder has the published width and a small vocabulary."""
    sizes = {**PUBLISHED_TEXT_ENCODER, "num_layers": layers, "vocab_size": TOY_TEXT_ENCODER["vocab_size"]}
    text = {name: sizes[name] for name in TOY_TEXT_ENCODER if name in sizes and name != "torch_dtype"}
    width = {"text_dim": sizes["d_model"]}
    write_toy(
        folder / "checkpoint",
        configs={"text_encoder": text, "transformer": width},
        stored=Stored(dtype="bfloat16"),
    )
    convert(ConvertRequest(folder / "checkpoint", folder / "artifact"))


def random_prompts(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask (PROMPTS, MAX_LENGTH) of prompts that are one token shorter than ``length``."""
    ids = np.random.default_rng(length).integers(2, TOY_TEXT_ENCODER["vocab_size"], (PROMPTS, MAX_LENGTH))
    mask = np.broadcast_to(np.arange(MAX_LENGTH) < length - 1, ids.shape)
    return np.where(mask, ids, 0).astype(np.int32), mask.astype(np.int32)


def jax_encoder(artifact: Path) -> Encode:
    """Returns the ``encode_text`` program as built for the CPU, for any static shape."""
    manifest, kind = read_manifest(artifact), KINDS["text_encoder"]
    config = kind.parse(manifest.configs["text_encoder"], "text_encoder")
    module = kind.module(config, manifest.dtypes["text_encoder"])
    with ThreadPoolExecutor(2) as pool:
        tree = Restore(artifact, "text_encoder", manifest.components["text_encoder"], pool).result(bits=True)
    weights = jax.device_put(tree)

    @jax.jit
    def encode_text(weights: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return bind(module, weights)(ids, mask, jnp.bfloat16)

    def encode(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        length = int(mask.sum(axis=1).max()) + 1
        embeddings = np.asarray(encode_text(weights, ids[:, :length], mask[:, :length]))
        return np.pad(embeddings, ((0, 0), (0, MAX_LENGTH - length), (0, 0)))

    return encode


def one_by_one(encode: Encode) -> Encode:
    def each(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.concatenate([encode(ids[i : i + 1], mask[i : i + 1]) for i in range(len(ids))])

    return each


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def torch_encoder(checkpoint: Path) -> Encode:
    """Returns transformers' model, eager and in bfloat16, at the lengths of the compiled program."""
    import torch
    from transformers import UMT5EncoderModel

    model = UMT5EncoderModel.from_pretrained(checkpoint / "text_encoder", dtype=torch.bfloat16).eval()

    def encode(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        length = int(mask.sum(axis=1).max()) + 1
        given, keep = (torch.from_numpy(array[:, :length].astype(np.int64)) for array in (ids, mask))
        with torch.inference_mode():
            hidden = model(input_ids=given, attention_mask=keep).last_hidden_state * keep[..., None]
        return np.pad(hidden.float().numpy(), ((0, 0), (0, MAX_LENGTH - length), (0, 0)))

    return encode


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    a, b = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(folder: Path, rounds: int) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
    """Returns median seconds by variant and length, and torch's distance from jax by length."""
    variants: dict[str, Encode] = {}
    encoders = {"jax": jax_encoder(folder / "artifact"), "torch": torch_encoder(folder / "checkpoint")}
    for name, encode in encoders.items():
        variants[f"{name}, one by one"] = one_by_one(encode)
        variants[f"{name}, one batch"] = encode
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in variants}
    errors: dict[str, float] = {}
    for turn in range(rounds + 1):
        for length in LENGTHS:
            ids, mask = random_prompts(length)
            if turn == 0:  # the first turn compiles, and does not count
                results = {name: encode(ids, mask) for name, encode in variants.items()}
                errors[str(length)] = relative_error(results["torch, one by one"], results["jax, one by one"])
                continue
            for name, encode in variants.items():
                times[name][length].append(seconds(encode, ids, mask))
    medians = {
        name: {length: statistics.median(values) for length, values in rows.items()}
        for name, rows in times.items()
    }
    return medians, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wan-text-") as temporary:
        folder = Path(temporary)
        make_artifact(folder, options.layers)
        medians, errors = measure(folder, options.rounds)
    print(f"{PROMPTS} prompts through {options.layers} layers, bfloat16, seconds, median of {options.rounds}")
    print(f"{'tokens':<28}" + "".join(f"{length:>9}" for length in LENGTHS))
    for name, row in medians.items():
        print(f"{name:<28}" + "".join(f"{row[length]:9.3f}" for length in LENGTHS))
    print(f"{'torch from jax':<28}" + "".join(f"{errors[str(length)]:9.1e}" for length in LENGTHS))
    record = {"layers": options.layers, "rounds": options.rounds, "seconds": medians}
    print(json.dumps({**record, "relative_error": errors}))


if __name__ == "__main__":
    main()
