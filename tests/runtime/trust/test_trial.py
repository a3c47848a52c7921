"""A child tries executables: whatever becomes of it, there is a verdict."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from helpers.started import Started
from wanrun.trust.trial import run_trial
from wanrun.trust.verdict import Verdict

FAR = Verdict(outcome="refused", reason="while they were loaded", device_kind="cpu", platform_version="1")
WRITE = "import os, signal, sys, time; path = sys.argv[sys.argv.index('--outcome') + 1]\n"


def child(code: str, told: Verdict | None = FAR) -> Sequence[str]:
    """The command of a child that writes a verdict and then runs this."""
    if told is not None:
        code = f"open(path, 'wb').write({told.encoded()!r})\n{code}"
    return sys.executable, "-c", WRITE + code


def test_what_the_child_says_is_the_verdict() -> None:
    passed = Verdict(outcome="passed", reason="agrees")
    checked = child("assert sys.argv[1] == '--outcome'", passed)
    assert run_trial([], command=checked) == passed
    checked = child("assert sys.argv[1:3] == ['--artifact', 'a b']", passed)
    assert run_trial(["--artifact", "a b"], command=checked) == passed


@pytest.mark.parametrize(
    ("code", "reason", "keep"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", True),
        ("os.abort()", "SIGABRT", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", False),
        ("os._exit(7)", "exit code 7", True),
    ],
)
def test_a_child_that_does_not_come_back(code: str, reason: str, keep: bool) -> None:
    """What ends it from outside, as for want of memory, says nothing of the executables."""
    found = run_trial([], command=child(code))
    assert reason in found.reason and "loaded" in found.reason
    assert (found.passed, found.keep, found.device) == (False, keep, FAR.device)


def test_a_child_that_hangs() -> None:
    found = run_trial([], seconds=0.5, command=child("time.sleep(60)"))
    assert " 0.5 s" in found.reason and "loaded" in found.reason
    assert not found.passed and found.keep


def test_what_it_says_last_is_repeated_in_one_line() -> None:
    said = "'first\\nF0 check\\x1b[1m failed' + 400 * '!' + '\\n\\n'"
    code = f"sys.stderr.write({said}); sys.stderr.flush()\nos.abort()"
    reason = run_trial([], command=child(code)).reason
    assert "; it said: " in reason and reason.endswith("!!!") and reason.isprintable()
    assert "first" not in reason and len(reason) < 450


@pytest.mark.parametrize("code", ["sys.exit(1)", "pass", "os.abort()"])
def test_a_child_that_had_not_begun(code: str) -> None:
    found = run_trial([], command=child(code, None))
    assert not found.passed and not found.keep and "begun" in found.reason


def test_a_child_that_writes_no_verdict() -> None:
    found = run_trial([], command=(sys.executable, "-c", WRITE + "open(path, 'w').write('passed')"))
    assert (found.passed, found.keep) == (False, False)


def test_an_interrupt_ends_the_child(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(process: subprocess.Popen[bytes], seconds: float) -> int:
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(subprocess.Popen, "wait", interrupted)
        run_trial([], command=child("time.sleep(60)"))
    assert started[0].returncode == -signal.SIGKILL
