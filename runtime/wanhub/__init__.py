"""Artifacts that are elsewhere: fetched as they are read, pinned to a revision, and signed.

The extra ``hub`` installs what it needs. ``wanrun`` imports it for an address, such as ``hf://OWNER/NAME``.
"""

from __future__ import annotations
