"""Good checkpoints, of which hostile ones are made."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def good_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Toys by stored dtype, one of three shards a component, and of other variants. Not to be changed."""
    from wanbuild.toy.toy_checkpoint import write_toy
    from wanbuild.toy.toy_weights import Stored

    folder = tmp_path_factory.mktemp("good")
    for dtype in ("float32", "float16", "bfloat16"):
        write_toy(folder / dtype, stored=Stored(dtype=dtype), seed=2)
    write_toy(folder / "sharded", stored=Stored(shards=3), seed=3)
    write_toy(folder / "experts", "wan2.2-t2v", seed=4)
    write_toy(folder / "ti2v", "wan2.2-ti2v", seed=5)
    for variant in ("wan2.1-i2v", "wan2.1-flf2v", "wan2.1-vace", "wan2.2-i2v", "wan2.2-animate"):
        write_toy(folder / variant, variant)
    return {path.name: path for path in folder.iterdir()}
