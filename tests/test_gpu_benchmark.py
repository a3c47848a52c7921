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


@pytest.fixture
def bench(gpu: ModuleType, tmp_path: Path) -> Bench:
    return gpu.Bench(tmp_path, smoke=False, artifact=None, target=None)


@pytest.fixture
def measured(gpu: ModuleType, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs parts of one's own, in order; each needs a package of its name."""

    def run(
        budget: float = 60, missing: tuple[str, ...] = (), **parts: Callable[[Bench], None]
    ) -> dict[str, Any]:
        table = {name: gpu.Part(part, (name,), 0.1, 20) for name, part in parts.items()}
        monkeypatch.setattr(gpu, "PARTS", table)
        return gpu.run_parts(bench, list(parts), budget, missing)

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
    assert outcomes["ends"]["rows"][0]["note"] == "ProcessFailedError: a command: why (exit code 3)"
    lines = gpu.table(outcomes).splitlines()
    assert lines[-1].split() == ["step", "3.000", "s", "1", "25%"]
    assert any("FAILED: ValueError: no such" in line for line in lines)


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
    assert "its time limit; here (exit code -9)" in outcomes["waits"]["rows"][0]["note"]
    assert outcomes["late"]["state"] == "left out"
    assert "of the budget were left" in outcomes["late"]["note"]


def test_without_a_gpu_only_torch_is_tried(
    gpu: ModuleType, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(bench: Bench) -> None:
        raise RuntimeError("JAX sees no GPU")

    def torch(bench: Bench) -> None:
        bench.rows.add("block", 1.0, "ms")

    parts = {"device": (device, ("jax",)), "step": (device, ("jax", "flax")), "torch": (torch, ("torch",))}
    table = {name: gpu.Part(run, needs, 0.1, 20) for name, (run, needs) in parts.items()}
    monkeypatch.setattr(gpu, "PARTS", table)
    outcomes = gpu.run_parts(bench, list(table), 60, ())
    assert {name: outcome["state"] for name, outcome in outcomes.items()} == {
        "device": "failed",
        "step": "left out",
        "torch": "done",
    }
    assert outcomes["step"]["note"] == "missing: a GPU that JAX can use"


def test_an_interrupted_run_keeps_what_was_measured(measured: Callable[..., dict[str, Any]]) -> None:
    def interrupted(bench: Bench) -> None:
        bench.rows.add("first", 1.0, "s")
        raise KeyboardInterrupt

    outcomes = measured(interrupted=interrupted, after=interrupted)
    assert outcomes["interrupted"]["state"] == "interrupted"
    assert [row["what"] for row in outcomes["interrupted"]["rows"]] == ["first"]
    assert outcomes["after"]["note"] == "the run was interrupted"


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
    gpu.device(bench)
    assert bench.environment.get("JAX_PLATFORMS") == told


def test_a_smoke_run_comes_to_its_end(
    gpu: Any, artifact: Path, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Its parts but for those of one script alone, of which one is there; ``make gpu-dry-run`` has all."""
    put_golden(artifact, golden)
    others = ("ceiling", "w8a8", "decode", "start", "stream")
    expected = [name for name in gpu.SMOKE_PARTS if name not in others]
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
    assert notes["load denoise_step"] == "loaded"
    assert notes["golden 96x64x9-b1-cfg"] == "digests equal"
    assert notes["wanrun, 2 steps"].endswith(" 0 misses in the cache")
    torch = [row for row in parts["torch"]["rows"] if row["failed"]]
    assert (
        torch == [] or "No module named 'torch'" in torch[0]["note"] or parts["torch"]["state"] == "left out"
    )
