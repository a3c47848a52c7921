"""Durations of a run: phases, steps, floors and what is not accounted for; as JSON and as a table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from wancli.jobs.output_names import write_timings
from wanrun.timing.spans import Span, Spans
from wanrun.timing.timings import PHASES, Recorder, Timings, disk_bytes, peak_rss_bytes

# What benchmarks and users read: a key may be added, none may go or change its name.
KEYS = {
    "import_seconds",
    "manifest_seconds",
    "restore_seconds",
    "transfer_seconds",
    "executables_seconds",
    "process_to_ready_seconds",
    "restore_floor_seconds",
    "transfer_floor_seconds",
    "executables_floor_seconds",
    "process_to_ready_floor_seconds",
    "disk_bytes",
    "text_seconds",
    "process_to_first_step_seconds",
    "step_seconds",
    "denoise_seconds",
    "decode_seconds",
    "encode_video_seconds",
    "cache_hits",
    "cache_misses",
    "restore_bytes",
    "peak_rss_bytes",
    "total_seconds",
    "unaccounted_seconds",
    "loop_overhead_seconds",
    "loop",
    "placement",
    "spans",
}


def test_peak_memory_is_this_processes_own() -> None:
    held = bytearray(b"x") * 200_000_000  # this test's process is larger than what it starts
    here = peak_rss_bytes()
    code = (
        "from wanrun.timing.timings import peak_rss_bytes as p; a = p(); b = b'x' * 60_000_000; print(a, p())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert len(held) < here
    assert before < 60e6
    assert 50e6 < after - before < 90e6


def test_without_the_kernels_record_the_peak_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **kwargs: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert peak_rss_bytes() == 0 and disk_bytes() is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moment that it is, which a test moves on."""
    moment = [100.0]
    for module in ("spans", "timings"):
        monkeypatch.setattr(f"wanrun.timing.{module}.now", lambda: moment[0])
    return moment


def test_phases_and_steps(clock: list[float]) -> None:
    timings = Timings()
    with timings.phase("restore"):
        clock[0] = 102.0
    with pytest.raises(RuntimeError), timings.phase("text"):
        clock[0] = 102.5
        raise RuntimeError
    timings.steps("step", 1, 3.0)
    timings.steps("step", 1, 1.0)
    assert timings.spans == {"restore": [(100.0, 102.0)], "text": [(102.0, 102.5)]}
    assert timings.seconds == {"restore": 2.0, "text": 0.5}
    assert timings.step_seconds == [3.0, 1.0]


def test_threads() -> None:
    """What runs in several at once counts once."""
    timings, barrier = Timings(), threading.Barrier(8)

    def work() -> None:
        with timings.phase("restore"):
            barrier.wait()
        for _ in range(100):
            timings.steps("step", 1, 0.5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts, ends = zip(*timings.spans["restore"], strict=True)
    assert len(starts) == 8 and timings.seconds["restore"] == max(ends) - min(starts)
    assert len(timings.step_seconds) == 800


def test_marks_keep_the_first_moment(clock: list[float]) -> None:
    timings = Timings()
    for clock[0] in (100.0, 103.0):
        timings.mark_ready()
        timings.steps("step", 1, 0.001)
    found = timings.as_json()
    assert found["process_to_ready_seconds"] == found["process_to_first_step_seconds"] == 100.0
    assert found["total_seconds"] == 103.0


def test_json_is_flat_with_stable_keys(tmp_path: Path) -> None:
    empty = Timings().as_json()
    assert set(empty) == KEYS
    assert empty["process_to_ready_seconds"] is empty["process_to_first_step_seconds"] is None
    assert empty["loop"] is empty["placement"] is None
    assert all(empty[f"{name}_seconds"] == 0.0 for name in PHASES)
    assert empty["peak_rss_bytes"] > 10e6

    timings = Timings()
    timings.add("image", 1.0, 1.5)
    timings.add("decode", 2.0, 4.0)
    timings.steps("step", 1, 1.25)
    timings.cache_hits += 6
    timings.mark_ready()
    write_timings(timings, tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    data = json.loads(text)
    assert text == json.dumps(data, indent=2) + "\n"
    assert set(data) == KEYS | {"image_seconds"}
    assert (data["image_seconds"], data["decode_seconds"], data["step_seconds"]) == (0.5, 2.0, [1.25])
    assert (data["cache_hits"], data["cache_misses"]) == (6, 0)
    assert (data.pop("loop"), data.pop("placement")) == ("step", None)
    for value in data.values():
        assert value is None or isinstance(value, int | float | list)
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_summary() -> None:
    timings = Timings()
    for name, start, end in [("import", 0, 0.5), ("restore", 1, 3.25), ("denoise", 4, 10), ("image", 3, 4)]:
        timings.add(name, start, end)
    for seconds in (3.0, 1.0, 2.0, 1.5):
        timings.steps("step", 1, seconds)
    timings.cache_hits, timings.cache_misses = 5, 1
    timings.take(Span("transfer", "vae", 3.25, 3.75, nbytes=10**9))
    timings.known_rates = {"transfer": 4e9}
    timings.mark_ready()
    timings.placement = "host"
    title, *lines = timings.summary().splitlines()
    assert title == "TIMING SUMMARY"
    rows = {}
    for line in lines:
        label, value = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        rows[label] = value.split()
    for label, words in {
        "import": ["0.50", "s"],
        "restore": ["2.25", "s"],
        "denoise total": ["6.00", "s"],
        "first step": ["3.00", "s"],
        "image": ["1.00", "s"],
        "placement": ["host"],
    }.items():
        assert rows[label] == words
    assert [rows["transfer"][place] for place in (0, 4)] == ["0.50", "0.25"]
    assert timings.as_json()["transfer_floor_seconds"] == 0.25 and timings.as_json()["placement"] == "host"
    assert rows["median step"][:2] == ["1.75", "s"] and rows["median step"][-1] == "4"
    assert [rows["cache"][place] for place in (0, 2)] == ["5", "1"]
    names = {"manifest", "executables", "text", "VAE decode", "encode video", "total", "peak RSS"}
    names |= {"process to ready", "process to first step", "unaccounted"}
    assert rows.keys() >= names
    for label in ("process to ready", "unaccounted", "placement"):
        assert label not in Timings().summary()


def test_calls_of_many_steps() -> None:
    """The scan form: what one call took, spread over its steps; there is no first or median step."""
    timings = Timings()
    assert timings.loop is None
    timings.steps("scan", 3, 6.0, together=True)
    timings.steps("scan", 1, 5.0, together=True)
    timings.add("denoise", 1.0, 14.0)
    assert timings.step_seconds == timings.as_json()["step_seconds"] == [2.0, 2.0, 2.0, 5.0]
    assert timings.loop == timings.as_json()["loop"] == "scan"
    assert timings.loop_overhead_seconds == (13 - 11) / 4
    rows = [line.split() for line in timings.summary().splitlines()]
    assert ["mean", "step", "2.75", "s", "of", "4"] in rows
    assert not [
        row for row in rows if row[:2] in (["first", "step"], ["median", "step"], ["between", "steps"])
    ]
    timings.steps("step", 1, 1.0)  # the same pipeline may be asked for the other form
    assert timings.loop == "step" and timings.step_seconds[-2:] == [5.0, 1.0]
    assert "median step" in timings.summary() and "mean step" not in timings.summary()


def labelled() -> Timings:
    """A start as it is: overlapping reads, executables beside them, minutes of denoising after it."""
    timings = Timings()
    for name, start, end, label in [
        ("import", 0.0, 1.0, None),
        ("restore", 2.0, 4.0, "transformer"),
        ("restore", 1.5, 2.0, "text_encoder"),
        ("restore", 3.0, 5.0, "transformer"),
        ("executables", 3.0, 6.0, "denoise_step"),
        ("denoise", 6.0, 306.0, None),
        ("restore", 6.5, 200.0, "vae"),
        ("decode", 306.0, 366.5, None),
    ]:
        timings.add(name, start, end, label)
    return timings


def test_labels_split_the_spans_and_not_the_phases() -> None:
    timings = labelled()
    assert timings.seconds["restore"] == 0.5 + 3.0 + 193.5
    assert timings.spans["restore"] == [(1.5, 2.0), (2.0, 4.0), (3.0, 5.0), (6.5, 200.0)]
    assert timings.as_json()["spans"] == [
        ["import", 0.0, 1.0],
        ["restore text_encoder", 1.5, 2.0],
        ["restore transformer", 2.0, 4.0],
        ["restore transformer", 3.0, 5.0],
        ["executables denoise_step", 3.0, 6.0],
        ["denoise", 6.0, 306.0],
        ["restore vae", 6.5, 200.0],
        ["decode", 306.0, 366.5],
    ]
    assert all(re.match(r"  \S", line) for line in timings.summary().splitlines()[1:])
    timings.add("transfer", 7.0, 8.0, "vae")
    assert timings.labelled_spans[-1].name == "decode"
    assert "transfer vae" in {span.name for span in timings.labelled_spans}


def test_time_of_no_span_is_told(clock: list[float]) -> None:
    timings, late = Timings(), Timings()
    assert timings.unaccounted_seconds is None
    for start, end in [(1.0, 2.0), (1.5, 3.0), (4.0, 5.0), (7.0, 20.0)]:
        timings.add("restore", start, end)
    clock[0] = 8.0
    timings.steps("step", 1, 0.001)
    assert timings.unaccounted_seconds == timings.as_json()["unaccounted_seconds"] == 1.0 + 1.0 + 2.0
    timings.add("text", 0.0, 30.0)
    assert timings.unaccounted_seconds == 0.0
    late.add("restore", 2.0, 3.0)
    late.add("decode", 20.0, 30.0)
    clock[0] = 10.0
    late.steps("step", 1, 0.001)
    assert late.unaccounted_seconds == 9.0


def test_the_loop_s_own_time() -> None:
    timings = Timings()
    assert timings.loop_overhead_seconds is None
    timings.steps("step", 1, 2.0)
    assert timings.loop_overhead_seconds is None  # a step outside of the phase: nothing is known
    timings.steps("step", 1, 3.0)
    timings.add("denoise", 1.0, 6.5)
    assert timings.loop_overhead_seconds == timings.as_json()["loop_overhead_seconds"] == 0.25
    timings.add("denoise", 10.0, 12.5)
    timings.steps("step", 1, 1.5)
    timings.steps("step", 1, 0.5)
    assert timings.loop_overhead_seconds == 0.25


def test_timings_of_a_part_of_a_process(clock: list[float]) -> None:
    """Total and unaccounted time count from its begin, everything else from the process's."""
    timings = Timings.from_now()
    clock[0] = 101.0
    with timings.phase("denoise"):
        clock[0] = 103.0
    timings.steps("step", 1, 0.001)
    timings.add("restore", 90.0, 99.0)  # of long before
    timings.add("restore", 95.0, 100.25)
    clock[0] = 104.0
    timings.stop()
    clock[0] = 110.0
    data = timings.as_json()
    assert (data["total_seconds"], data["unaccounted_seconds"]) == (4.0, 0.75)
    assert data["process_to_first_step_seconds"] == 103.0


def test_what_happens_in_the_background_is_everybodys() -> None:
    recorder, first, second = Recorder(), Timings(), Timings()
    recorder.add("restore", 0.0, 1.0, "nobody")
    with recorder.into(first):
        recorder.add("restore", 1.0, 2.0, "transformer")
        with recorder.into(second), recorder.into(first):  # once all the same
            with recorder.phase("executables", "prepare"):
                recorder.count(cache_hits=1)
            recorder.count(cache_misses=2)
        recorder.add("restore", 2.0, 3.0, "vae")
    with pytest.raises(RuntimeError), recorder.into(first):
        raise RuntimeError
    recorder.count(cache_hits=5)
    names = [[span.name for span in timings.labelled_spans] for timings in (first, second)]
    assert sorted(names[0]) == ["executables prepare", "restore transformer", "restore vae"]
    assert names[1] == ["executables prepare"]
    for timings in (first, second):
        assert (timings.cache_hits, timings.cache_misses) == (1, 2)


def names(spans: Spans) -> list[str]:
    return [span.name for span in spans.running]


def test_timings_show_what_they_time_and_what_goes_on_in_the_background() -> None:
    timings, recorder = Timings(), Recorder()
    with (
        recorder.phase("executables", "prepare"),
        recorder.into(timings),
        timings.phase("text"),
        recorder.into(timings),  # the same twice is told once
    ):
        assert names(timings) == ["executables prepare", "text"]
    assert names(timings) == names(recorder) == []
    with recorder.phase("executables", "decode"):
        assert names(timings) == []  # nobody listens
        with recorder.into(timings):
            assert names(timings) == ["executables decode"]
        assert names(timings) == []
    assert [span.name for span in timings.labelled_spans] == ["text"]  # the others ended later
