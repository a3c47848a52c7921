"""What a machine computes in a second: kept by kind of programs, as a mean of what runs have measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.machine.rates import Rates

CPU = {"platform": "cpu", "device_kind": "cpu", "device_count": 1, "jax": "other"}


def test_what_was_measured_is_kept_as_a_mean() -> None:
    rates = Rates.of(CPU, dtype="bfloat16")
    assert rates.known == {} and rates.seconds({"steps": 1.0}) is None
    rates.learn({"steps": 80.0, "decode": 0.0}, {"steps": 10.0, "decode": 3.0, "text": 1.0})
    assert rates.known == {"steps": 8.0}
    rates.learn({"steps": 40.0, "decode": 6.0}, {"steps": 10.0, "decode": 3.0})
    assert Rates.of(CPU, dtype="bfloat16").known == {"steps": 6.0, "decode": 2.0}
    assert rates.seconds({"steps": 60.0, "decode": 4.0, "text": 2.0}) == 13.0  # text as the slowest
    rates.raise_to({"steps": 5.0, "decode": 3.0, "restore": 1.0})
    assert rates.known == {"steps": 6.0, "decode": 3.0, "restore": 1.0}
    assert Rates.of(CPU, dtype="float32").known == Rates.of(CPU | {"device_count": 2}).known == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"steps": -1}', b'{"steps": 0}', bytes(2**13)])
def test_a_file_of_another_kind_is_nothing(content: bytes) -> None:
    rates = Rates.of(CPU)
    rates.file.parent.mkdir(parents=True, exist_ok=True)
    rates.file.write_bytes(content)
    assert rates.known == {}


def test_a_cache_that_cannot_be_written_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    Rates.of(CPU).learn({"steps": 1.0}, {"steps": 1.0})
    assert Rates.of(CPU).known == {}
