"""Results of small profiles are recorded where a target is built, for chips that are not there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from helpers.artifacts import compile_fast
from helpers.chips import needs_cuda
from helpers.damage import own
from helpers.elsewhere import PROXY, TARGET
from wanbuild.check import proxy
from wanbuild.check.proxy import record_proxies
from wanbuild.cli import wanbuild
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import UsageError
from wanrun.executables.tolerance import relative_error
from wanrun.replay.golden import read_golden


@pytest.fixture
def unrecorded(proxied: Path) -> Path:
    """The proxied artifact without any recorded result, and without the profile that the other stands for."""
    for folder in ("golden", "executables", "programs"):  # in which files that are not listed are removed
        own(proxied, folder)
    manifest = read_manifest(proxied)
    (target,) = manifest.targets.values()
    built = {PROXY: target.executables[PROXY]}
    targets = {TARGET: msgspec.structs.replace(target, executables=built)}
    manifest.changed(targets=targets, golden={}).write(proxied)
    return proxied


def test_a_proxy_is_recorded_once(
    unrecorded: Path, proxied_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that is too large for this machine's memory: its layers stream."""
    monkeypatch.setattr(proxy, "host_memory_bytes", lambda: 1000)
    monkeypatch.setattr(proxy, "compile_artifact", lambda request, report: compile_fast(request))
    lines: list[str] = []
    before = {path for path in unrecorded.rglob("*") if "golden" not in path.parts}
    record_proxies(unrecorded, lines.append)
    assert lines[1:] == [f"{PROXY}: recorded"] and lines[0].startswith(f"{PROXY}: its video is made on this")
    assert {path for path in unrecorded.rglob("*") if "golden" not in path.parts} <= before
    expected, found = (
        read_golden(open_artifact(artifact), PROXY) for artifact in (proxied_artifact, unrecorded)
    )
    assert relative_error(np.array(found.velocity), np.array(expected.velocity)) < 1e-5
    assert relative_error(np.array(found.samples), np.array(expected.samples)) < 1e-5
    record_proxies(unrecorded, lines.append)
    assert len(lines) == 2


def test_what_cannot_be_recorded_is_told(unrecorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("there is no room", remedy="make some")

    monkeypatch.setattr(proxy, "compile_artifact", refuse)
    lines: list[str] = []
    record_proxies(unrecorded, lines.append)
    assert lines[1] == (
        f"{PROXY}: not recorded, so wanrun will refuse what it stands for: there is no room; make some"
    )
    assert read_manifest(unrecorded).golden == {}


@needs_cuda
def test_compiling_for_a_chip_records_a_proxy(artifact_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy, of one frame: a picture."""
    monkeypatch.setattr(proxy, "compile_artifact", lambda request, report: compile_fast(request))
    given = ["--target", "h100", "--size", "192x128", "--frames", "1", "--loop", "step", "--dtype", "float32"]
    result = CliRunner().invoke(wanbuild, ["compile", str(artifact_copy), *given])
    assert result.exit_code == 0, result.output
    manifest = read_manifest(artifact_copy)
    assert manifest.targets["h100"].executables.keys() == {"192x128x1-b1-cfg", "48x32x1-b1-cfg"}
    assert manifest.golden.keys() == {"48x32x1-b1-cfg"}
