"""A checkpoint that may be changed, the ways to change one, and the form of a row."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostile.refusal import edit_json
from hostile.tensor_files import join, split, tensor_names

WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}
SECOND = "transformer_2/diffusion_pytorch_model.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"transformer/diffusion_pytorch_model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
SHARD = SHARDS[1]
TOKENIZER = "tokenizer/tokenizer.json"
JSON_FILES = (
    *("model_index.json", "scheduler/scheduler_config.json", TOKENIZER, "tokenizer/tokenizer_config.json"),
    *("transformer/config.json", "text_encoder/config.json", "vae/config.json"),
)


class Checkpoint:
    """A good checkpoint's files, linked, of which any may be replaced, and the row's random numbers."""

    def __init__(self, good: Path, folder: Path, name: str) -> None:
        shutil.copytree(good, folder, copy_function=os.link)
        self.good, self.folder, self.draw = good, folder, np.random.default_rng(zlib.crc32(name.encode()))

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).write_bytes(data)

    def pick(self, *choices: Any) -> Any:
        return choices[self.draw.integers(len(choices))]


Change = Callable[[Checkpoint], object]


class Row(NamedTuple):
    """One broken checkpoint.

    Attributes:
        name: of the row. What it draws depends on it.
        change: what is done to the good checkpoint.
        code: of the error.
        values: what the error names.
        base: the good checkpoint: "float32", "float16" or "bfloat16" in single files, "sharded", "experts" of
            Wan 2.2, or "ti2v".
    """

    name: str
    change: Change
    code: str
    values: tuple[object, ...] = ()
    base: str = "float32"


def text(file: str, raw: bytes) -> Change:
    return lambda checkpoint: checkpoint.write(file, raw)


def json_of(file: str, change: Callable[[Any], object]) -> Change:
    return lambda checkpoint: edit_json(checkpoint.folder / file, change)


def fields(file: str, **values: Any) -> Change:
    """Changes fields of a JSON file; the value ... takes one out."""

    def change(data: dict[str, Any]) -> None:
        data.update(values)
        for name in [name for name, value in data.items() if value is ...]:
            del data[name]

    return json_of(file, change)


def index(**entries: Any) -> Change:
    return fields("model_index.json", **entries)


def becomes(name: str, make: Callable[[Path], object] = lambda path: None) -> Change:
    """Something else, or nothing, in a file's or folder's place."""

    def change(checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return change


def all_of(*changes: Change) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        for one in changes:
            one(checkpoint)

    return change


Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and data."""

Tensors = dict[str, Tensor]


def tensors(file: str, edit: Callable[[Tensors, Checkpoint], object]) -> Change:
    """Changes the tensors of a file, or of one drawn for "", and writes a file whose header fits them."""

    def change(checkpoint: Checkpoint) -> None:
        name = file or checkpoint.pick(*WEIGHTS.values())
        header, data = split((checkpoint.folder / name).read_bytes())
        found: Tensors = {}
        for key in tensor_names(header):
            begin, end = header[key]["data_offsets"]
            found[key] = (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])
        edit(found, checkpoint)
        entries, position = {}, 0
        for key, (dtype, shape, values) in found.items():
            offsets = [position, position + len(values)]
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            position += len(values)
        checkpoint.write(name, join(entries, b"".join(values for _, _, values in found.values())))

    return change


def renamed(old: str, new: str) -> Change:
    return lambda checkpoint: (checkpoint.folder / old).rename(checkpoint.folder / new)


def one_more(found: Tensors, checkpoint: Checkpoint) -> None:
    found["extra"] = ("F32", (2,), checkpoint.draw.bytes(8))
