"""Prompt embeddings as files, and the embeddings that an artifact lists.

An embedding is the output of ``encode_text`` for one prompt, without padding: (length, D). Its key covers all
that it depends on: the text encoder's checksums and config, the tokenizer, the cleaned prompt and the compute
dtype.

A file is a plain .npy (format 1.0), which ``numpy.load(..., allow_pickle=False)`` reads: float32, or the bits
of bfloat16 as uint16. Equal rows give equal bytes. Its facts and sha256 are stored separately: in the
manifest for an artifact's embedding, in a JSON file for a cached one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.named import EMBEDDING
from wanrun.errors import ArtifactError
from wanrun.files import NPY_DAMAGE, canonical_json, sha256_of
from wanrun.weights.buffers import DTYPES

TEXT_ENCODER = "text_encoder"
"""The text encoder's component."""

STORED: Mapping[str, np.dtype] = MappingProxyType({"bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")})
"""The dtypes of embeddings, and the NumPy dtype in which a file stores each."""

_HEADER_BYTES = 256
"""Limit on an .npy file's header; NumPy writes 128 bytes."""


def text_digest(manifest: Manifest) -> str:
    """Returns the sha256 of the tokenizer, and of the text encoder's config and weights."""
    parameters = manifest.components[TEXT_ENCODER].parameters
    content = {
        "parameters": {path: [p.layout, p.crc32c, p.sha256] for path, p in parameters.items()},
        "config": manifest.configs[TEXT_ENCODER],
        "tokenizer": manifest.tokenizer,
    }
    return sha256_of(canonical_json(msgspec.to_builtins(content)))


def all_finite(rows: np.ndarray) -> bool:
    """Returns whether all values are finite; np.isfinite warns about a signalling NaN in bfloat16."""
    if rows.dtype == DTYPES["bfloat16"]:
        return bool((rows.view(np.uint16) & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(rows).all())


def encode_rows(rows: np.ndarray) -> bytes:
    """Encodes an embedding, (length, D) in bfloat16 or float32, as an .npy file."""
    file = io.BytesIO()
    stored = np.ascontiguousarray(rows).view(STORED[rows.dtype.name])
    np.lib.format.write_array(file, stored, version=(1, 0), allow_pickle=False)
    return file.getvalue()


def decode_rows(data: bytes, dtype: str, max_length: int, width: int) -> np.ndarray:
    """Decodes the bytes of an .npy file to an embedding (length, width) in dtype.

    ``numpy.load`` would allocate any size that the header claims. This function returns a view of the bytes.
    Raises ValueError if the file is anything else, has more than ``max_length`` rows, or NaN or infinite
    values.
    """
    file, stored = io.BytesIO(data), STORED[dtype]
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it is not of format 1.0")
        shape, fortran_order, found = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER_BYTES)
    except NPY_DAMAGE as error:
        raise ValueError(f"its header is damaged: {error}") from None
    values = len(data) - file.tell()
    fits = len(shape) == 2 and 1 <= shape[0] <= max_length and shape[1] == width and found == stored
    if not fits or fortran_order or values != shape[0] * width * stored.itemsize:
        raise ValueError(f"its rows are of another kind: {found} {shape} in {values} bytes")
    rows = np.frombuffer(data, stored, offset=file.tell()).reshape(shape).view(DTYPES[dtype])
    if not all_finite(rows):
        raise ValueError("not all rows are numbers")
    return rows


class EmbeddingFormat:
    """The keys and the file format of embeddings of one artifact's text encoder."""

    def __init__(self, manifest: Manifest) -> None:
        self._text = text_digest(manifest)
        self._max_length = manifest.tokenizer.max_length
        self._width = manifest.model.text_width

    @property
    def limit(self) -> int:
        """The largest size of a file, in bytes."""
        return self._max_length * self._width * DTYPES["float32"].itemsize + _HEADER_BYTES

    def key(self, cleaned_prompt: str, dtype: str) -> str:
        """Returns the hexadecimal name of the embedding of a prompt, which ``clean_prompt`` has cleaned."""
        return sha256_of(canonical_json({"text": self._text, "prompt": cleaned_prompt, "dtype": dtype}))

    def decode(self, data: bytes, dtype: str) -> np.ndarray:
        """Decodes a file, like ``decode_rows``."""
        return decode_rows(data, dtype, self._max_length, self._width)


class ArtifactEmbeddings:
    """The embeddings that an artifact lists."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact, self._listed = artifact, artifact.manifest.embeddings
        self._format = EmbeddingFormat(artifact.manifest)

    def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
        """Returns the prompt's embedding (length, D) in dtype; None if it is not listed.

        Raises ArtifactError if it is listed, but missing or damaged.
        """
        key = self._format.key(cleaned_prompt, dtype)
        return self.read(key) if key in self._listed else None

    def read(self, key: str) -> np.ndarray:
        """Reads a listed embedding (length, D). Raises ArtifactError if it is missing or damaged."""
        record = self._listed[key]
        data = self._artifact.listed(EMBEDDING, record)
        try:
            if key != self._format.key(record.prompt, record.dtype):
                raise ValueError("its key is of another prompt or text encoder")
            rows = self._format.decode(data, record.dtype)
            if len(rows) != record.length:
                raise ValueError(f"it has {len(rows)} rows, not {record.length}")
        except ValueError as error:
            what = f"{EMBEDDING.what} {self._artifact.folder / record.file} is damaged: {error}"
            raise ArtifactError("damaged", what, remedy=EMBEDDING.remedy) from None
        return rows

    def put(self, cleaned_prompt: str, rows: np.ndarray) -> None:
        """Does nothing: only ``wanbuild embed`` adds embeddings to an artifact."""
