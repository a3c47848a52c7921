"""Reports: one page of HTML about a run, a verification or a benchmark, which needs no other file.

``wanrun --report``, ``wanbuild verify --report`` and ``benchmarks/quality.py --report`` write one. Of the
runtime it uses only what ``wanrun`` and ``wanrun.errors`` export. The server's page has the same style sheet.
"""

from pathlib import Path
from typing import Final

__all__ = ["STYLE"]

STYLE: Final = Path(__file__).with_name("style.css")
"""The style sheet of reports and of the server's page."""
