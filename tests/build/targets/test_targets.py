"""Targets by name: chips and near misses, CPU levels, meshes, topologies, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.chips import needs_cuda, needs_libtpu
from helpers.manifests import plain_target
from helpers.refusals import refuses
from wanbuild.again import _like_here as like_here
from wanbuild.build_options import BuildOptions
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.mosaic import MosaicAttention
from wanbuild.models.mosaic_tcgen05 import Tcgen05Attention
from wanbuild.models.mosaic_wgmma import WgmmaAttention
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.compile import as_recorded
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets import cpu_levels, topology
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanbuild.targets.parsing import USES, chip_named, choice, parse_mesh
from wanbuild.targets.target import (
    CPU,
    PLAIN_CPU,
    TargetSpec,
    attached_platform,
    multiplies_bfloat16,
    platforms_of,
    resolve_target,
)
from wanbuild.targets.topology import COMPILERS, open_topology
from wanrun.artifact.mesh import AXES
from wanrun.artifact.targets import Environment
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError
from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
GPUS = [name for name, chip in CHIPS.items() if chip.platform == "cuda"]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_of_a_chip(chip: Chip) -> None:
    """Of the right order: bytes and not gigabytes, operations of one device and not of a host."""
    assert 4e9 <= chip.memory_bytes <= 200e9
    assert 10e12 <= chip.bf16 <= 2500e12 and chip.fp8 in (0, pytest.approx(2 * chip.bf16, rel=0.02))
    assert chip.int8 == 0 or chip.int8 >= chip.bf16
    assert 2e11 <= chip.bandwidth <= 1e13 and chip.host_link <= chip.bandwidth / 10
    assert 6e9 <= chip.link <= 1e12
    assert chip.counts[0] == 1 and list(chip.counts) == sorted(chip.counts)
    assert chip.counts[-1] == (8 if chip.platform == "cuda" else 256)
    assert (chip.gpu is None) == (chip.topologies is not None)
    assert chip.kernels.image_multiple == {"v6e": 256, "v7x": 256}.get(
        chip.name, 1 if chip.platform == "cuda" else 128
    )


@needs_libtpu
@pytest.mark.parametrize("name", TPUS)
def test_every_topology_of_a_tpu_opens(name: str) -> None:
    chip = CHIPS[name]
    for count in chip.counts:
        opened = open_topology(chip, count)
        assert {device.device_kind for device in opened.devices} == {chip.device_kind}
        assert len(opened.devices) == (2 if (name, count) == ("v7x", 1) else count)
    one_host = open_topology(chip, 8 if chip.host_chips == 8 or name == "v7x" else 4)
    assert {device.process_index for device in one_host.devices} == {0}
    assert "TPU_ACCELERATOR_TYPE" not in os.environ  # which would tell libtpu a lie about this host


@needs_cuda
@pytest.mark.parametrize("name", GPUS)
def test_every_topology_of_a_gpu_opens(name: str) -> None:
    for count in (1, 8):
        opened = open_topology(CHIPS[name], count)
        assert [device.device_kind for device in opened.devices] == [CHIPS[name].device_kind] * count
        assert {device.process_index for device in opened.devices} == {0}


def stand_in(name: str, environment: dict[str, str]) -> TargetSpec:
    """A chip's target with a CPU's device."""
    chip, cpu = CHIPS[name], resolve_target("cpu")
    known = {**cpu.environment, **environment}
    return dataclasses.replace(cpu, name=name, kernels=chip.kernels, mosaic=chip.mosaic, environment=known)


@needs_libtpu
def test_a_target_without_its_chip() -> None:
    spec = resolve_target("v5e", {"data": 2, "context": 2})
    assert (spec.name, spec.platform, len(spec.devices)) == ("v5e-data2-context2", "tpu", 4)
    assert spec.environment["topology"] == "v5e:2x2"
    assert spec.environment["device_kinds"] == ["TPU v5 lite", "TPU v5e"]
    assert spec.environment["device_count"] == 4
    assert spec.options == CHIPS["v5e"].options and spec.kernels == CHIPS["v5e"].kernels
    msgspec.convert(spec.environment, Environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
    [
        ("cpu-w8a8", {}, "cpu-w8a8"),
        ("local-w8a8", {}, "cpu-w8a8"),
        pytest.param("v6e-w8a8", {"context": 2}, "v6e-w8a8-context2", marks=needs_libtpu),
        pytest.param("v6e-w8a8-2", {"context": 2}, "v6e-w8a8-context2", marks=needs_libtpu),
    ],
)
def test_products_in_eight_bits(
    name: str, mesh: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    plain, spec = resolve_target(name.replace("-w8a8", ""), mesh), resolve_target(name, mesh)
    assert spec.name == expected
    assert spec.kernels == msgspec.structs.replace(plain.kernels, w8a8=True) != plain.kernels
    manifest = published_manifest(published_names()["wan2.1-t2v-1.3b"])
    with refuses("unsupported", what="W8A8", expected="--quantise int8", remedy="-w8a8"):
        ProgramBuilder(manifest, Shape(96, 64, 5, 1, True), BuildOptions(), *spec.programs_for)


@pytest.mark.parametrize(
    ("name", "mesh", "code", "parts"),
    [
        (
            "v9",
            {},
            "unknown_name",
            {"what": "v9 ", "expected": "local, cpu, cpu-v3, cpu-v4, cpu-v4-bf16, v4, "},
        ),
        *((name, {}, "unknown_name", {"what": f"target {name} "}) for name in ("w8a8", "w8a8-cpu")),
        *((name, {}, "unknown_name", {"what": f"target {name} "}) for name in ("cpu-w8a8-v3", "h200-x")),
        ("v9-w8a8", {}, "unknown_name", {"what": "target v9 "}),
        ("v5", {}, "unknown_name", {"found": "v5", "remedy": "--target v5e or v5p"}),
        ("tpu", {}, "unknown_name", {"found": "tpu", "remedy": "--target v4 or v5e or v5p or v6e or v7x"}),
        ("gpu", {}, "unknown_name", {"found": "gpu", "remedy": "--target a100 or "}),
        ("v5e", {"context": 3}, "unsupported", {"expected": "1, 2, 4, 8", "found": 3}),
        ("v5p", {"context": 512}, "unsupported", {"found": 512, "remedy": 256}),
        ("h200", {"context": 16}, "unsupported", {"expected": "1, 2, 3", "found": 16}),
        ("v7x-8", {"data": 2}, "mismatch", {"expected": 8, "found": "data=2", "remedy": "--target v7x-8"}),
        ("H100 8", {"data": 2}, "mismatch", {"what": "h100-8 "}),
    ],
)
def test_what_is_no_target(name: str, mesh: dict[str, int], code: ErrorCode, parts: dict[str, Any]) -> None:
    with refuses(code, **parts) as caught:
        resolve_target(name, mesh)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_a_compiler_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(topology, "has_package", lambda package: False)
    extra, packages = COMPILERS[CHIPS[name].platform]
    remedy = f"pip install '.[build,{extra}]'"
    with refuses("not_installed", found=f"no {packages[0]}", remedy=remedy) as caught:
        resolve_target(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "form"), [("h100", WgmmaAttention), ("b200", Tcgen05Attention)])
def test_the_attention_of_a_target(name: str, form: type[MosaicAttention]) -> None:
    """It stays as the artifact has it. A CPU stands in for the chip, whose compiler may be missing."""
    gpu = stand_in(name, {"topology": "1x1x2"})
    chosen = gpu.in_eight_bits().attending_by("mosaic")
    built = attention_form(chosen.kernels)
    assert (
        isinstance(built, form)
        and (built.queries, built.keys, built.stages) == (CHIPS[name].mosaic["attention_blocks"])
    )
    assert chosen.kernels.w8a8 and chosen.attending_by("mosaic").kernels == chosen.kernels
    recorded = SimpleNamespace(
        targets={gpu.name: SimpleNamespace(program_set="own")},
        program_sets={"own": SimpleNamespace(kernels=chosen.kernels)},
    )
    assert as_recorded(gpu, recorded).kernels == gpu.attending_by("mosaic").kernels
    for other in (CHIPS[name].kernels, CHIPS["v5e"].kernels):
        recorded.program_sets["own"].kernels = other
        assert as_recorded(gpu, recorded) is gpu.attending_by("cudnn") is gpu
    with pytest.raises(UsageError, match="rtx4090"):
        stand_in("rtx4090", {}).attending_by("mosaic")


@pytest.mark.parametrize(
    ("name", "environment", "head_dim", "attention"),
    [
        ("h100", {"topology": "1x1x1"}, 128, "wgmma"),
        ("b200", {"topology": "1x1x1"}, 128, "tcgen05"),
        ("b200", {"topology": "1x1x1"}, 12, "cudnn"),  # the kernel does not take them
        ("h100", {}, 128, "cudnn"),  # of this machine
        ("rtx4090", {"topology": "1x1x1"}, 128, "cudnn"),
        ("v5e", {"topology": "v5e:1x1"}, 128, "flash"),
    ],
)
def test_the_attention_of_a_target_that_an_artifact_lacks(
    name: str, environment: dict[str, str], head_dim: int, attention: str
) -> None:
    manifest: Any = SimpleNamespace(targets={}, configs={"transformer": {"attention_head_dim": head_dim}})
    assert as_recorded(stand_in(name, environment), manifest).kernels.attention == attention


def test_the_platform_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert attached_platform(tmp_path) == "cpu"
    tpu = tmp_path / "sys/bus/pci/devices/0000:00:04.0/vendor"
    tpu.parent.mkdir(parents=True)
    tpu.write_text("0x8086\n")
    assert attached_platform(tmp_path) == "cpu"
    tpu.write_text("0x1ae0\n")
    assert attached_platform(tmp_path) == "tpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert attached_platform(tmp_path) == "cuda"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert attached_platform(tmp_path) == platforms_of(["local", "v5e"]) == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert platforms_of(["local"]) == platforms_of(["h200-local-w8a8-context2"]) == "cuda,cpu"
    assert platforms_of(["cpu", "h200"]) == "cpu"


@needs_libtpu
def test_a_target_without_its_chip_can_be_built_again_anywhere(tmp_path: Path) -> None:
    built = {**resolve_target("v6e", {"context": 4}).environment, "machine": "riscv64"}
    built["packages"] = {"jax": "0.9", "jaxlib": "0.9", "libtpu": "0"}
    spec = like_here(tmp_path, "v6e-context4", plain_target(built), {"context": 4})
    assert (spec.name, spec.environment["topology"]) == ("v6e-context4", "v6e:2x2")
    assert spec.environment["packages"]["libtpu"] != "0"


# Names of chips as users write them: near misses that mean one chip, and what means none.


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (("4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"), "rtx4090"),
        (("4090-w8a8-2", "RTX 4090-2-W8A8"), "rtx4090-w8a8-2"),
        (("h100-8", "H100_8", "nvidia-h100-8"), "h100-8"),
        (("4060ti", "RTX 4060 Ti", "4060ti-16gb"), "rtx4060ti-16gb"),
        (("rtx4060ti-16gb-w8a8-4", "4060 ti-w8a8-4"), "rtx4060ti-16gb-w8a8-4"),
        (("RTX PRO 6000", "pro6000"), "rtxpro6000"),
        (("h20-0",), "h20-0"),
        (("V7X", "tpu-v7x"), "v7x"),
    ],
)
def test_near_misses_mean_one_chip(texts: tuple[str, ...], name: str) -> None:
    found = [chip_named(text) for text in texts]
    assert [one and one.text for one in found] == [name] * len(texts)
    assert {one and one.chip.kernels.w8a8 for one in found} == {"w8a8" in name}


def test_every_chip_has_its_own_name() -> None:
    for name, chip in CHIPS.items():
        for text in (name, name.upper(), name.removeprefix("rtx")):
            found = chip_named(text)
            assert found is not None and found.chip is chip and found.count is None


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("v5", "v5e or v5p"),
        ("100", "a100 or h100"),
        ("4070", "rtx4070ti"),  # which is another card
        ("6000", "rtxpro6000"),  # so are the RTX A6000 and the RTX 6000 Ada
        ("l40-2", None),
        ("rtx4090-24gb", None),
        ("v7x-", "v7x"),
        *((text, None) for text in ("", "-8", "v7x-08000", "local", "cpu-v3", "h200-local", "4060ti-8gb")),
    ],
)
def test_what_means_no_chip(text: str, like: str | None) -> None:
    assert chip_named(text) is None
    assert (choice(text) or "").rpartition("--target ")[2] == (like or "")


# Meshes as users write them.


def test_every_axis_has_its_use() -> None:
    assert tuple(USES) == AXES


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,context=4", {"data": 2, "context": 4}),
        (" context = 4 ".replace(" = ", "=") + ", data=2", {"data": 2, "context": 4}),
        ("data=1,context=1", {}),
        ("", {}),
        ("tensor=8", {"tensor": 8}),
    ],
)
def test_what_is_written(text: str, sizes: dict[str, int]) -> None:
    """An axis that is left out has one device; the order is always that of the table."""
    assert list(parse_mesh(text).items()) == list(sizes.items())


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("model=2", "unknown_name", "axis"),
        ("2x4", "unknown_name", "axis"),
        ("data=2,", "unknown_name", "axis"),
        ("data=2,data=2", "conflict", "data "),
        *(
            (f"data{number}", "missing_parameter", "data")
            for number in ("", "=0", "=-2", "=2.0", "=\N{SUPERSCRIPT TWO}", "=" + "9" * 5000)
        ),
    ],
)
def test_what_is_no_mesh(text: str, code: ErrorCode, what: str) -> None:
    with refuses(code, what=what):
        parse_mesh(text)


# CPU levels as targets.


def host_has(name: str) -> bool:
    return set(CPU_LEVEL_FEATURES[name]) <= set(cpu_features())


def test_every_level_of_the_runtime_can_be_built() -> None:
    assert list(CPU_LEVELS) == list(CPU_LEVEL_FEATURES)
    for level in CPU_LEVELS.values():
        assert level.limits[-1] == "AVX2" and {"AVX2", "FMA", "SSE2"} <= level.instructions
        assert ("AVX512F" in level.instructions) == ("avx512f" in level.features)
        assert multiplies_bfloat16(CPU_LEVEL_FEATURES[level.name]) == level.name.endswith("bf16")


@pytest.mark.parametrize("name", CPU_LEVEL_FEATURES)
def test_a_level_has_no_more_than_its_features(name: str) -> None:
    if not host_has(name):
        pytest.skip(f"this CPU is below {name}")
    spec = resolve_target(name)
    assert (spec.name, spec.platform, spec.cpu_level) == (name, "cpu", CPU_LEVELS[name])
    assert spec.kernels == (CPU if name.endswith("bf16") else PLAIN_CPU)
    assert spec.environment["cpu_features"] == list(CPU_LEVEL_FEATURES[name])
    assert spec.environment["cpu_level"] == name
    msgspec.convert(spec.environment, Environment)
    assert resolve_target("cpu").cpu_level is None


def test_a_level_that_this_cpu_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "cpu_features", lambda: CPU_LEVEL_FEATURES["cpu-v3"])
    resolve_target("cpu-v3")
    with refuses("unsupported", what="cpu-v4", found="avx512bw avx512cd"):
        resolve_target("cpu-v4")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with refuses("unsupported", what="cpu-v3", expected="x86-64", found="aarch64"):
        resolve_target("cpu-v3")
