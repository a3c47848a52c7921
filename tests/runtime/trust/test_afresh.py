"""A trial whatever is known; what has passed can be recorded, with the facts that it is about."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, record_verdict
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError
from wanrun.trust import trial
from wanrun.trust.afresh import Afresh
from wanrun.trust.verdict import Verdict, decoded_verdict, keep_verdict

PASSED = Verdict(outcome="passed", reason="they agree", device_kind="CPU v9", platform_version="1")
REFUSED = msgspec.structs.replace(PASSED, outcome="refused")


def test_what_is_known_does_not_count(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = record_verdict(elsewhere, PASSED)
    keep_verdict(facts, PASSED)
    artifact = open_artifact(elsewhere)
    profile = artifact.manifest.profiles[PROFILE]
    afresh = Afresh(artifact, select_target(artifact, profile), profile)
    assert [afresh.key] == list(artifact.manifest.verdicts) and afresh.comparable
    for found, refuses in ((REFUSED, True), (PASSED, False)):
        code = f"import sys; open(sys.argv[-1], 'wb').write({found.encoded()!r})"
        monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))
        if refuses:
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
