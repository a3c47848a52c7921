"""The accelerators of a machine, by what its system says."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.manifests import ENVIRONMENT
from wanrun.machine.attached import Attached, attached
from wanrun.machine.environment import host_mismatches


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def tpus(root: Path, *ids: str) -> Path:
    for number, one in enumerate(ids):
        put(root, f"sys/bus/pci/devices/{number}/vendor", "0x1ae0\n")
        put(root, f"sys/bus/pci/devices/{number}/device", f"{one}\n")
    put(root, "sys/bus/pci/devices/other/vendor", "0x8086\n")
    return root


def gpus(root: Path, *models: str) -> Path:
    put(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA  580.1  Fri\nGCC version: 1\n")
    for number, model in enumerate(models):
        put(root, f"proc/driver/nvidia/gpus/{number}/information", f"Model: \t\t {model}\nIRQ:   1\n")
    return root


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_none(tmp_path: Path) -> None:
    assert attached("tpu", tmp_path) is None and attached("cuda", tmp_path) is None
    cpu = attached("cpu", tmp_path)
    assert cpu is not None and cpu.driver == "" and cpu.kinds == ()


def test_tpus(tmp_path: Path) -> None:
    found = attached("tpu", tpus(tmp_path, "0x0063", "0x0063"))
    assert found is not None
    assert (found.chips, found.kinds) == (("0x0063", "0x0063"), ("TPU v5 lite",))


def test_a_tpu_that_is_not_known(tmp_path: Path) -> None:
    found = attached("tpu", tpus(tmp_path, "0x0063", "0x9999"))
    assert found is not None and found.kinds == ()


def test_gpus(tmp_path: Path) -> None:
    assert attached("cuda", gpus(tmp_path, "NVIDIA H200", "NVIDIA H200")) == Attached(
        "580.1", ("NVIDIA H200", "NVIDIA H200"), ("NVIDIA H200",)
    )


def test_a_gpu_without_a_driver_s_files(tmp_path: Path) -> None:
    """As in WSL: it is there, and nothing is known of it."""
    put(tmp_path, "dev/dxg", "")
    assert attached("cuda", tmp_path) == Attached("", (), ())


def test_what_jax_is_told_of_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert attached("tpu", tmp_path) is not None
    assert attached("cuda", tmp_path) is None
    monkeypatch.setenv("JAX_PLATFORMS", "gpu")  # another name that JAX takes
    assert attached("cuda", tmp_path) == Attached("", (), ())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["NVIDIA H200"], []),
        (["NVIDIA H200 NVL", "NVIDIA H200"], []),
        (["NVIDIA H100"], ["device kind: expected NVIDIA H100, found NVIDIA H200"]),
    ],
)
def test_another_chip(tmp_path: Path, kinds: list[str], expected: list[str]) -> None:
    facts = {"platform": "cuda", "device_kind": kinds[0], "device_kinds": kinds, "topology": "1x1x1"}
    found = host_mismatches({**ENVIRONMENT, **facts}, Path("r.txt"), root=gpus(tmp_path, "NVIDIA H200"))
    said = [f"{one.what}: expected {one.expected}, found {one.found}" for one in found]
    assert [line for line in said if "device kind" in line] == expected
    assert (len(said) == 1) == bool(expected)  # nothing else is compared with another chip


@pytest.mark.parametrize(
    ("chip", "name", "needed", "expected"),
    [
        ("0x0063", "TPU v5 lite", 4, "device count: expected at least 4, found 2"),
        ("0x0076", "TPU7x", 4, ""),  # two devices a chip
        ("0x0063", "TPU v5 lite", 2, ""),
        ("0x9999", "TPU v5 lite", 4, ""),  # nothing is known
    ],
)
def test_too_few_chips(tmp_path: Path, chip: str, name: str, needed: int, expected: str) -> None:
    facts = {"platform": "tpu", "device_kind": name, "device_kinds": [name], "topology": "a"}
    root = tpus(tmp_path, chip, chip)
    found = host_mismatches({**ENVIRONMENT, **facts}, Path("r.txt"), needed, root)
    said = [f"{one.what}: expected {one.expected}, found {one.found}" for one in found]
    assert [line for line in said if line.startswith("device")] == [expected] * bool(expected)
    assert (len(said) == 1) == bool(expected)
