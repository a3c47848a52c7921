"""A good checkpoint of hard links that a test of bad input may change, and what it then has to hold to."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanbuild.cli import wanbuild
from wancli.console import run

SEED = 20_250_301
LIMIT_SECONDS = 10.0
"""A refusal takes milliseconds; this is for what would never end."""

WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
SHARD = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
JSON_FILES = (
    "vae/config.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint of hard links, in which a file may be replaced, and the case's random numbers."""

    folder: Path
    rng: np.random.Generator

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink()
        (self.folder / name).write_bytes(data)

    def edit_json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads(self.read(name))
        change(data)
        self.write(name, json.dumps(data).encode())

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def weights(self) -> str:
        """The weight file of one of the components."""
        return str(self.pick(*WEIGHTS.values()))

    def replace(self, name: str, make: Callable[[Path], object]) -> None:
        """Puts something else in a file's or folder's place."""
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)


Change = Callable[[Checkpoint], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One bad checkpoint.

    Args:
        name: the test's name.
        change: what is done to the good checkpoint. What it draws depends on ``SEED`` and the name alone.
        says: a regular expression that the message has to match, so that it is refused for its own fault.
        base: the good checkpoint: "float32", "float16" or "bfloat16" in single files, "sharded", or "experts"
            of Wan 2.2.
    """

    name: str
    change: Change
    says: str = ""
    base: str = "float32"


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def header_end(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def tensor_names(header: dict[str, Any]) -> list[str]:
    return sorted(name for name in header if name != "__metadata__")


Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and data."""


def edit_tensors(name: str, edit: Callable[[dict[str, Tensor], Checkpoint], object]) -> Change:
    """Changes a file's tensors and writes a file whose header fits them."""

    def change(checkpoint: Checkpoint) -> None:
        file = name or checkpoint.weights()
        header, data = split(checkpoint.read(file))
        tensors: dict[str, Tensor] = {}
        for key in tensor_names(header):
            begin, end = header[key]["data_offsets"]
            tensors[key] = (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])
        edit(tensors, checkpoint)
        entries, position = {}, 0
        for key, (dtype, shape, values) in tensors.items():
            offsets = [position, position + len(values)]
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            position += len(values)
        checkpoint.write(file, join(entries, b"".join(values for _, _, values in tensors.values())))

    return change


class HungError(BaseException):
    """Not an Exception: nothing may catch it on its way to the test."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises HungError in the main thread, again and again, until it gets out."""

    def stop(number: int, frame: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def everything(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every name below a folder, with the kind, size and time of what it is; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = Path(parent, name).lstat()
            found[f"{parent}/{name}"] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def checkpoint_of(good: Path, folder: Path, name: str) -> Checkpoint:
    """A good checkpoint's files, linked, for the case of this name."""
    shutil.copytree(good, folder, copy_function=os.link)
    return Checkpoint(folder, np.random.default_rng([SEED, zlib.crc32(name.encode())]))


def assert_refused(
    case: Case, good: dict[str, Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4, one line that says why, soon, and nothing written or changed."""
    case.change(checkpoint_of(good[case.base], folder / "source", case.name))
    before = everything(folder)
    with time_limit(LIMIT_SECONDS):
        code = run(wanbuild, ["convert", str(folder / "source"), "--artifact", str(folder / "artifact")])
    output = capsys.readouterr()
    assert (code, output.out) == (4, ""), output.err
    assert everything(folder) == before
    (line,) = output.err.splitlines()
    assert line.startswith("error: ") and "internal error" not in line
    assert line.isprintable() and len(line) < 10_000
    assert re.search(case.says, line), line
