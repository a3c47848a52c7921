"""Executables that were built elsewhere are tried once, and what came of it is remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, record_verdict
from helpers.refusals import check_refusal
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError, WanError
from wanrun.trust.trust import Trust
from wanrun.trust.verdict import Verdict, verdict_file

PASSED = Verdict(outcome="passed", reason="they agree", device_kind="cpu", platform_version="1")
REFUSED = Verdict(outcome="refused", reason="SIGSEGV ended it", device_kind="cpu", platform_version="1")
BUSY = Verdict(outcome="refused", reason="the TPU is in use", keep=False)


class Tried:
    """Trust whose trials have a given outcome; notes what was tried and reported."""

    def __init__(self, artifact: Path, verdict: Verdict, **options: Any) -> None:
        self.manifest = read_manifest(artifact)
        self.profile = self.manifest.profiles[PROFILE]
        self.tried: list[list[str]] = []
        self.lines: list[str] = []
        selected = select_target(Artifact(self.manifest, artifact), self.profile)

        def attempt(arguments: list[str]) -> Verdict:
            self.tried.append(arguments)
            return verdict

        self.trust = Trust(Artifact(self.manifest, artifact), selected, attempt=attempt, **options)

    def establish(self) -> None:
        self.trust.establish(self.profile, self.lines.append)

    @property
    def kept(self) -> Path:
        return verdict_file(self.trust.facts(self.profile))


def refused(call: Callable[[], object]) -> WanError:
    with pytest.raises(ArtifactError) as caught:
        call()
    return caught.value


def message(call: Callable[[], object]) -> str:
    return str(refused(call))


def test_a_native_target_and_the_trial_itself_need_none(toy_artifact: Path, elsewhere: Path) -> None:
    for tried in (Tried(toy_artifact, REFUSED), Tried(elsewhere, REFUSED, trial=True)):
        tried.establish()
        tried.trust.check(tried.profile)
        tried.trust.check_device(tried.profile, {})
        assert (tried.tried, tried.lines, tried.kept.exists()) == ([], [], False)


def test_what_passes_is_tried_once(elsewhere: Path) -> None:
    first, second = Tried(elsewhere, PASSED, weights="gs://w"), Tried(elsewhere, REFUSED)
    first.establish()
    second.establish()
    second.trust.check(second.profile)
    assert first.tried == [
        ["--artifact", str(elsewhere), "--target", TARGET, "--profile", PROFILE, "--weights", "gs://w"]
    ]
    assert first.lines[0].startswith(
        f"checking the executables on this chip: target {TARGET}, profile {PROFILE}, "
    )
    assert first.lines[1].startswith("the executables are right: they agree (")
    assert second.tried == [] and second.lines == []


def test_another_way_of_loading_is_another_verdict(elsewhere: Path) -> None:
    tried, other = Tried(elsewhere, PASSED, how={"memory": "stream"}), Tried(elsewhere, PASSED)
    tried.establish()
    assert tried.tried[0][-2:] == ["--memory", "stream"]
    assert tried.trust.check(tried.profile) == ()
    check_refusal(refused(lambda: other.trust.check(other.profile)), "wrong_machine", what=TARGET)


def test_programs_that_are_compiled_here_are_named(elsewhere: Path) -> None:
    tried = Tried(elsewhere, msgspec.structs.replace(PASSED, native=("prepare",)))
    tried.establish()
    assert tried.trust.check(tried.profile) == ("prepare",)


def test_what_is_refused_is_not_tried_again(elsewhere: Path) -> None:
    first, second = Tried(elsewhere, REFUSED), Tried(elsewhere, PASSED)
    expected = (
        f"the executables of target {TARGET} cannot be used on this chip; found SIGSEGV ended it; "
        f"compile here with allow_compile, or remove {first.kept} to check them again"
    )
    assert message(first.establish) == message(second.establish) == expected
    assert message(lambda: second.trust.check(second.profile)) == expected
    assert second.tried == []
    first.kept.unlink()
    second.establish()
    assert len(second.tried) == 1


def test_what_could_not_begin_is_tried_again(elsewhere: Path) -> None:
    first, second = Tried(elsewhere, BUSY), Tried(elsewhere, PASSED)
    assert message(first.establish).endswith("compile here with allow_compile, or run it again")
    assert not first.kept.exists()
    second.establish()
    assert second.kept.exists()


def test_a_broken_verdict_is_none(elsewhere: Path) -> None:
    tried = Tried(elsewhere, PASSED)
    tried.establish()
    tried.kept.write_bytes(b"{")
    error = refused(lambda: tried.trust.check(tried.profile))
    check_refusal(error, "wrong_machine", what=f"target {TARGET}", remedy="load")
    assert PROFILE in error.what
    tried.establish()
    tried.trust.check(tried.profile)
    assert len(tried.tried) == 2


@pytest.mark.parametrize("name", ["device_kind", "platform_version"])
def test_another_device_than_the_trial_s_drops_the_verdict(elsewhere: Path, name: str) -> None:
    tried = Tried(elsewhere, PASSED)
    tried.establish()
    tried.trust.check_device(tried.profile, PASSED.device)
    error = refused(lambda: tried.trust.check_device(tried.profile, {**PASSED.device, name: "other"}))
    check_refusal(error, "wrong_machine", what=TARGET, expected=PASSED.device[name], found="other")
    assert name.replace("_", " ") in error.what and "again" in str(error.remedy)
    assert not tried.kept.exists()
    tried.trust.check_device(tried.profile, {})  # nothing is kept to compare with


def test_what_another_machine_has_found_counts(elsewhere: Path) -> None:
    """Until the device is open, and is another one: then this machine tries them itself."""
    record_verdict(elsewhere, PASSED)
    tried = Tried(elsewhere, PASSED)
    tried.establish()
    tried.trust.check(tried.profile)
    tried.trust.check_device(tried.profile, PASSED.device)
    assert tried.tried == [] and len(tried.lines) == 1 and not tried.kept.exists()
    message(lambda: tried.trust.check_device(tried.profile, {**PASSED.device, "platform_version": "2"}))
    tried.establish()
    assert len(tried.tried) == 1 and tried.kept.exists()


def test_another_driver_is_another_verdict(elsewhere: Path, tmp_path: Path) -> None:
    """As the system shows them; how many chips a machine has, and who has compiled its driver, is no fact."""
    tried, files = Tried(elsewhere, PASSED), list[Path]()
    environment = {**tried.trust.selected.target.environment, "platform": "cuda"}
    target = msgspec.structs.replace(tried.trust.selected.target, environment=environment)
    selected = dataclasses.replace(tried.trust.selected, target=target)
    machines = {"580.1 (root@a)": ["H200"], "580.1 (root@b)": ["H200"] * 8, "580.2": ["H200"]}
    for number, (version, chips) in enumerate([*machines.items(), ("580.1", ["H100", "H200"])]):
        root, folder = tmp_path / str(number), tmp_path / str(number) / "proc/driver/nvidia"
        for place, chip in enumerate(chips):
            (folder / f"gpus/{place}").mkdir(parents=True)
            (folder / f"gpus/{place}/information").write_text(f"Model: {chip}\n")
        (folder / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}\n")
        facts = dataclasses.replace(tried.trust, selected=selected, root=root).facts(tried.profile)
        assert facts["driver"] == version[:5]
        files.append(verdict_file(facts))
    assert files[0] == files[1] and len({*files}) == 3
