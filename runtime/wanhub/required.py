"""Runs nothing but what its maker has signed: the signature, and every file that it covers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import wanrun
from wanhub.copy import MARKER
from wanhub.expected import Expected, check_file, check_parameter, expected_files
from wanhub.signature import check_signature
from wanrun.errors import ArtifactError

THREADS = 4


def require_signature(folder: Path, public_key: Path) -> None:
    """Checks an artifact's signature, and reads every file that its manifest lists.

    Of a partial copy only the signature is checked: its files were compared as they were fetched.

    Args:
        folder: the artifact's folder.
        public_key: an elliptic curve key, PEM.

    Raises:
        ArtifactError: if it is not signed with this key, or a file is missing or differs.
        UsageError: if the key is none, or model-signing is not installed.
    """
    check_signature(folder, public_key)
    expected = expected_files(wanrun.read_manifest(folder))
    if (folder / MARKER).is_file():
        return
    parameters: dict[str, list[tuple[str, Expected]]] = {}
    for name, one in expected.items():
        parameters.setdefault(one.folder or name, []).append((name, one))

    def check(group: list[tuple[str, Expected]]) -> None:
        first = group[0][1]
        try:
            rows = [check_file(folder / name, str(folder / name), one) for name, one in group]
            if first.parameter is not None:
                check_parameter([folder / name for name, _ in group], str(folder / first.folder), first, rows)
        except OSError as error:
            raise ArtifactError(
                f"{error.filename} cannot be read", found=error.strerror, remedy="copy the artifact again"
            ) from None

    with ThreadPoolExecutor(THREADS, thread_name_prefix="signed") as pool:
        for _ in pool.map(check, parameters.values()):
            pass
