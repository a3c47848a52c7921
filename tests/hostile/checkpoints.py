"""Every broken checkpoint."""

from __future__ import annotations

from hostile import configs, folders, variants, weights
from hostile.changes import Row

ROWS: tuple[Row, ...] = (*folders.ROWS, *configs.ROWS, *variants.ROWS, *weights.ROWS)
