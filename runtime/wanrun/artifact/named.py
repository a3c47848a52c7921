"""The kinds of files of an artifact, and what each file must be: its size and its digests."""

from __future__ import annotations

__all__ = ["ADAPTER", "VERDICT", "Kind"]

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from os import fstat
from pathlib import Path

from wanrun.artifact.layout import CRC_BYTES
from wanrun.artifact.parameters import Parameter
from wanrun.errors import ArtifactError
from wanrun.files import open_regular, read_bounded, sha256_of

BLOCK_BYTES = 2**19
"""Bytes of a file of weights that are read and digested at a time: two threads' blocks fit the cache."""


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        what: one file of it, in words.
        folder: the folder of all of them in the artifact; empty for that of the manifest.
        names: a pattern of their names in it, as a build gives them.
        most: the largest file whose size the manifest does not say, in bytes; real ones are far smaller.
        remedy: what to do if one is damaged.
    """

    what: str
    folder: str
    names: str
    most: int = 0
    remedy: str = "copy the artifact again or rebuild it"


_AGAIN = "copy the artifact again, or run wanbuild"

WEIGHTS = Kind(
    "the file of weights",
    "weights",
    r"(transformer(_2)?|text_encoder|image_encoder|vae|tiny_vae)/.+",
    remedy="copy the artifact again or rebuild it with wanbuild convert --force",
)
TOKENIZER = Kind("the tokenizer", "tokenizer", r"tokenizer\.json", 2**28)
PROGRAM = Kind("the program", "programs", r"[^/]+/\w+-[0-9a-f]{12}\.stablehlo", 2**30, f"{_AGAIN} compile")
EXECUTABLE = Kind(
    "the executable", "executables", r"[^/]+/jit_\w+-[0-9a-f]{64}-cache", remedy=f"{_AGAIN} compile"
)
REQUIREMENTS = Kind("the requirements file", "", r"requirements(-[^/]+)?\.txt", 2**20)
GOLDEN = Kind("the recorded result", "golden", r"[^/]+-[0-9a-f]{12}\.json", 2**20)
EMBEDDING = Kind("the prompt embedding", "embeddings", r"[^/]+\.npy", 2**26, f"{_AGAIN} embed")
ADAPTER = Kind("the adapter", "adapters", r"[^/]+\.safetensors", remedy=f"{_AGAIN} lora")
VERDICT = Kind(
    "the recorded verdict", "verdicts", r"[^/]+-[0-9a-f]{12}\.json", 2**16, f"{_AGAIN} attest --record"
)
KINDS = (WEIGHTS, TOKENIZER, PROGRAM, EXECUTABLE, REQUIREMENTS, GOLDEN, EMBEDDING, ADAPTER, VERDICT)
"""All kinds of files. Real tokenizers have 17 MB, programs some megabytes, records and verdicts some
kilobytes, and the largest embedding, 512 tokens of UMT5-XXL in float32, 8 MB."""


@dataclass(frozen=True)
class Named:
    """A file that a manifest lists.

    Attributes:
        kind: its kind.
        name: its path relative to the artifact's folder.
        of: what it belongs to: the component, the program set's key, the target, the profile of a recorded
            result, the key of an embedding or of a verdict, or the adapter's name; empty of the tokenizer.
        sha256: the digest of its bytes, hexadecimal; empty of a file of weights.
        nbytes: its size; None if the manifest does not say.
        parameter: of a file of weights, whose rows it has. The manifest has one digest of all rows.
        index: the number of the file, of those of the parameter.
        group: what is compared together: the parameter's folder; of others the name.
    """

    kind: Kind
    name: str
    of: str = ""
    sha256: str = ""
    nbytes: int | None = None
    parameter: Parameter | None = None
    index: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.name)

    @property
    def most(self) -> int:
        """The most bytes that are read of it."""
        return self.kind.most if self.nbytes is None else self.nbytes

    def read(self, path: Path) -> bytes:
        """Returns the bytes of a file, which must not be one of weights.

        Args:
            path: where it is.

        Raises:
            ArtifactError: if it is missing, cannot be read, or is another one.
        """
        try:
            data = read_bounded(path, self.most)
            found = sha256_of(data)
        except OSError as error:
            data, found = b"", error.strerror or str(error)
        self._check_digest(found, path)
        return data

    def check(self, path: Path, what: object = None) -> list[bytes]:
        """Compares a file with what the manifest lists; a block of it is in memory at a time.

        Args:
            path: where it is.
            what: the file, for messages; None for its path.

        Returns:
            Of a file of weights the sha256 digest of each row, for ``check_rows``; of others nothing.

        Raises:
            ArtifactError: if it is missing, cannot be read, or is another one.
        """
        what = path if what is None else what
        try:
            with open_regular(path, self.most) as file:
                return self._compared(file, what)
        except OSError as error:
            raise self.damage_error(what, "a file", error.strerror or str(error)) from None

    def _compared(self, file: BufferedReader, what: object) -> list[bytes]:
        size = fstat(file.fileno()).st_size
        if self.nbytes not in (None, size):
            raise self.damage_error(what, f"{self.nbytes} bytes", f"{size} bytes")
        if self.parameter is None:
            self._check_digest(hashlib.file_digest(file, "sha256").hexdigest(), what)
            return []
        from crc32c import crc32c  # 10 ms of a start that compares nothing

        layout, digests, checksum = self.parameter.layout, list[bytes](), 0
        first = self.index * layout.rows_per_chunk
        for row in range(first, first + layout.rows_per_chunk):
            digest, of_row, left = hashlib.sha256(), 0, layout.row_bytes
            while block := file.read(min(left, BLOCK_BYTES)):
                digest.update(block)
                checksum, of_row = crc32c(block, checksum), crc32c(block, of_row)
                left -= len(block)
            digests.append(digest.digest())
            if f"{of_row:08x}" != self.parameter.crc32c[row]:
                raise self.damage_error(
                    what, f"crc32c {self.parameter.crc32c[row]} of row {row}", f"{of_row:08x}"
                )
        stored = int.from_bytes(file.read(CRC_BYTES), "little")
        if stored != checksum:
            raise self.damage_error(what, f"crc32c {checksum:08x}", f"{stored:08x}")
        return digests

    def check_rows(self, rows: Iterable[list[bytes]], what: object) -> None:
        """Compares all rows of a parameter with its digest.

        Args:
            rows: what ``check`` has returned of each of its files, in order.
            what: the parameter, for messages.

        Raises:
            ArtifactError: if it is another one.
        """
        assert self.parameter is not None
        found = sha256_of(b"".join(digest for digests in rows for digest in digests))
        if found != self.parameter.sha256:
            raise self.damage_error(what, f"sha256 {self.parameter.sha256}", found)

    def _check_digest(self, found: str, what: object) -> None:
        if found != self.sha256:
            raise self.damage_error(what, f"sha256 {self.sha256}", found)

    def damage_error(self, what: object, expected: str, found: str) -> ArtifactError:
        """Returns the error of a file that is missing or another one."""
        kind = self.kind
        return ArtifactError(
            "damaged", f"{kind.what} {what} is damaged", expected=expected, found=found, remedy=kind.remedy
        )
