"""What tests share and is no fixture."""

from __future__ import annotations

from pathlib import Path

UNPRIVILEGED = Path(__file__).with_name("unprivileged.py")
"""A script that runs a command to which file permissions apply."""

FAULT_RUNS = Path(__file__).with_name("fault_runs.py")
"""A script whose builds are killed, interrupted or compete."""
