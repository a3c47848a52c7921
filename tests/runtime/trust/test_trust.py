"""Executables that were built elsewhere are tried once; verdicts are kept, and those of an artifact count."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import PROFILE, flip
from helpers.elsewhere import TARGET, put_executable, record_verdict
from helpers.manifests import full_manifest, with_profiles
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError, WanError
from wanrun.trust import trial
from wanrun.trust.afresh import Afresh
from wanrun.trust.recorded import known_verdict, names_machine, set_aside
from wanrun.trust.trust import Trust
from wanrun.trust.verdict import (
    Verdict,
    check_keepable,
    decoded_verdict,
    drop_verdict,
    keep_verdict,
    read_verdict,
    trial_facts,
    verdict_file,
)

# --- trust ---


PASSED = Verdict(outcome="passed", reason="they agree", device_kind="CPU v9", platform_version="1")
REFUSED = msgspec.structs.replace(PASSED, outcome="refused", reason="SIGSEGV ended it")
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


# --- verdict ---


FACTS = {"target": "v5e", "chip": ["0x0063"]}


def test_what_is_kept_is_read() -> None:
    check_keepable(FACTS)
    assert read_verdict(FACTS) is None and not list(verdict_file(FACTS).parent.iterdir())
    keep_verdict(FACTS, PASSED)
    assert read_verdict(FACTS) == msgspec.structs.replace(PASSED, facts=FACTS)
    assert read_verdict({**FACTS, "chip": ["0x006f"]}) is None
    assert [path.name for path in verdict_file(FACTS).parent.iterdir()] == [verdict_file(FACTS).name]
    drop_verdict(FACTS)
    drop_verdict(FACTS)
    assert read_verdict(FACTS) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 40_000,
        b'{"outcome": "perhaps", "reason": ""}',
        PASSED.encoded(),
        bytes(2**16 + 1),
    ],
    ids=["empty", "no fields", "no text", "deep", "another outcome", "of other facts", "large"],
)
def test_a_broken_file_is_none(content: bytes) -> None:
    keep_verdict(FACTS, PASSED)
    verdict_file(FACTS).write_bytes(content)
    assert read_verdict(FACTS) is None
    assert decoded_verdict(content) == (PASSED if content == PASSED.encoded() else None)
    keep_verdict(FACTS, PASSED)
    found = read_verdict(FACTS)
    assert found is not None and found.passed


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refuses("unwritable", what="verdict", remedy="XDG_CACHE_HOME"):
        keep_verdict(FACTS, PASSED)
    with refuses("unwritable", remedy="XDG_CACHE_HOME"):
        check_keepable(FACTS)
    assert read_verdict(FACTS) is None


def facts_of(artifact: Path, root: Path = Path("/")) -> dict[str, Any]:
    manifest = read_manifest(artifact)
    profile = manifest.profiles[PROFILE]
    return trial_facts(manifest, select_target(Artifact(manifest, artifact), profile, TARGET), profile, root)


def test_facts_are_of_all_that_a_trial_depends_on(elsewhere: Path) -> None:
    """The content digest is equal for another build of the executables."""
    first = facts_of(elsewhere)
    assert (first["target"], first["profile"], first["driver"]) == (TARGET, PROFILE, "")
    assert first["chip"][0] == os.uname().machine
    put_executable(elsewhere, "prepare", b"another")
    second = facts_of(elsewhere)
    manifest = read_manifest(elsewhere)
    beside = msgspec.structs.replace(manifest.profiles[PROFILE], guidance=False, index=1)
    with_profiles(manifest, [manifest.profiles[PROFILE], beside]).write(elsewhere)  # changes none of them
    third = facts_of(elsewhere)
    assert first["content_digest"] == third["content_digest"] and second == third
    assert {name for name in first if first[name] != second[name]} == {"executables"}


# --- recorded ---


def test_the_user_s_own_comes_first(elsewhere: Path) -> None:
    lines: list[str] = []
    facts = record_verdict(elsewhere, PASSED)
    artifact = open_artifact(elsewhere)
    assert known_verdict(artifact, facts, lines.append) == msgspec.structs.replace(PASSED, facts=facts)
    assert len(lines) == 1 and "CPU v9" in lines[0] and "2026-11-29" in lines[0] and TARGET in lines[0]
    keep_verdict(facts, REFUSED)
    found = known_verdict(artifact, facts, lines.append)
    assert found is not None and not found.passed and len(lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "data", "other"),
    [
        (PASSED, b"", {"driver": "580.2"}),
        (PASSED, b"", {"packages": {"jax": "0.1"}}),
        (PASSED, b"", {"memory": "stream"}),
        (REFUSED, b"", {}),
        (PASSED, b"{", {}),
        (PASSED, PASSED.encoded(), {}),
    ],
    ids=["driver", "packages", "way of loading", "refusal", "no verdict", "about nothing"],
)
def test_another_one_does_not_count(
    elsewhere: Path, verdict: Verdict, data: bytes, other: dict[str, Any]
) -> None:
    lines: list[str] = []
    facts = record_verdict(elsewhere, verdict, data, **other)
    here = {name: "" if name in other else value for name, value in facts.items()}
    assert known_verdict(open_artifact(elsewhere), here, lines.append) is None and lines == []


def test_other_executables_leave_it_behind(elsewhere: Path) -> None:
    record_verdict(elsewhere, PASSED)
    put_executable(elsewhere, "prepare", b"another")
    assert open_artifact(elsewhere).manifest.verdicts == {}


def test_a_damaged_one_is_told(elsewhere: Path) -> None:
    facts = record_verdict(elsewhere, PASSED)
    (path,) = (elsewhere / "verdicts").iterdir()
    for damage in (lambda: flip(path, 0), path.unlink):
        damage()
        with pytest.raises(ArtifactError, match="recorded verdict"):
            known_verdict(open_artifact(elsewhere), facts)


def test_set_aside_it_counts_no_more(elsewhere: Path) -> None:
    facts = record_verdict(elsewhere, PASSED)
    artifact = open_artifact(elsewhere)
    set_aside(artifact, facts)
    set_aside(artifact, {**facts, "driver": "580.2"})  # there is none
    assert known_verdict(artifact, facts) is None
    record_verdict(elsewhere, msgspec.structs.replace(PASSED, platform_version="2"))  # another one
    assert known_verdict(open_artifact(elsewhere), facts) is not None


@pytest.mark.parametrize(("platform", "driver", "names"), [("cpu", "", True), ("cuda", "", False)])
def test_a_driver_that_is_not_shown_cannot_be_compared(platform: str, driver: str, names: bool) -> None:
    manifest = full_manifest()
    (programs,) = manifest.program_sets.values()
    programs = msgspec.structs.replace(programs, platform=platform)
    target = manifest.targets["cpu"]
    environment = {**target.environment, "platform": platform}
    target = msgspec.structs.replace(target, environment=environment, program_set=programs.key)
    changed = manifest.changed(program_sets={programs.key: programs}, targets={"cpu": target})
    artifact = Artifact(changed, Path())
    assert names_machine(artifact, {"target": "cpu", "driver": driver}) == names
    assert names_machine(artifact, {"target": "cpu", "driver": "580.1"})


# --- afresh ---


def test_what_is_known_does_not_count(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = record_verdict(elsewhere, PASSED)
    keep_verdict(facts, PASSED)
    artifact = open_artifact(elsewhere)
    profile = artifact.manifest.profiles[PROFILE]
    afresh = Afresh(artifact, select_target(artifact, profile), profile)
    assert [afresh.key] == list(artifact.manifest.verdicts) and afresh.comparable
    for found in (REFUSED, PASSED):
        code = f"import sys; open(sys.argv[-1], 'wb').write({found.encoded()!r})"
        monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))
        if found is REFUSED:
            with pytest.raises(ArtifactError):
                afresh.run(lambda line: None)
            assert afresh.recorded() is None
        else:
            afresh.run(lambda line: None)
    recorded = afresh.recorded()
    assert recorded is not None
    record, data = recorded
    assert (record.target, record.profile, record.device_kind) == (TARGET, PROFILE, "CPU v9")
    assert decoded_verdict(data) == msgspec.structs.replace(PASSED, facts=facts)
