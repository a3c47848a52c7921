"""Bad folders, indexes and configs, generated: refused like the bad weight files of test_hostile.py."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile import (
    INDEX,
    JSON_FILES,
    SEED,
    SHARD,
    WEIGHTS,
    Case,
    Change,
    Checkpoint,
    assert_refused,
    edit_tensors,
    split,
    tensor_names,
)

# --- indexes ------------------------------------------------------------------------------------------------


def index_bytes(raw: bytes) -> Change:
    return lambda checkpoint: checkpoint.write(INDEX, raw)


def mapped(value: Any) -> Change:
    """The index says that one tensor, drawn at random, lies in this file."""

    def change(checkpoint: Checkpoint) -> None:
        def edit(data: dict[str, Any]) -> None:
            keys = sorted(data["weight_map"])
            data["weight_map"][keys[checkpoint.rng.integers(len(keys))]] = value

        checkpoint.edit_json(INDEX, edit)

    return change


def index_is(edit: Callable[[dict[str, Any]], object]) -> Change:
    return lambda checkpoint: checkpoint.edit_json(INDEX, edit)


def shard_becomes(make: Callable[[Path], object]) -> Change:
    return lambda checkpoint: checkpoint.replace(SHARD, make)


def duplicate_in_weight_map(checkpoint: Checkpoint) -> None:
    raw = checkpoint.read(INDEX).decode()
    key = sorted(json.loads(raw)["weight_map"])[0]
    shard = Path(SHARD).name
    checkpoint.write(INDEX, raw.replace('"weight_map": {', f'"weight_map": {{"{key}": "{shard}",').encode())


def tensor_in_two_shards(checkpoint: Checkpoint) -> None:
    header, data = split(checkpoint.read(SHARD))
    key = tensor_names(header)[0]
    begin, end = header[key]["data_offsets"]
    other = SHARD.replace("00002-of", "00003-of")
    edit_tensors(
        other,
        lambda t, c: t.update({key: (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])}),
    )(checkpoint)


def pickled_shard(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "transformer/weights.bin").write_bytes(pickle.dumps({"a": 1}))
    mapped("weights.bin")(checkpoint)


OUTSIDE = "outside its folder"
INDEXES: dict[str, tuple[Change, str]] = {
    **{
        f"a shard named {name[:40]!r}": (mapped(name), OUTSIDE)
        for name in (
            "../vae/diffusion_pytorch_model.safetensors",
            "../transformer/" + Path(SHARD).name,
            "./" + Path(SHARD).name,
            "/etc/passwd",
            "//etc/passwd",
            "a/b.safetensors",
            "a\\b.safetensors",
            "C:\\x.safetensors",
            "..",
            ".",
            "",
            " ",
            ".hidden.safetensors",
            "a\0b.safetensors",
            "a\nb.safetensors",
            "\x1b[2J.safetensors",
            "\ud800.safetensors",
            "file:///etc/passwd",
            "~/x.safetensors",
            "x.safetensors/",
            "x" * 5000 + "/y",
        )
    },
    **{
        f"a shard that is {value!r}": (mapped(value), OUTSIDE)
        for value in (None, 3, 1.5, True, [], ["a.safetensors"], {"file": "a.safetensors"})
    },
    "a shard that is missing": (mapped("x.safetensors"), "x.safetensors is missing"),
    "a shard with a very long name": (mapped("x" * 5000), "cannot be read: File name too long"),
    "the index as a shard": (mapped(Path(INDEX).name), "not a valid safetensors file"),
    "the config as a shard": (mapped("config.json"), "not a valid safetensors file|cut off"),
    "a pickle as a shard": (pickled_shard, "pickled"),
    "a tensor in another shard": (
        mapped(Path(SHARD).name.replace("2-of", "1-of")),
        "does not fit its shards",
    ),
    "a tensor twice in the index": (duplicate_in_weight_map, "duplicate name"),
    "a tensor in two shards": (tensor_in_two_shards, "is in .* too"),
    "a tensor that is nowhere": (
        index_is(lambda d: d["weight_map"].update(other=Path(SHARD).name)),
        "other is not in",
    ),
    "a thousand tensors that are nowhere": (
        index_is(lambda d: d["weight_map"].update({f"o{i}": Path(SHARD).name for i in range(1000)})),
        "o0 is not in .* and 995 more",
    ),
    "a tensor with an escape sequence": (
        index_is(lambda d: d["weight_map"].update({"\x1b]0;x\x07": Path(SHARD).name})),
        "not printable",
    ),
    "a shard that is not listed": (
        index_is(
            lambda d: d.update(weight_map={k: v for k, v in d["weight_map"].items() if v != Path(SHARD).name})
        ),
        "missing key",
    ),
    "no tensor of a shard": (
        index_is(lambda d: d["weight_map"].pop(sorted(d["weight_map"])[5])),
        "is not in the index",
    ),
    "no weight_map": (index_is(lambda d: d.pop("weight_map")), "has no weight_map"),
    **{
        f"a weight_map that is {value!r}": (
            index_is(lambda d, value=value: d.update(weight_map=value)),
            "has no",
        )
        for value in (None, {}, [], "a", 1, [["a", "b"]])
    },
    **{
        f"an index of {name}": (index_bytes(raw), "index.json (is not|has no|cannot be read)")
        for name, raw in {
            "nothing": b"",
            "no object": b"[]",
            "a string": b'"weight_map"',
            "no JSON": b"weight_map = {}",
            "bytes that are not UTF-8": b'{"weight_map": {"\xff": "a"}}',
            "deeply nested lists": b'{"weight_map":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
            "cut-off JSON": b'{"weight_map": {"a": "b"',
            "two weight_maps": b'{"weight_map": {"a": "b"}, "weight_map": {"a": "b"}}',
            "an HTML page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n",
        }.items()
    },
}


# --- what is not a file -------------------------------------------------------------------------------------


def listening_socket(path: Path) -> None:
    # A socket's path is limited to about 100 bytes, so it is bound by its name in its folder.
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def loop(path: Path) -> None:
    other = path.with_name("other-" + path.name)
    path.symlink_to(other.name)
    other.symlink_to(path.name)


THINGS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": listening_socket,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a loop of two links": loop,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to an empty device": lambda path: path.symlink_to("/dev/null"),
    "a link to its folder": lambda path: path.symlink_to("."),
    "an empty file": lambda path: path.touch(),
    "a file of a terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
}
PLACES: dict[str, str] = {
    **dict.fromkeys(JSON_FILES, "float32"),
    WEIGHTS["vae"]: "float32",
    SHARD: "sharded",
    INDEX: "sharded",
}
FOLDERS = ("transformer", "scheduler", "tokenizer")


def becomes(place: str, make: Callable[[Path], object]) -> Change:
    return lambda checkpoint: checkpoint.replace(place, make)


def place_cases() -> Iterator[Case]:
    for place, base in PLACES.items():
        for thing, make in THINGS.items():
            if place.endswith("tokenizer_config.json") and "link to nothing" in thing:
                continue  # it may be absent
            yield Case(f"{place} is {thing}", becomes(place, make), "", base)
    for folder in FOLDERS:
        for thing, make in THINGS.items():
            yield Case(f"{folder} is {thing}", becomes(folder, make), "")


# --- configs ------------------------------------------------------------------------------------------------

CONTENTS: dict[str, bytes] = {
    "no object": b"[]",
    "a number": b"1",
    "null": b"null",
    "not JSON": b"{_class_name: 1}",
    "not UTF-8": b'{"_class_name": "\xff"}',
    "UTF-16": '{"_class_name": "x"}'.encode("utf-16"),
    "NUL bytes": bytes(100),
    "cut off": b'{"_class_name": "AutoencoderKLWan", ',
    "two objects": b"{}{}",
    "deeply nested lists": b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a name twice": b'{"_class_name": "a", "_class_name": "a"}',
    "an escape sequence as a name": b'{"\\u001b[2J": 1}',
    "an endless name": b'{"' + b"a" * 100_000 + b'": 1}',
    "an integer of 5000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "an empty object": b"{}",
}

VALUES: tuple[Any, ...] = (
    *(-1, 0, 2**31, 10**9, 2**63, 10**400, -(10**400), 1.5, -0.5, 1e308, float("nan"), float("inf")),
    *("x", "x" * 5000, "", "\x1b[2J", None, [], {}, [1, 2], [[]], [None], {"a": 1}, [10**9] * 4, [1] * 5000),
)
FIELDS: dict[str, tuple[str, ...]] = {
    "vae/config.json": (
        "base_dim",
        "dim_mult",
        "num_res_blocks",
        "temperal_downsample",
        "latents_mean",
        "z_dim",
    ),
    "transformer/config.json": (
        *("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers", "text_dim", "in_channels"),
        *("freq_dim", "patch_size", "rope_max_seq_len", "qk_norm", "_class_name"),
    ),
    "text_encoder/config.json": (
        *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "feed_forward_proj"),
        *("relative_attention_max_distance", "architectures"),
    ),
    "scheduler/scheduler_config.json": ("flow_shift", "prediction_type", "solver_order", "_class_name"),
    "model_index.json": (
        "_class_name",
        "vae",
        "transformer",
        "boundary_ratio",
        "expand_timesteps",
        "unknown",
    ),
    "tokenizer/tokenizer.json": ("model", "added_tokens"),
}
HARMLESS: dict[str, tuple[Any, ...]] = {
    # What these values of these fields mean is supported, or is the same as leaving the field out.
    "architectures": (None, [], [None]),
    "_class_name": (None,),
    "vae": (),
    "boundary_ratio": (None,),
    "expand_timesteps": (None,),
    "flow_shift": (None, 1.5),
    "added_tokens": ([], "", {}),
    "relative_attention_max_distance": (),
    "rope_max_seq_len": (),
}


def field_cases() -> Iterator[Case]:
    """One in five of all fields and values, each an error."""
    rng = np.random.default_rng(SEED)
    for file, names in FIELDS.items():
        for name in names:
            for value in VALUES:
                if any(value is x or value == x for x in HARMLESS.get(name, ())) or rng.random() > 0.2:
                    continue
                title = f"{file} with {name} = {json.dumps(value)[:24]}"
                yield Case(title, field(file, name, value), "")


def field(file: str, name: str, value: Any) -> Change:
    return lambda checkpoint: checkpoint.edit_json(file, lambda data: data.update({name: value}))


def expert_cases() -> Iterator[Case]:
    """The second expert's files and folder, every boundary, and fields that only one of the experts has."""
    for place in ("transformer_2", "transformer_2/config.json", SECOND_WEIGHTS):
        for thing, make in THINGS.items():
            yield Case(f"{place} is {thing}", becomes(place, make), "transformer_2", "experts")
    for value in (*VALUES, True, -1e-9, 1 + 1e-9, "0.875"):
        if type(value) is int and value == 0:
            continue  # a boundary that is never crossed
        title = f"experts with boundary_ratio = {json.dumps(value)[:24]}"
        says = (
            "contradict each other" if value is None else "boundary_ratio in .* expected a number from 0 to 1"
        )
        yield Case(title, field("model_index.json", "boundary_ratio", value), says, "experts")
    for value in (*VALUES, ["diffusers"], ["diffusers", "AutoencoderKLWan"], ["diffusers", None]):
        title = f"experts with transformer_2 = {json.dumps(value)[:24]}"
        yield Case(title, field("model_index.json", "transformer_2", value), "transformer_2", "experts")
    for name, value in SECOND_CONFIG.items():
        title = f"experts with {name} = {json.dumps(value)} in one"
        yield Case(title, field("transformer_2/config.json", name, value), name, "experts")


SECOND_WEIGHTS = "transformer_2/diffusion_pytorch_model.safetensors"
SECOND_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "ffn_dim": 57,
    "num_layers": 2,
    "text_dim": 16,
    "in_channels": 36,
    "out_channels": 48,
    "freq_dim": 256,
    "eps": 1e-5,
    "patch_size": [1, 1, 4],
    "rope_max_seq_len": 512,
    "pos_embed_seq_len": 514,
}


def nested(file: str, name: str) -> Change:
    """A field that cannot change a result, so deep that the manifest could not be written."""

    def change(checkpoint: Checkpoint) -> None:
        raw = json.dumps({**json.loads(checkpoint.read(file)), name: "@"})
        checkpoint.write(file, raw.replace('"@"', "[" * 900 + "]" * 900).encode())

    return change


TOKENIZER = "tokenizer/tokenizer.json"
TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a vocabulary that is an object": lambda d: d["model"].update(vocab={"a": 1}),
    "an empty vocabulary": lambda d: (d["model"].update(vocab=[]), d.update(added_tokens=[])),
    "pieces that are numbers": lambda d: d["model"].update(vocab=[1, 2]),
    "pieces of three": lambda d: d["model"].update(vocab=[["a", 1, 2]]),
    "pieces that are null": lambda d: d["model"].update(vocab=[None]),
    "added tokens that are numbers": lambda d: d.update(added_tokens=[1]),
    "an added token without an id": lambda d: d.update(added_tokens=[{"content": "<pad>"}]),
    "an added token with an odd id": lambda d: d.update(added_tokens=[{"content": "<pad>", "id": "x"}]),
    "an added token with a list for a name": lambda d: d.update(added_tokens=[{"content": [], "id": 0}]),
    "an added token far behind the table": lambda d: d["added_tokens"].append(
        {"content": "<far>", "id": 10**9}
    ),
    "an added token with an infinite id": lambda d: d["added_tokens"].append(
        {"content": "<inf>", "id": float("inf")}
    ),
    "more pieces than embeddings": lambda d: d["model"]["vocab"].extend([f"p{i}", 0.0] for i in range(1000)),
}


def all_cases() -> list[Case]:
    cases = [Case(f"index: {name}", change, says, "sharded") for name, (change, says) in INDEXES.items()]
    cases += place_cases()
    cases += [
        Case(f"{file} of {name}", lambda c, file=file, raw=raw: c.write(file, raw))
        for file in JSON_FILES
        for name, raw in CONTENTS.items()
        if (file, name) != ("tokenizer/tokenizer_config.json", "an empty object")
    ]
    cases += field_cases()
    cases += expert_cases()
    cases += [
        Case(f"tokenizer: {name}", lambda c, edit=edit: c.edit_json(TOKENIZER, edit), "tokenizer")
        for name, edit in TOKENIZERS.items()
    ]
    cases += [
        Case(f"a deep field in {file}", nested(file, name), "nested too deep")
        for file, name in (("vae/config.json", "dropout"), ("scheduler/scheduler_config.json", "beta_end"))
    ]
    return cases


CASES = all_cases()


def test_no_two_are_the_same() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 400


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_folder_is_refused(
    case: Case, good_checkpoints: dict[str, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, good_checkpoints, place, capsys)
