"""Durations on the process's own clock."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wanrun import timing
from wanrun.errors import UsageError
from wanrun.timing import PHASES, Timings, peak_rss_bytes, process_start_seconds_ago

# What benchmarks and users read: a key may be added, none may go or change its name.
KEYS = {
    "import_seconds",
    "manifest_seconds",
    "restore_seconds",
    "transfer_seconds",
    "executables_seconds",
    "process_to_ready_seconds",
    "text_seconds",
    "process_to_first_step_seconds",
    "step_seconds",
    "denoise_seconds",
    "decode_seconds",
    "encode_video_seconds",
    "cache_hits",
    "cache_misses",
    "peak_rss_bytes",
    "total_seconds",
}


def run_python(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


def test_the_clock_starts_with_the_process_and_not_with_the_import() -> None:
    started = time.monotonic()
    code = "import time; time.sleep(0.3); from wanrun.timing import Timings; print(Timings().now())"
    (printed,) = run_python(code)
    outside = time.monotonic() - started
    # The kernel's record has ticks of 10 ms.
    assert 0.3 - 0.02 < float(printed) < outside + 0.02


def test_without_the_kernels_record_the_clock_starts_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **kwargs: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    since_import = time.monotonic() - timing._IMPORTED
    assert process_start_seconds_ago() == pytest.approx(since_import, abs=0.05)
    assert peak_rss_bytes() > 10e6  # from getrusage


def test_command_names_do_not_confuse_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = Path("/proc/self/stat").read_text(), process_start_seconds_ago()
    odd = plain[: plain.index("(")] + "(a) R 1 (b c)" + plain[plain.rindex(")") + 1 :]
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: odd)
    assert process_start_seconds_ago() == pytest.approx(expected, abs=0.05)


def test_peak_memory_is_this_processes_own() -> None:
    held = bytearray(b"x") * 200_000_000  # this test's process is larger than what it starts
    here = peak_rss_bytes()
    code = "from wanrun.timing import peak_rss_bytes as p; a = p(); b = b'x' * 60_000_000; print(a, p())"
    before, after = map(int, run_python(code))
    assert len(held) < here
    assert before < 60e6
    assert 50e6 < after - before < 90e6


def test_phases_and_steps() -> None:
    timings = Timings()
    with timings.phase("restore"):
        time.sleep(0.05)
    with pytest.raises(RuntimeError), timings.phase("text"):
        time.sleep(0.02)
        raise RuntimeError
    timings.step(3.0)
    timings.step(1.0)
    assert 0.05 <= timings.seconds["restore"] < 0.5
    assert 0.02 <= timings.seconds["text"] < 0.5
    assert timings.step_seconds == [3.0, 1.0]
    ((start, end),) = timings.spans["restore"]
    assert 0 < start < end < timings.now()


def test_spans_that_overlap_count_once() -> None:
    timings = Timings()
    for start, end in [(5.0, 6.0), (1.0, 3.0), (1.5, 2.0), (2.0, 4.0), (6.0, 6.5)]:
        timings.add("restore", start, end)
    assert timings.seconds == {"restore": 3.0 + 1.5}


def test_threads() -> None:
    timings, barrier = Timings(), threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        with timings.phase("restore"):
            time.sleep(0.1)
        for _ in range(100):
            timings.step(0.5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timings.spans["restore"]) == 8
    assert 0.1 <= timings.seconds["restore"] < 0.6  # they ran side by side: not 0.8
    assert len(timings.step_seconds) == 800


def test_marks_keep_the_first_moment() -> None:
    timings = Timings()
    timings.mark_ready()
    timings.mark_first_step()
    first = timings.as_json()
    time.sleep(0.02)
    timings.mark_ready()
    timings.mark_first_step()
    second = timings.as_json()
    for key in ("process_to_ready_seconds", "process_to_first_step_seconds"):
        assert 0 < first[key] == second[key]
    assert second["total_seconds"] >= first["total_seconds"] + 0.02


def test_json_is_flat_with_stable_keys(tmp_path: Path) -> None:
    empty = Timings().as_json()
    assert set(empty) == KEYS
    assert empty["process_to_ready_seconds"] is empty["process_to_first_step_seconds"] is None
    assert all(empty[f"{name}_seconds"] == 0.0 for name in PHASES)
    assert empty["peak_rss_bytes"] > 10e6

    timings = Timings()
    timings.add("image", 1.0, 1.5)
    timings.add("decode", 2.0, 4.0)
    timings.step(1.25)
    timings.cache_hits += 6
    timings.mark_ready()
    timings.write_json(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    data = json.loads(text)
    assert text == json.dumps(data, indent=2) + "\n"
    assert set(data) == KEYS | {"image_seconds"}
    assert (data["image_seconds"], data["decode_seconds"], data["step_seconds"]) == (0.5, 2.0, [1.25])
    assert (data["cache_hits"], data["cache_misses"]) == (6, 0)
    for value in data.values():
        assert value is None or isinstance(value, int | float | list)
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_a_timing_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be written; found No such file.*--timing-json"):
        Timings().write_json(tmp_path / "missing" / "t.json")


def test_summary() -> None:
    timings = Timings()
    for name, start, end in [("import", 0, 0.5), ("restore", 1, 3.25), ("denoise", 4, 10), ("image", 3, 4)]:
        timings.add(name, start, end)
    for seconds in (3.0, 1.0, 2.0, 1.5):
        timings.step(seconds)
    timings.cache_hits, timings.cache_misses = 5, 1
    timings.mark_ready()
    lines = timings.summary().splitlines()
    assert lines[0] == "TIMING SUMMARY"
    rows = {}
    for line in lines[1:]:
        label, value = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        rows[label] = value.split()
    assert rows["import"] == ["0.50", "s"]
    assert rows["restore"] == ["2.25", "s"]
    assert rows["transfer"] == ["0.00", "s"]
    assert rows["denoise total"] == ["6.00", "s"]
    assert rows["first step"] == ["3.00", "s"]
    assert rows["median step"] == ["1.75", "s", "of", "4"]
    assert rows["image"] == ["1.00", "s"]
    assert rows["cache"] == ["5", "hits,", "1", "misses"]
    assert rows.keys() >= {
        "manifest",
        "executables",
        "text",
        "VAE decode",
        "encode video",
        "total",
        "peak RSS",
    }
    assert "process to ready" in rows
    assert "process to first step" not in rows


def test_import_is_light() -> None:
    code = (
        "import sys, wanrun.timing; print(*sorted({'numpy', 'jax', 'orbax', 'click'} & sys.modules.keys()))"
    )
    assert run_python(code) == []
