"""Random damage to the files of an artifact or a checkpoint."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from hostile.things import THINGS


def files_below(folder: Path) -> list[Path]:
    """Every regular file, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _insert(rng: random.Random, path: Path) -> None:
    data, where = path.read_bytes(), rng.randrange(path.stat().st_size + 1)
    path.write_bytes(data[:where] + rng.randbytes(rng.choice((1, 4, 4096))) + data[where:])


def _delete(rng: random.Random, path: Path) -> None:
    data, where = path.read_bytes(), rng.randrange(path.stat().st_size)
    path.write_bytes(data[:where] + data[where + rng.choice((1, 4, 4096)) :])


def _truncate(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.choice((0, 1, path.stat().st_size // 2, path.stat().st_size - 1)))


def _zero(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def _remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def _thing(rng: random.Random, path: Path) -> None:
    """Something that is no file, in its place."""
    path.unlink()
    rng.choice(list(THINGS.values()))(path)


def _endless(rng: random.Random, path: Path) -> None:
    os.truncate(path, 2 ** rng.choice((31, 36, 40)))


def _unreadable(rng: random.Random, path: Path) -> None:
    path.chmod(0)  # nothing to root


KINDS: tuple[tuple[Callable[[random.Random, Path], None], int], ...] = (
    (_flip, 12),
    (_insert, 4),
    (_delete, 4),
    (_truncate, 4),
    (_zero, 3),
    (_remove, 2),
    (_thing, 4),
    (_endless, 1),
    (_unreadable, 1),
)
"""Damage to one file, with its weight."""


def _swap(rng: random.Random, folder: Path) -> str:
    first, second = rng.sample(files_below(folder), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return f"swap {first.relative_to(folder)} {second.relative_to(folder)}"


def damage(rng: random.Random, folder: Path) -> str:
    """Damages a copy of an artifact or a checkpoint at random, and says how."""
    if rng.random() < 0.06:
        return _swap(rng, folder)
    groups: dict[str, list[Path]] = {}
    for path in files_below(folder):
        groups.setdefault(path.relative_to(folder).parts[0], []).append(path)
    path = rng.choice(groups[rng.choice(sorted(groups))])  # each folder alike, however many files it has
    return f"{damage_file(rng, path)} {path.relative_to(folder)}"


def damage_file(rng: random.Random, path: Path) -> str:
    """Damages one file at random, and says how."""
    (kind,) = rng.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])
    if path.stat().st_size == 0:
        kind = _remove
    kind(rng, path)
    return kind.__name__.strip("_")


def copied(source: Path, folder: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(source, folder, symlinks=True))
