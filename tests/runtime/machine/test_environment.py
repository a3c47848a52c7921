"""The devices that JAX may use, those of a target, and the accelerators that the system names."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from helpers.manifests import ENVIRONMENT
from helpers.refusals import check_refusal
from wanrun.errors import ArtifactError
from wanrun.machine.attached import Attached, attached
from wanrun.machine.environment import device_mismatches, host_environment, host_mismatches, open_devices

OPEN = """
import sys
from wanrun.machine.environment import open_devices
from wanrun.errors import ArtifactError

platform = sys.argv[1] if len(sys.argv) > 1 else None
try:
    print(*{device.platform for device in open_devices(platform)})
except ArtifactError as error:
    print(error)
"""


def opened(platform: str | None, named: str | None) -> str:
    """What a fresh process opens, or its error: JAX reads JAX_PLATFORMS once."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if named is not None:
        environment["JAX_PLATFORMS"] = named
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *([platform] if platform else [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("platform", "named"), [("cpu", None), ("cpu", ""), ("cpu", "cuda,cpu"), (None, "cpu")]
)
def test_the_platform_is_there(platform: str | None, named: str | None) -> None:
    """A named platform without a device is no error where another has some."""
    assert opened(platform, named) == "cpu"


@pytest.mark.thorough
@pytest.mark.parametrize("named", ["cuda", "gpu", "tpu,cpu", "nonsense", " cpu"])
def test_the_variable_keeps_jax_from_the_platform(named: str) -> None:
    line = opened("cpu", named)
    assert " cpu device; " in line and f"JAX_PLATFORMS={named!r}" in line, line
    assert "unset JAX_PLATFORMS" in line and line.endswith(" cpu") and "set JAX_PLATFORMS=''" not in line
    if named not in ("cuda", "gpu"):  # where there is a GPU, JAX says more
        assert "initialize backend" in line


@pytest.mark.thorough
def test_no_device_of_any_platform() -> None:
    """What the variable says already is no remedy."""
    assert opened(None, "nonsense").startswith("there is no device that JAX may use; found JAX_PLATFORMS=")
    assert opened("cuda", "cuda").endswith("; unset JAX_PLATFORMS, or set it to cpu")


@pytest.mark.slow
def test_a_platform_that_this_machine_has_not() -> None:
    line = opened("tpu", None)
    assert line.startswith("there is no tpu device; found Unable to initialize backend 'tpu'")
    assert line.endswith("; run where there is one, or compile a target for this machine")


@pytest.mark.parametrize(
    ("error", "reason"), [(AssertionError(), ""), (RuntimeError("jaxlib is too old."), "jaxlib is too old")]
)
def test_what_jax_raises(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def refuse(platform: str | None) -> None:
        raise error

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ArtifactError) as caught:
        open_devices()
    assert caught.value.found == (reason or "none")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = "JAX_PLATFORMS='cpu'" + (f", {reason}" if reason else "")
    with pytest.raises(ArtifactError) as caught:
        open_devices("cpu")
    check_refusal(caught.value, "wrong_machine", remedy="unset JAX_PLATFORMS")
    assert caught.value.found == found and str(caught.value.remedy).endswith(" cpu")


def devices(kind: str, count: int) -> list[Any]:
    client = SimpleNamespace(platform_version="a driver")
    return [SimpleNamespace(device_kind=kind, client=client)] * count


FACTS = {**ENVIRONMENT, "platform": "tpu", "device_kind": "TPU v5 lite", "device_count": 8}
ELSEWHERE = {**FACTS, "topology": "v5e:2x4", "device_kinds": ["TPU v5 lite", "TPU v5e"]}


@pytest.mark.parametrize(
    ("built", "kind", "count", "expected"),
    [
        (FACTS, "TPU v5e", 8, ["device kind", "platform version"]),
        (ELSEWHERE, "TPU v5e", 8, []),
        (ELSEWHERE, "TPU v5 lite", 4, []),
        (ELSEWHERE, "TPU v5 lite", 3, ["device count"]),
        (ELSEWHERE, "TPU v6 lite", 8, ["device kind"]),
    ],
)
def test_devices_of_a_target_that_was_built_elsewhere(
    built: Mapping[str, Any], kind: str, count: int, expected: list[str]
) -> None:
    """Any name of the chip, and as many as the mesh has; the compiler's own version is not compared."""
    found = device_mismatches(built, devices(kind, count), needed=4)
    assert [one.what for one in found] == expected
    if expected == ["device count"]:
        assert (found[0].expected, found[0].found) == ("at least 4", 3)


@pytest.mark.parametrize(
    ("platform_name", "others"), [("cpu", ["libtpu", "jax-cuda13-pjrt"]), ("cuda", ["libtpu"])]
)
def test_packages_of_other_platforms_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, platform_name: str, others: list[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platform_name)
    real = importlib.metadata.version
    installed = {"libtpu": "0.0.1", "jax-cuda13-pjrt": "0.7"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or real(name))
    built = {**host_environment(platform_name), "device_kind": "a", "topology": "1x1x1"}
    assert not set(others) & built["packages"].keys()
    packages = {**built["packages"], **dict.fromkeys(others, "9")}
    assert host_mismatches({**built, "packages": packages}, Path("r.txt")) == []
    own = {"jaxlib": "9"} if platform_name == "cpu" else {"jaxlib": "9", "jax-cuda13-pjrt": "9"}
    found = host_mismatches({**built, "packages": {**packages, **own}}, Path("r.txt"))
    assert {one.what for one in found} == {f"package {name}" for name in own}


# Accelerators, by what the system says.


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


def test_what_is_attached(tmp_path: Path) -> None:
    assert attached("tpu", tmp_path) is None and attached("cuda", tmp_path) is None
    cpu = attached("cpu", tmp_path)
    assert cpu is not None and cpu.driver == "" and cpu.kinds == ()
    for number, (ids, kinds) in enumerate(
        [(("0x0063", "0x0063"), ("TPU v5 lite",)), (("0x0063", "0x9999"), ())]  # of which one is not known
    ):
        found = attached("tpu", tpus(tmp_path / str(number), *ids))
        assert found is not None and (found.chips, found.kinds) == (ids, kinds)
    two = attached("cuda", gpus(tmp_path / "gpus", "NVIDIA H200", "NVIDIA H200"))
    assert two == Attached("580.1", ("NVIDIA H200", "NVIDIA H200"), ("NVIDIA H200",))
    put(tmp_path / "wsl", "dev/dxg", "")  # a GPU is there, and nothing is known of it
    assert attached("cuda", tmp_path / "wsl") == Attached("", (), ())


def test_what_jax_is_told_of_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert attached("tpu", tmp_path) is not None
    assert attached("cuda", tmp_path) is None
    monkeypatch.setenv("JAX_PLATFORMS", "gpu")  # another name that JAX takes
    assert attached("cuda", tmp_path) == Attached("", (), ())


def said(environment: Mapping[str, Any], root: Path, needed: int = 1) -> list[str]:
    found = host_mismatches({**ENVIRONMENT, **environment}, Path("r.txt"), needed, root)
    return [f"{one.what}: expected {one.expected}, found {one.found}" for one in found]


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
    found = said(facts, gpus(tmp_path, "NVIDIA H200"))
    assert [line for line in found if "device kind" in line] == expected
    assert (len(found) == 1) == bool(expected)  # nothing else is compared with another chip


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
    found = said(facts, tpus(tmp_path, chip, chip), needed)
    assert [line for line in found if line.startswith("device")] == [expected] * bool(expected)
    assert (len(found) == 1) == bool(expected)
