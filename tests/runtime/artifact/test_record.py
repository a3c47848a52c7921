"""What all records of a manifest have in common."""

from __future__ import annotations

import msgspec
import pytest

from helpers.refusals import refuses
from wanrun.artifact.record import AtLeastOne, Dtype, ListedFile, NotNegative, Record
from wanrun.errors import ArtifactError


class Example(Record, frozen=True, kw_only=True):
    size: AtLeastOne
    index: NotNegative = 0
    dtype: Dtype = "float32"


def decoded(text: bytes) -> Example:
    return msgspec.json.decode(text, type=Example)


def test_a_record_is_what_its_json_says() -> None:
    assert decoded(b'{"size": 1, "dtype": "bfloat16"}') == Example(size=1, dtype="bfloat16")
    with pytest.raises(AttributeError):
        decoded(b'{"size": 1}').size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{}", "missing required field `size`"),
        (b'{"size": 0}', ">= 1"),
        (b'{"size": true}', "Expected `int`, got `bool`"),
        (b'{"size": 1.5}', "Expected `int`"),
        (b'{"size": 1, "index": -1}', ">= 0"),
        (b'{"size": 1, "dtype": "float16"}', "Invalid enum value 'float16'"),
        (b'{"size": 1, "colour": "red"}', "contains unknown field `colour`"),
    ],
)
def test_anything_else_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        decoded(text)


def test_a_file_lies_in_the_artifact() -> None:
    assert ListedFile(file="golden/a.npz", sha256="0").file == "golden/a.npz"
    with refuses("untrusted", ArtifactError, what="a recorded output", found="'../a.npz'"):
        ListedFile(file="../a.npz", sha256="0")
