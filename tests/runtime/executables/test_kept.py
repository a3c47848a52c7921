"""What was compiled here is found again, if it is whole and was made for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from helpers.manifests import plain_program
from wanrun.executables.compiled_here import keep, kept_file, options_here, read_kept


def file(folder: Path, options: Any = None, sha256: str = "1") -> Path:
    return kept_file(folder, plain_program(sha256=sha256), options or {}, jax.devices("cpu"))


def test_an_entry(tmp_path: Path) -> None:
    path = file(tmp_path)
    assert read_kept(path) is None
    keep(path, b"bytes")
    assert read_kept(path) == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


def test_each_fact_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = [
        file(tmp_path),
        file(tmp_path, options={"xla_x": True}),
        file(tmp_path, sha256="2"),
        kept_file(tmp_path, plain_program(sha256="1"), {}, 2 * jax.devices("cpu")),
    ]
    assert len(set(files)) == len(files)


def test_autotuning_is_not_turned_off_on_the_chip() -> None:
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False", "xla_tpu_x": "true"}
    assert options_here(options) == {"xla_tpu_x": "true"}


@pytest.mark.parametrize("damaged", ["bytes", "cut", "empty", "other name"])
def test_damage_is_as_if_nothing_was_kept(tmp_path: Path, damaged: str) -> None:
    path, other = file(tmp_path), file(tmp_path, sha256="2")
    keep(path, b"bytes")
    content = path.read_bytes()
    changed = {"bytes": b"B" + content[1:], "cut": content[:-1], "empty": b""}
    if damaged == "other name":
        path.rename(other)
        path = other
    else:
        path.write_bytes(changed[damaged])
    assert read_kept(path) is None
