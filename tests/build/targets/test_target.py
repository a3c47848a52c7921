"""Targets by name: the table of chips, topologies without a chip, and what ends in one line."""

from __future__ import annotations

import dataclasses
import os
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
from wanbuild.targets import topology
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import TargetSpec, attached_platform, platforms_of, resolve_target
from wanbuild.targets.topology import COMPILERS, open_topology
from wanrun.artifact.targets import Environment
from wanrun.errors import UsageError

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
GPUS = [name for name, chip in CHIPS.items() if chip.platform == "cuda"]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_of_a_chip(chip: Chip) -> None:
    """Of the right order: bytes and not gigabytes, operations of one device and not of a host."""
    assert 12e9 <= chip.memory_bytes <= 200e9
    assert 44e12 <= chip.bf16 <= 2500e12 and chip.fp8 in (0, pytest.approx(2 * chip.bf16, rel=0.02))
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
    ("name", "mesh", "line"),
    [
        (
            "v9",
            {},
            "target v9 is not known; expected one of local, cpu, cpu-v3, cpu-v4, cpu-v4-bf16, v4, v5e",
        ),
        ("v5e", {"context": 3}, "v5e does not come with 3 devices; expected one of 1, 2, 4, 8"),
        ("v5p", {"context": 512}, "found 512; use a mesh of 256 devices"),
        ("v7x-8", {"data": 2}, "expected --mesh with 8 in all; found data=2; wanbuild plan --target v7x-8"),
        ("v9-w8a8", {}, "target v9 is not known"),
        *((name, {}, f"target {name} is not known") for name in ("w8a8", "w8a8-cpu", "cpu-w8a8-v3")),
        ("h200-x", {}, "target h200-x is not known"),
        ("v5", {}, "found v5; name the chip: --target v5e or v5p"),
        ("H100 8", {"data": 2}, "target h100-8 and its mesh have different numbers of devices"),
        ("tpu", {}, "found tpu; name the chip: --target v4 or v5e or v5p or v6e or v7x"),
        ("gpu", {}, "found gpu; name the chip: --target a100 or "),
        ("h200", {"context": 16}, "h200 does not come with 16 devices; expected one of 1, 2, 3"),
    ],
)
def test_what_is_no_target(name: str, mesh: dict[str, int], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_target(name, mesh)
    assert line in str(caught.value) and "\n" not in str(caught.value)


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
