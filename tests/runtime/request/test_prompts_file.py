"""Prompts files: every line becomes a request or is reported, whatever is in it."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.refusals import check_refusal, refuses
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, WanError
from wanrun.request.prompts_file import Entry, Line, key_of, read_entries

OPTIONS: dict[str, Any] = {
    "negative_prompt": "blurry",
    "seed": 3,
    "num_steps": 20,
    "boundary": 0.5,
    "solver": "euler",
    "fps": 24.0,
}
"""Of the command line."""


SHARED = Line(prompt="", **OPTIONS)


def write(folder: Path, content: bytes | str, name: str = "p.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(
    folder: Path, content: bytes | str, name: str = "p.txt"
) -> tuple[Sequence[Entry], Mapping[int, WanError]]:
    """The entries of a file, and what is wrong with the other lines."""
    return read_entries(write(folder, content, name), SHARED)


def test_text(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfa fox\r\n\n  \t\r\n  two  words \n" + "猫 \x0b\u2028 x".encode() + b"\n{a}"
    requests, failures = read(tmp_path, content)
    assert failures == {}
    assert [request.line.prompt for request in requests] == ["a fox", "two  words", "猫 \x0b\u2028 x", "{a}"]
    assert [request.where.rpartition(":")[2] for request in requests] == ["1", "4", "5", "6"]
    assert [(request.index, request.total) for request in requests] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    first = requests[0].line
    assert (first.negative_prompt, first.seed, first.num_steps, first.solver) == ("blurry", 3, 20, "euler")
    assert (first.guidance_scale, first.fps, first.output) == (None, 24.0, None)
    assert (first.guidance_scale_2, first.boundary) == (None, 0.5)


def test_json_lines(tmp_path: Path) -> None:
    line: dict[str, Any] = {
        "prompt": "a fox",
        "negative_prompt": "",
        "seed": 2**64 - 1,
        "guidance_scale": 3,
        "guidance_scale_2": 2,
        "boundary": 1,
        "flow_shift": 5.5,
        "solver": "unipc",
        "fps": 12,
        "output": "fox/猫.gif",
        "image": "a b/猫.png",
        "last_image": "\u202flast.png",
        "video": "frames",
        "mask": "mask.mp4",
        "pose_video": "pose",
        "face_video": "face",
        "background_video": "background",
        "mask_video": "masks",
        "mode": "replace",
        "conditioning_scale": 2,
        "segment_overlap": 5,
    }
    references = {"reference_image": ["one.png", "two.png"]}
    content = json.dumps({**line, **references, "steps": 4}) + "\n\n" + '{"prompt": ""}\r\n'
    for name in ("p.jsonl", "p.JSONL", "p.txt", "p"):  # the first line tells, where the name does not
        (full, bare), failures = read(tmp_path, content, name)
        assert failures == {}
        where = str(tmp_path / name)
        expected = Line(**line, reference_image=("one.png", "two.png"), num_steps=4)
        assert full == Entry(expected, f"{where}:1", 1, 2)
        names = ("guidance_scale", "guidance_scale_2", "boundary", "fps", "conditioning_scale")
        assert all(type(getattr(full.line, name)) is float for name in names)
        assert bare == Entry(Line(prompt="", **OPTIONS), f"{where}:3", 2, 2)
    _, failures = read(tmp_path, 'a fox\n{"prompt": "b"}\n', "p.jsonl")  # the name tells
    assert list(failures) == [1]


def test_several_seeds_are_several_entries(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "seeds": [4, 2]}',
        '{"prompt": "b"}',
        '{"prompt": "c", "seed": 1, "seeds": [2]}',
    ]
    entries, failures = read(tmp_path, "\n".join(lines), "p.jsonl")
    assert [(one.index, one.total, one.line.prompt, one.line.seed) for one in entries] == [
        (1, 4, "a", 4),
        (2, 4, "a", 2),
        (3, 4, "b", 3),
    ]
    assert len({one.where for one in entries}) == 3
    assert list(failures) == [4]
    shared = Line(prompt="", seeds=(7, 8))
    entries, _ = read_entries(write(tmp_path, '{"prompt": "a"}\n{"prompt": "b", "seed": 1}'), shared)
    assert [one.line.seed for one in entries] == [7, 8, 1]


def test_media_of_the_command_line_and_of_lines(tmp_path: Path) -> None:
    """What a line leaves out is the command line's, each for itself."""
    shared = {**OPTIONS, "image": "shared.png", "reference_image": ("r.png",), "mode": "animate"}
    lines: list[dict[str, Any]] = [
        {},
        {"image": "own.png", "pose_video": "p"},
        {"reference_image": "s.png"},
        {"reference_image": []},
        {"reference_image": ["s.png", "t.png"], "mode": "replace"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", **line}) + "\n" for line in lines))
    requests, failures = read_entries(path, Line(prompt="", **shared))
    assert failures == {}
    found = [
        (line.image, line.pose_video, line.reference_image, line.mode)
        for line in (request.line for request in requests)
    ]
    assert found == [
        ("shared.png", None, ("r.png",), "animate"),
        ("own.png", "p", ("r.png",), "animate"),
        ("shared.png", None, "s.png", "animate"),
        ("shared.png", None, (), "animate"),
        ("shared.png", None, ("s.png", "t.png"), "replace"),
    ]
    assert list(requests[1].media_files) == [
        ("image", Path("own.png")),
        ("pose_video", Path("p")),
        ("reference_image", Path("r.png")),
    ]


BAD: list[tuple[str, ErrorCode, tuple[str, ...]]] = [
    ("a fox", "unreadable", ("Expecting value", "'a fox'")),
    ('{"prompt": "a"', "unreadable", ("delimiter",)),
    ('{"prompt": "a"} {"prompt": "b"}', "unreadable", ("Extra data",)),
    ("[" * 100_000, "unreadable", ("'[[",)),
    ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "unreadable", ("Exceeds the limit",)),
    ("null", "wrong_type", ("'null'",)),
    ('["prompt", "a"]', "wrong_type", ("'[\"prompt",)),
    ("[]", "wrong_type", ("'[]'",)),
    ("{}", "missing_parameter", ('"prompt": "..."',)),
    ('{"prompt": null}', "wrong_type", ("prompt", "string", "null")),
    ('{"prompt": {"a": [1]}}', "wrong_type", ("prompt", "string", "object")),
    ('{"prompt": "a", "seed": true}', "wrong_type", ("seed", "integer", "true")),
    ('{"prompt": "a", "steps": NaN}', "wrong_type", ("steps", "integer", "NaN")),
    ('{"prompt": "a", "fps": "24"}', "wrong_type", ("fps", "number", '"24"')),
    ('{"prompt": "a", "guidance_scale": [5]}', "wrong_type", ("guidance_scale", "number", "[5]")),
    ('{"prompt": "a", "output": ""}', "invalid_value", ("output", '""')),
    ('{"prompt": "a", "output": "a\\u0000.mp4"}', "invalid_value", ("output", '"a\\u0000.mp4"')),
    ('{"prompt": "a", "output": "\\ud800.mp4"}', "invalid_value", ("output", '"\\ud800.mp4"')),
    ('{"prompt": "a", "prompt": "b"}', "conflict", ("prompt",)),
    ('{"prompt": "a", "stepz": 4}', "unknown_parameter", ("'stepz'", "use steps")),
    ('{"prompt": "a", "steps": 4, "num_steps": 4}', "conflict", ("steps",)),
    ('{"prompt": "a", "Seed": 4}', "unknown_parameter", ("'Seed'", "--help", "seed")),
    ('{"prompt": "a", "size": "64"}', "out_of_range", ("size", "832x480", '"64"')),
    ('{"prompt": "a", "loop": "while"}', "invalid_value", ("loop", "step or scan", '"while"')),
    (
        '{"prompt": "a", "reference_image": ["a.png", 3]}',
        "wrong_type",
        ("reference_image", "list of strings", '["a.png", 3]'),
    ),
    (
        '{"prompt": "a", "reference-image": "a"}',
        "unknown_parameter",
        ("'reference-image'", "use reference_image"),
    ),
    (
        '{"prompt": "a", "height": 480, "generator": 0}',
        "unknown_parameter",
        ("'height'", "size", "WIDTHxHEIGHT", "'generator'", "seed"),
    ),
    ('{"prompt": "a", "fps": "x", "tint": 1}', "invalid_value", ("fps", '"x"', "'tint'")),
]
"""Values of every wrong kind: test_reading.py. Here is what a line may be, and how JSON is spelled."""


def test_every_bad_line_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    lines = ['{"prompt": "first"}', *(line for line, _, _ in BAD), '{"prompt": "last"}']
    requests, failures = read(tmp_path, "\n".join(lines), "p.jsonl")
    found = [(request.line.prompt, request.index) for request in requests]
    assert found == [("first", 1), ("last", len(lines))]
    assert sorted(failures) == list(range(2, len(lines)))
    for index, (_, code, values) in enumerate(BAD, 2):
        message, place = failures[index].spelled(key_of), f"{tmp_path / 'p.jsonl'}:{index}: "
        check_refusal(failures[index], code, what=place)
        assert all(value in message for value in values), message
        assert "\n" not in message and len(message) < len(place) + 300


def test_a_line_that_is_no_utf8(tmp_path: Path) -> None:
    requests, failures = read(tmp_path, b"a fox\n caf\xe9\n\nlast\n")
    assert [request.line.prompt for request in requests] == ["a fox", "last"]
    assert failures.keys() == {2}
    check_refusal(failures[2], "unreadable", what=":2: ", found="0xe9", remedy="UTF-8")


@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf", "a fox\n".encode("utf-16")])
def test_a_file_without_prompts(tmp_path: Path, content: bytes) -> None:
    encoded = len(content) > 10
    code: ErrorCode = "unreadable" if encoded else "missing_parameter"
    with refuses(code, what="UTF-16" if encoded else "p.txt", remedy="UTF-8" if encoded else "prompt"):
        read(tmp_path, content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "missing", "No such file")):
        with refuses("unreadable", what=path, found=reason):
            read_entries(path, SHARED)
    with refuses("too_large", what="/dev/zero", expected="64 MiB"):
        read_entries(Path("/dev/zero"), SHARED)


def test_a_pipe_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"a\nb\n",))
    writer.start()
    requests, _ = read_entries(tmp_path / "pipe", SHARED)
    writer.join()
    assert [request.line.prompt for request in requests] == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "c"}\nx')))
    requests, failures = read_entries(Path("-"), SHARED)
    assert [(request.line.prompt, request.where) for request in requests] == [("c", "standard input:1")]
    check_refusal(failures[2], "unreadable", what="standard input:2: ", found="'x'")
    monkeypatch.setattr(sys, "stdin", None)  # closed, as with <&-
    with refuses("missing_parameter", what="standard input"):
        read_entries(Path("-"), SHARED)


NAMES = ["prompt", "seed", "steps", "fps", "output", "solver", "size", "image", "reference_image", "other"]
keys = st.sampled_from(NAMES) | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=4,
)
lines = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.dictionaries(keys, values, max_size=4).map(lambda line: json.dumps({"prompt": "a", **line}).encode()),
)


@pytest.mark.slow
@given(st.lists(lines, max_size=6), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_whatever_is_in_a_file(tmp_path: Path, content: list[bytes], as_json: bool) -> None:
    data = b"\n".join(content)
    path = tmp_path / ("p.jsonl" if as_json else "p.txt")
    path.write_bytes(data)
    try:
        requests, failures = read_entries(path, SHARED)
    except UsageError:
        assert data[:2] in (b"\xff\xfe", b"\xfe\xff") or not data.removeprefix(b"\xef\xbb\xbf").strip()
        return
    total = sum(1 for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
    assert sorted([*failures, *(request.index for request in requests)]) == list(range(1, total + 1))
    assert all(request.total == total and type(request.line.prompt) is str for request in requests)
    lines = [request.line for request in requests]
    assert all(type(line.seed) is int and type(line.fps) is float for line in lines)
    files = [path for request in requests for _, path in request.media_files]
    assert all(str(path) and os.fsencode(path) for path in files)
