"""``wanbuild attest``: what was built elsewhere is tried here, and its verdict goes into the artifact."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, build_elsewhere, record_verdict
from wanbuild.check.attest import attest
from wanbuild.check.inspect import summary, table
from wanhub.signature import SIGNATURE
from wanrun.artifact.artifact import open_artifact
from wanrun.errors import ArtifactError
from wanrun.files import user_cache
from wanrun.trust import trial
from wanrun.trust.recorded import known_verdict
from wanrun.trust.verdict import Verdict

PASSED = Verdict(outcome="passed", reason="they agree", device_kind="CPU v9", platform_version="1")
REFUSED = msgspec.structs.replace(PASSED, outcome="refused")


def finds(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    """Takes the place of the child, whose verdict is this."""
    code = f"import sys; open(sys.argv[-1], 'wb').write({verdict.encoded()!r})"
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))


@pytest.mark.slow
def test_what_is_right_is_recorded_until_it_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    finds(monkeypatch, PASSED)
    attest(elsewhere, [], False, lines.append)
    assert open_artifact(elsewhere).manifest.verdicts == {} and len(lines) == 2
    (elsewhere / SIGNATURE).write_text("of the manifest before")
    attest(elsewhere, [PROFILE], True, lines.append)
    artifact = open_artifact(elsewhere)
    ((key, one),) = artifact.manifest.verdicts.items()
    assert (one.target, one.profile, one.device_kind) == (TARGET, PROFILE, "CPU v9")
    assert artifact.whole(artifact.named()) and SIGNATURE in lines[-1]
    assert summary(artifact.manifest)["targets"][TARGET]["attested"][0]["device_kind"] == "CPU v9"
    assert any("CPU v9," in line for line in table(artifact.manifest))

    before = artifact.changed(verdicts={key: msgspec.structs.replace(one, made="2020-01-01T00:00:00Z")})
    before.write()
    attest(elsewhere, [PROFILE], True, lines.append)  # the same verdict: a signature still fits
    assert open_artifact(elsewhere).manifest == before.manifest

    (kept,) = (user_cache() / "verdicts").iterdir()
    assert kept.stem == key
    kept.unlink()
    finds(monkeypatch, msgspec.structs.replace(REFUSED, keep=False))  # the device was busy
    with pytest.raises(ArtifactError, match="1 of 1"):
        attest(elsewhere, [], True, lines.append)
    assert list(open_artifact(elsewhere).manifest.verdicts) == [key]
    facts = record_verdict(elsewhere, PASSED, driver="580.1")  # of another kind of machine: it stays
    finds(monkeypatch, REFUSED)
    with pytest.raises(ArtifactError, match="1 of 1"):
        attest(elsewhere, [], True, lines.append)
    artifact = open_artifact(elsewhere)
    assert known_verdict(artifact, facts) is not None and key not in artifact.manifest.verdicts
    assert [path.name for path in (elsewhere / "verdicts").iterdir()] == [
        Path(one.file).name for one in artifact.manifest.verdicts.values()
    ]


def test_what_is_compiled_where_it_runs_needs_none(artifact: Path) -> None:
    lines: list[str] = []
    attest(artifact, [], False, lines.append)
    assert len(lines) == 1 and "target cpu" in lines[0]
    with pytest.raises(ArtifactError, match="'x'"):
        attest(artifact, ["x"], False, lines.append)
    build_elsewhere(artifact, beside=True, variables={"XLA_FLAGS": "--xla_x=1"})
    with pytest.raises(ArtifactError, match="XLA_FLAGS"):
        attest(artifact, [], False, lines.append)
