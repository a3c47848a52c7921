"""Embedding files, and the embeddings that an artifact lists."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from helpers.manifests import plain_model
from helpers.refusals import refuses
from helpers.texts import PROMPT, random_rows, same
from wanrun.artifact.adapter import Lora
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Embedding, Manifest, read_manifest
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.text.embedding_cache import EmbeddingCache
from wanrun.text.embeddings import (
    ArtifactEmbeddings,
    EmbeddingFormat,
    all_finite,
    decode_rows,
    encode_rows,
)

# --- the file -----------------------------------------------------------------------------------------------


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0), allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=allow_pickle)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 32), (512, 33)])
def test_a_file_holds_the_bits(dtype: str, shape: tuple[int, int]) -> None:
    rows = random_rows(*shape, dtype)
    rows[0, 0] = -0.0
    data = encode_rows(rows)
    assert same(decode_rows(data, dtype, 512, shape[1]), rows)
    assert data == encode_rows(rows.copy(order="F"))
    stored = np.load(io.BytesIO(data), allow_pickle=False)
    assert stored.tobytes() == rows.tobytes()
    assert stored.dtype == (np.uint16 if dtype == "bfloat16" else np.float32)
    assert data == npy(stored) and len(data) == 128 + rows.nbytes


def refused(data: bytes, dtype: str = "float32", match: str | None = None) -> None:
    """A file that is not an embedding of at most 512 rows of width 4."""
    with pytest.raises(ValueError, match=match):
        decode_rows(data, dtype, 512, 4)


def test_a_file_of_another_kind_is_refused() -> None:
    rows = random_rows(3, 4)
    for array in (
        rows.T,
        rows[0],
        rows[None],
        rows[:0],
        random_rows(3, 5),
        random_rows(513, 4),
        rows.astype(np.float64),
        rows.astype(">f4"),
        rows.copy(order="F"),
    ):
        refused(npy(array), match="rows")
    refused(encode_rows(rows), "bfloat16", "rows")
    refused(encode_rows(rows.astype(ml_dtypes.bfloat16)), match="rows")
    refused(npy(np.array([[{}] * 4], object), allow_pickle=True), match="rows")
    refused(npy(rows, (2, 0)), match=r"format 1\.0")
    archive = io.BytesIO()
    np.savez(archive, rows=rows)
    refused(archive.getvalue())
    refused(b"")


def test_a_header_that_promises_more_than_the_file_holds() -> None:
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**40, 4)}
    np.lib.format.write_array_header_1_0(file, header)
    assert np.lib.format.read_magic(io.BytesIO(file.getvalue())) == (1, 0)
    refused(file.getvalue(), match="another kind")
    refused(npy(random_rows(512, 4))[:-1], match="in 8191 bytes")
    refused(encode_rows(random_rows(3, 4)) + b"\0", match="in 49 bytes")


@pytest.mark.parametrize(
    "header", ["{[]: 1}", "(" * 200, "-" * 200 + "1", "'" * 3, "[]", "{'descr': {}}", "\xff", " " * 60_000]
)
def test_a_header_that_is_nonsense(header: str) -> None:
    text = header.encode("latin-1") + b"\n"
    refused(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(48))


def test_a_damaged_header_is_refused() -> None:
    """Cut off anywhere, or with any bit flipped: a ValueError, or, where the bit says nothing, the same."""
    rows = random_rows(3, 4)
    data = encode_rows(rows)
    for length in range(len(data)):
        refused(data[:length])
    unnoticed = 0
    for bit in range(8 * 128):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = decode_rows(bytes(damaged), "float32", 512, 4)
        except ValueError:
            continue
        assert same(found, rows)
        unnoticed += 1
    assert unnoticed < 100  # in the white space at the end


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_not_numbers(dtype: str, value: float) -> None:
    rows = random_rows(3, 4, dtype)
    rows[1, 2] = value
    refused(encode_rows(rows), dtype, "not all rows are numbers")


def test_what_is_a_number_in_bfloat16() -> None:
    """NumPy's isfinite would warn of a signalling NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    assert [all_finite(one.view(ml_dtypes.bfloat16)) for one in bits] == np.isfinite(wide).tolist()


# --- keys ---------------------------------------------------------------------------------------------------


def with_text_encoder(manifest: Manifest, **parameter: Any) -> Manifest:
    """With one parameter of the text encoder changed."""
    component = manifest.components["text_encoder"]
    path = "final_norm/weight"
    changed = msgspec.structs.replace(component.parameters[path], **parameter)
    parameters = {**component.parameters, path: changed}
    components = {
        **manifest.components,
        "text_encoder": msgspec.structs.replace(component, parameters=parameters),
    }
    return manifest.changed(components=components)


def test_what_a_key_depends_on(manifest: Manifest, tmp_path: Path) -> None:
    """Of the artifact's embeddings, and so of the cache's."""
    config = {**manifest.configs, "text_encoder": {**manifest.configs["text_encoder"], "num_heads": 3}}
    others = [
        with_text_encoder(manifest, crc32c=("00000001",)),
        with_text_encoder(manifest, sha256="0" * 64),
        manifest.changed(configs=config),
        manifest.changed(tokenizer=msgspec.structs.replace(manifest.tokenizer, sha256="0" * 64)),
        manifest.changed(tokenizer=msgspec.structs.replace(manifest.tokenizer, max_length=256)),
        manifest.changed(tokenizer=msgspec.structs.replace(manifest.tokenizer, pad_id=1)),
    ]
    keys = {EmbeddingFormat(other).key("a fox", "float32") for other in (manifest, *others)}
    keys |= {
        EmbeddingFormat(manifest).key("a fox.", "float32"),
        EmbeddingFormat(manifest).key("a fox", "bfloat16"),
    }
    assert len(keys) == len(others) + 3
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)

    same_key = manifest.changed(
        loras=(Lora(file="x", sha256="0", scale=1.0, component=None),),
        times={"converted": "now"},
        model=plain_model(),
        source={"files": {}},
    )
    assert EmbeddingFormat(same_key).key("a fox", "float32") in keys
    cached = {EmbeddingCache(other, {}, folder=tmp_path).name("a fox", "float32") for other in others}
    assert len(cached) == len(others) and not cached & keys


# --- the artifact's -----------------------------------------------------------------------------------------


@pytest.fixture
def listed(manifest: Manifest, tmp_path: Path) -> tuple[Path, Manifest, np.ndarray]:
    """An artifact that has one embedding, and the embedding."""
    rows = random_rows(5, manifest.configs["text_encoder"]["d_model"], "bfloat16")
    key = EmbeddingFormat(manifest).key(PROMPT, "bfloat16")
    data = encode_rows(rows)
    path = tmp_path / f"embeddings/{key}.npy"
    path.parent.mkdir()
    path.write_bytes(data)
    record = Embedding(
        file=f"embeddings/{key}.npy", sha256=sha256_of(data), prompt=PROMPT, dtype="bfloat16", length=5
    )
    changed = manifest.changed(embeddings={key: record})
    changed.write(tmp_path)
    return tmp_path, read_manifest(tmp_path), rows


def test_the_artifacts_embeddings(listed: tuple[Path, Manifest, np.ndarray]) -> None:
    artifact, manifest, rows = listed
    assert manifest.content_digest == manifest.changed(embeddings={}).content_digest
    store = ArtifactEmbeddings(Artifact(manifest, artifact))
    assert same(store.find(PROMPT, "bfloat16"), rows)
    assert store.find(PROMPT, "float32") is None
    assert store.find(PROMPT + ".", "bfloat16") is None
    store.put("another", rows)
    assert store.find("another", "bfloat16") is None
    other = with_text_encoder(manifest, sha256="0" * 64)
    assert ArtifactEmbeddings(Artifact(other, artifact)).find(PROMPT, "bfloat16") is None


def test_a_damaged_embedding_of_the_artifact(listed: tuple[Path, Manifest, np.ndarray]) -> None:
    """What else may be wrong with a file that a manifest lists, tests/runtime/artifact has."""
    artifact, manifest, rows = listed
    ((key, record),) = manifest.embeddings.items()
    path = artifact / record.file
    data, other = path.read_bytes(), encode_rows(rows[:4])

    def check_refused(**parts: object) -> None:
        store = ArtifactEmbeddings(Artifact(manifest.changed(embeddings={key: record}), artifact))
        with refuses("damaged", ArtifactError, remedy="wanbuild embed", **{"what": path, **parts}) as caught:
            store.find(PROMPT, "bfloat16")
        assert str(path) in caught.value.what and "\n" not in str(caught.value)

    path.write_bytes(other)
    check_refused(expected=f"sha256 {record.sha256}", found=sha256_of(other))
    path.unlink()
    check_refused(found="No such file")

    # Files with the sha256 that the manifest says, and with other rows than it says.
    width = rows.shape[1]
    for content in (
        b"",
        encode_rows(rows.astype(np.float32)),
        other,
        encode_rows(random_rows(5, width + 1, "bfloat16")),
    ):
        path.write_bytes(content)
        record = msgspec.structs.replace(record, sha256=sha256_of(content))
        check_refused()

    # A record under the key of another prompt.
    path.write_bytes(data)
    record = msgspec.structs.replace(record, sha256=sha256_of(data), prompt="another prompt")
    check_refused(what=" key ")
