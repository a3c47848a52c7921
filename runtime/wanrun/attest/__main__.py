"""The child of ``wanrun.trust.trial``: attests executables, and writes its verdict to a file."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from wanrun.attest.attest import attested
from wanrun.files import replace_file
from wanrun.trust.verdict import Verdict
from wanrun.undo import end


def main() -> None:
    """Attests what the command line says."""
    parser = argparse.ArgumentParser("python -m wanrun.attest")
    for name in ("artifact", "target", "profile", "outcome"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--memory", default="low")
    parser.add_argument("--text-encoder-device")
    given = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(verdict: Verdict) -> None:
        replace_file(Path(given.outcome), verdict.encoded())

    how = {"memory": given.memory, "text_encoder_device": given.text_encoder_device, "weights": given.weights}
    tell(attested(Path(given.artifact), given.target, given.profile, tell, **how))
    end(0)


def _end_with_parent() -> None:
    """Ends this process when the one that waits for it has ended, which closes this one's standard input."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
