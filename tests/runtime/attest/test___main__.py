"""The child: it writes its verdict, and ends with the process that waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wanrun.trust.trial import CHILD, run_trial

pytestmark = pytest.mark.slow


def test_a_verdict_is_written(tmp_path: Path) -> None:
    arguments = ["--artifact", str(tmp_path), "--target", "v9", "--profile", "1x1x1"]
    verdict = run_trial(arguments)
    assert not verdict.passed and not verdict.keep
    assert verdict.reason.startswith(f"{tmp_path} is not an artifact")


def test_a_wrong_command_line_is_no_verdict(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome.json"
    done = subprocess.run([*CHILD, "--outcome", outcome], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--artifact" in done.stderr and not outcome.exists()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Whose end of the child's standard input is closed by the system, in whatever way it ends."""
    code = (
        "import sys, threading, time\nfrom wanrun.attest.__main__ import _end_with_parent\n"
        "threading.Thread(target=_end_with_parent, daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"up\n" and child.poll() is None
    child.stdin.close()
    assert child.wait(20) == 1
    child.stdout.close()
