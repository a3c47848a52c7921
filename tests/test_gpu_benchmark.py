"""benchmarks/gpu.py runs to its end on a CPU, whatever its parts do: the machines that it is for are rare."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.elsewhere import put_golden

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Bench = Any
CRASHES = f"""
import json, os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from gpu_rows import Path, Rows
rows = Rows(Path(json.loads(sys.argv[2])["rows"]))
rows.add("load one", note="did not return", begun=True)
rows.add("load one", 1.0, "ms")
rows.add("load two", note="did not return", begun=True)
os.abort()
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


def part_of(run: Callable[[Bench], None], *needs: str, **facts: Any) -> Any:
    """A part that does this, and needs these packages."""
    from gpu_parts import Part

    return Part(run, "what it does", needs, **{"least": 0.1, "limit": 20, **facts})


@pytest.fixture
def bench(gpu: ModuleType, tmp_path: Path) -> Bench:
    return gpu.Bench(tmp_path, smoke=False, artifact=None, target=None)


@pytest.fixture
def measured(gpu: ModuleType, bench: Bench) -> Callable[..., dict[str, Any]]:
    """Runs parts of one's own, in order; each needs a package of its name."""

    def run(
        budget: float = 60, missing: tuple[str, ...] = (), **parts: Callable[[Bench], None]
    ) -> dict[str, Any]:
        table = {name: part_of(part, name) for name, part in parts.items()}
        return gpu.run_parts(table, bench, list(parts), time.monotonic() + budget, missing)

    return run


def test_a_part_that_fails_is_a_row_and_the_others_go_on(
    gpu: ModuleType, measured: Callable[..., dict[str, Any]]
) -> None:
    def fails(bench: Bench) -> None:
        bench.rows.add("before", 2.0, "s")
        raise ValueError("no such\nthing")

    def ends(bench: Bench) -> None:
        bench.run(
            "a command", [sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"]
        )

    def goes_on(bench: Bench) -> None:
        bench.rows.add("matmul", 1.0, "ms", tflops=4.0, ceiling=True)
        bench.rows.add("step", 3.0, "s", tflops=1.0)

    outcomes = measured(fails=fails, ends=ends, goes_on=goes_on)
    assert [outcome["state"] for outcome in outcomes.values()] == ["failed", "failed", "done"]
    assert [row["note"] for row in outcomes["fails"]["rows"]] == ["", "ValueError: no such"]
    note = outcomes["ends"]["rows"][0]["note"]
    assert note.startswith("ProcessFailedError: ") and ": why " in note and note.endswith(" 3)")
    lines = gpu.table(outcomes).splitlines()
    assert lines[-1].split() == ["step", "3.000", "s", "1", "25%"]
    assert any("FAILED: ValueError" in line for line in lines)


def test_the_time_and_what_is_missing_leave_parts_out(measured: Callable[..., dict[str, Any]]) -> None:
    def waits(bench: Bench) -> None:
        bench.run(
            "a command", [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
        )

    def never(bench: Bench) -> None:
        raise AssertionError("it must not begin")

    started = time.monotonic()
    outcomes = measured(budget=2, missing=("lacks",), lacks=never, waits=waits, late=never)
    assert time.monotonic() - started < 20
    assert outcomes["lacks"]["state"] == "left out"
    assert outcomes["lacks"]["note"] == "missing: lacks"
    note = outcomes["waits"]["rows"][0]["note"]
    assert "; here " in note and note.endswith(" -9)")
    assert outcomes["late"]["state"] == "left out"
    assert outcomes["late"]["note"].endswith("it takes 0 or more")


def test_without_a_gpu_only_torch_is_tried(gpu: ModuleType, bench: Bench) -> None:
    def device(bench: Bench) -> None:
        raise RuntimeError("JAX sees no GPU")

    def torch(bench: Bench) -> None:
        bench.rows.add("block", 1.0, "ms")

    table = {
        "device": part_of(device, "jax"),
        "step": part_of(device, "jax", "flax"),
        "torch": part_of(torch, "torch"),
    }
    outcomes = gpu.run_parts(table, bench, list(table), time.monotonic() + 60, ())
    assert {name: outcome["state"] for name, outcome in outcomes.items()} == {
        "device": "failed",
        "step": "left out",
        "torch": "done",
    }
    assert "a GPU" in outcomes["step"]["note"]


def test_an_interrupted_run_keeps_what_was_measured(measured: Callable[..., dict[str, Any]]) -> None:
    def interrupted(bench: Bench) -> None:
        bench.rows.add("first", 1.0, "s")
        raise KeyboardInterrupt

    outcomes = measured(interrupted=interrupted, after=interrupted)
    assert outcomes["interrupted"]["state"] == "interrupted"
    assert [row["what"] for row in outcomes["interrupted"]["rows"]] == ["first"]
    assert outcomes["after"]["state"] != "done" and "interrupted" in outcomes["after"]["note"]


def test_rows_of_a_process_that_crashed_say_where(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_bench

    (bench.folder / "crashes.py").write_text(CRASHES)
    monkeypatch.setattr(gpu_bench, "HERE", bench.folder)
    bench.begin("cross", time.monotonic() + 30)
    bench.measure("crashes.py", "entries")
    assert [(row["what"], row["failed"]) for row in bench.rows.read()] == [
        ("load one", False),
        ("load two", False),
        ("entries", True),
    ]
    assert bench.rows.read()[1]["note"] == "did not return"
    assert "(exit code -6)" in bench.rows.read()[2]["note"]


HERE = {"jax": "0.11.2", "driver": "580.1", "cuda": "13.0", "cudnn": "9.19.0", "torch": "2.11"}


def nothing(bench: Bench) -> None:
    """A part of which only the table's row matters."""


@pytest.fixture
def table(gpu: ModuleType) -> dict[str, Any]:
    """Parts, of which one takes another one's artifact."""
    return {
        "step": part_of(nothing, "jax"),
        "build": part_of(nothing, "jax"),
        "start": part_of(nothing, "jax", after=("build",), tolerance=0.25),
        "torch": part_of(nothing, "torch"),
    }


def rows_of(*rows: tuple[str, float | None, str]) -> dict[str, Any]:
    """What came of a part: names, values and notes; a note without a value is a failure."""
    found = [
        {"what": what, "value": value, "unit": "s", "note": note, "failed": value is None}
        for what, value, note in rows
    ]
    return {"state": "done", "seconds": 12.3, "rows": found}


def test_the_next_run_goes_on_where_the_last_one_stopped(
    gpu: Any, table: dict[str, Any], tmp_path: Path
) -> None:
    """Kept in a file; what failed is tried after what has not run, and other versions are measured anew."""
    kept = gpu.read_kept(tmp_path, "h9", "NVIDIA H9")
    assert gpu.pending(table, kept, HERE) == list(table)
    gpu.put(kept, "step", table["step"], rows_of(("480p", 5.25123, ""), ("720p", None, "why")), HERE, "a day")
    gpu.put(kept, "torch", table["torch"], rows_of(("block", 1.0, "")), HERE, "a day")
    gpu.write_kept(tmp_path, kept)
    kept = gpu.read_kept(tmp_path, "h9", "NVIDIA H9")
    assert kept["parts"]["step"]["measured"]["figures"] == {"480p": {"value": 5.251, "unit": "s"}}
    assert kept["parts"]["step"]["failed"]["reasons"] == {"720p": "why"}
    assert kept["parts"]["torch"]["measured"]["versions"] == {"driver": "580.1", "torch": "2.11"}
    assert gpu.pending(table, kept, HERE) == ["build", "start", "step"]
    assert gpu.with_before(table, ["start", "step"]) == ["build", "start", "step"]
    assert gpu.pending(table, kept, {**HERE, "cudnn": "9.19"}) == ["build", "start", "step"]
    assert gpu.pending(table, kept, {**HERE, "cudnn": "9.2"}) == ["step", "build", "start"]
    gpu.put(kept, "step", table["step"], rows_of(("720p", 21.9, "")), HERE, "a day later")
    assert list(kept["parts"]["step"]["measured"]["figures"]) == ["480p", "720p"]
    assert "failed" not in kept["parts"]["step"]
    gpu.put(kept, "step", table["step"], rows_of(("480p", None, "why")), {**HERE, "jax": "0.12.0"}, "later")
    assert list(kept["parts"]["step"]["measured"]["figures"]) == ["480p", "720p"]
    assert gpu.pending(table, kept, {**HERE, "jax": "0.12.0"}) == ["build", "start", "step"]


@pytest.mark.parametrize(
    "values, exceeded",
    [
        ((1.24, 1.9), []),
        ((0.5, 0.5), []),
        ((1.26, 1.9), ["ready"]),
        ((1.0, 2.1), ["compile"]),
        ((None, 1.0), ["ready"]),
        ((None, None), ["ready", "compile"]),
    ],
)
def test_figures_are_compared_with_those_kept(
    gpu: Any, table: dict[str, Any], tmp_path: Path, values: tuple[float | None, ...], exceeded: list[str]
) -> None:
    """By the part's tolerance, or the figure's own; what is faster is no fault, what is gone is one."""
    kept, before = gpu.read_kept(tmp_path, "h9", ""), rows_of(("ready", 1.0, ""), ("compile", 1.0, ""))
    before["rows"][1]["tolerance"] = 1.0
    gpu.put(kept, "start", table["start"], before, HERE, "a day")
    now = rows_of(*zip(("ready", "compile"), values, ("", ""), strict=True))
    lines = gpu.beyond("start", kept, now)
    assert [line.split(": ")[1] for line in lines] == exceeded
    outcomes = {"start": now, "step": rows_of(("480p", 9.0, ""))}
    assert gpu.compare(outcomes, kept) == (not exceeded)
    assert not gpu.compare({"step": outcomes["step"]}, kept)


def test_what_a_part_takes_of_another_or_of_the_device_is_there(gpu: Any, bench: Bench) -> None:
    def device(bench: Bench) -> None:
        bench.rows.add("device", 24.0, "GB")

    def fails(bench: Bench) -> None:
        raise ValueError("why")

    table = {
        "device": part_of(device, "jax"),
        "build": part_of(fails, "jax"),
        "start": part_of(device, "jax", after=("build",)),
        "large": part_of(device, "jax", memory=40),
        "small": part_of(device, "jax", memory=12, after=("device",)),
    }
    kept: list[str] = []
    deadline = time.monotonic() + 60
    outcomes = gpu.run_parts(table, bench, list(table), deadline, (), keep=lambda name, _: kept.append(name))
    assert {name: outcome["state"] for name, outcome in outcomes.items()} == {
        "device": "done",
        "build": "failed",
        "start": "left out",
        "large": "left out",
        "small": "done",
    }
    assert outcomes["start"]["note"] == "missing: part build"
    assert kept == ["device", "build", "small"]


def test_a_run_keeps_figures_and_a_check_compares_with_them(
    gpu: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first run stops before its last part, which the second one does; a check keeps nothing. A smoke run
    keeps what it finds in a folder that it is given, and goes on there."""
    ran: list[str] = []
    facts: dict[str, Any] = {"platform": "gpu", "chip": "h9", "versions": {"cuda": "13.0"}}

    def device(bench: Bench) -> None:
        bench.rows.add("device", 140.0, "GB", "NVIDIA H9", **facts)

    def step(name: str, value: float) -> Callable[[Bench], None]:
        def run(bench: Bench) -> None:
            ran.append(name)
            bench.rows.add(name, value, "s")

        return run

    def measured(value: float, *words: str, last: float = 0.1) -> tuple[bool, list[str]]:
        parts = {"device": part_of(device, "jax"), "first": part_of(step("first", value), "jax")}
        parts["last"] = part_of(step("last", 2.0), "jax", least=last)
        monkeypatch.setattr(gpu, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--kept", str(tmp_path / "kept"), *words])
        ran.clear()
        (bench.folder / "rows-device.jsonl").unlink(missing_ok=True)  # of the run before
        found = {"missing": (), "versions": {"jax": "0.11.2"}, "driver": "580.1"}
        outcomes, kept = gpu.measure(bench, gpu._options(), found)
        return gpu.compare(outcomes, kept), list(ran)

    assert measured(1.0, last=1e6) == (True, ["first"])
    file = tmp_path / "kept" / "h9.json"
    kept = json.loads(file.read_text())
    assert kept["device"] == "NVIDIA H9" and list(kept["parts"]) == ["first"]
    assert kept["parts"]["first"]["measured"]["versions"] == {
        "driver": "580.1",
        "jax": "0.11.2",
        "cuda": "13.0",
    }
    assert measured(1.0) == (True, ["last"])
    before = file.read_bytes()
    assert measured(1.04, "--check") == (True, ["first", "last"])
    assert measured(1.06, "--check") == (False, ["first", "last"])
    assert file.read_bytes() == before
    facts.update(platform="cpu", chip="cpu")
    assert measured(1.0, "--smoke") == (True, ["first", "last"])
    assert measured(1.0, "--smoke") == (False, [])
    assert sorted(path.name for path in file.parent.iterdir()) == ["cpu.json", "h9.json"]


def test_every_part_is_under_two_minutes_and_after_what_it_takes(gpu: Any) -> None:
    names = list(gpu.PARTS)
    for number, part in enumerate(gpu.PARTS.values()):
        assert part.least < part.limit <= 120
        assert set(part.after) <= set(names[:number])


def test_the_tables_are_what_is_kept(gpu: Any) -> None:
    """After a change: python benchmarks/gpu.py --table"""
    from gpu_table import PAGES, all_kept, with_table

    for page in PAGES:
        assert page.read_text(encoding="utf-8") == with_table(page)
    for kept in all_kept():
        assert kept["parts"].keys() <= gpu.PARTS.keys()


@pytest.mark.parametrize(
    "local, told", [("cpu", "cuda,cpu"), ("cuda", None), ("not known: no msgspec", None)]
)
def test_wanbuild_is_told_of_a_gpu_that_only_jax_sees(
    gpu: ModuleType, bench: Bench, monkeypatch: pytest.MonkeyPatch, local: str, told: str | None
) -> None:
    def measure(script: str, name: str) -> None:
        bench.rows.add("device", 100.0, "GB", "NVIDIA H200", platform="gpu")
        bench.rows.add("local target", note=local)

    monkeypatch.delenv("JAX_PLATFORMS")
    bench.environment.pop("JAX_PLATFORMS", None)
    monkeypatch.setattr(bench, "measure", measure)
    gpu.PARTS["device"].run(bench)
    assert bench.environment.get("JAX_PLATFORMS") == told


@pytest.mark.thorough
def test_a_smoke_run_comes_to_its_end(
    gpu: Any, artifact: Path, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Parts of most scripts; ``make gpu-dry-run`` has the others, but for torch's and the server's."""
    put_golden(artifact, golden)
    others = ("tiny-float32", "ceiling", "w8a8", "decode", "start", "torch-start", "stream")
    others += ("attention", "cross", "build-a14b", "experts", "live", "serve", "serve-memory")
    expected = [name for name, part in gpu.PARTS.items() if part.smoke and name not in others]
    command = [sys.executable, BENCHMARKS / "gpu.py", "--smoke", "--artifact", artifact]
    command += ["--part", ",".join(expected)]
    done = subprocess.run(
        [*map(str, command), "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    head, table, line = done.stdout.partition("part  ")
    assert head.startswith("Python 3.")
    assert "missing packages: " in head
    written = (tmp_path / "found.json").read_text()
    assert (table + line).endswith("\n" + written)
    parts = json.loads(written)["parts"]
    assert list(parts) == expected
    assert {name: part for name, part in parts.items() if part["state"] != "done" and name != "torch"} == {}
    notes = {row["what"]: row["note"] for part in parts.values() for row in part["rows"]}
    assert notes["golden 96x64x9-b1-cfg"] == "digests equal"
    assert notes["wanrun, 2 steps"].endswith(" 0 misses in the cache")
    torch = [row for row in parts["torch"]["rows"] if row["failed"]]
    assert torch == [] or "'torch'" in torch[0]["note"] or parts["torch"]["state"] == "left out"
