"""The secret of a run of several processes: where it comes from, and what it keeps out."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.groups import free_port, run_threads
from wanrun.cluster.company_key import VARIABLE, company_key, proof_of
from wanrun.cluster.join import join
from wanrun.errors import UsageError


def test_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert company_key() == ""
    monkeypatch.setenv(VARIABLE, "a fox")
    assert company_key() == "a fox"
    (tmp_path / "key").write_text("a badger\n")
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(tmp_path / "key"))
    assert company_key() == "a badger"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b" \n", "nothing"), (b"\xff\xfe", "decode"), (b"x" * 5000, "")],
)
def test_a_file_that_has_none(
    content: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(tmp_path / "key"))
    with pytest.raises(UsageError, match=f"{VARIABLE}_FILE cannot be used; .*{problem}"):
        company_key()


def test_what_is_sent_does_not_tell_the_secret() -> None:
    proofs = {proof_of(key) for key in ("", "a fox", "a fo", "open", "\udcff")}
    assert len(proofs) == 5 and {len(proof) for proof in proofs} == {64}
    assert not any(b"fox" in proof for proof in proofs)


def test_only_loopback_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.0.0.0 is every device of this host, and is reached as one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    port = free_port()
    with pytest.raises(UsageError, match=f"anybody could join at 0.0.0.0:{port}; .*{VARIABLE}=open"):
        join(f"0.0.0.0:{port}", 2, 0).__enter__()
    monkeypatch.setenv(VARIABLE, "a fox")
    results = run_threads(2, lambda group: group.exchange(group.process), port, "0.0.0.0")
    assert results == [[0, 1]] * 2
