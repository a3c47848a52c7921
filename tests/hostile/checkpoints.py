"""Broken checkpoints: what is done to a good one's folder."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostile.refusal import edit_json
from hostile.tensor_files import join, split, tensor_names
from hostile.things import TEXTS, THINGS, VALUES

WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}
SECOND = "transformer_2/diffusion_pytorch_model.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"transformer/diffusion_pytorch_model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
SHARD = SHARDS[1]
TOKENIZER = "tokenizer/tokenizer.json"
JSON_FILES = (
    *("model_index.json", "scheduler/scheduler_config.json", TOKENIZER, "tokenizer/tokenizer_config.json"),
    *("transformer/config.json", "text_encoder/config.json", "vae/config.json"),
)


class Checkpoint:
    """A good checkpoint's files, linked, of which any may be replaced, and the row's random numbers."""

    def __init__(self, good: Path, folder: Path, name: str) -> None:
        shutil.copytree(good, folder, copy_function=os.link)
        self.good, self.folder, self.draw = good, folder, np.random.default_rng(zlib.crc32(name.encode()))

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).write_bytes(data)

    def pick(self, *choices: Any) -> Any:
        return choices[self.draw.integers(len(choices))]


Change = Callable[[Checkpoint], object]


class Row(NamedTuple):
    """One broken checkpoint.

    Attributes:
        name: of the row. What it draws depends on it.
        change: what is done to the good checkpoint.
        code: of the error; several with "|" between them where a row is one of many that are generated.
        values: what the error names.
        base: the good checkpoint: "float32", "float16" or "bfloat16" in single files, "sharded", "experts" of
            Wan 2.2, or "ti2v".
    """

    name: str
    change: Change
    code: str
    values: tuple[object, ...] = ()
    base: str = "float32"


# --- ways to change one -------------------------------------------------------------------------------------


def text(file: str, raw: bytes) -> Change:
    return lambda checkpoint: checkpoint.write(file, raw)


def json_of(file: str, change: Callable[[Any], object]) -> Change:
    return lambda checkpoint: edit_json(checkpoint.folder / file, change)


def fields(file: str, **values: Any) -> Change:
    """Changes fields of a JSON file; the value ... takes one out."""

    def change(data: dict[str, Any]) -> None:
        data.update(values)
        for name in [name for name, value in data.items() if value is ...]:
            del data[name]

    return json_of(file, change)


def index(**entries: Any) -> Change:
    return fields("model_index.json", **entries)


def becomes(name: str, make: Callable[[Path], object] = lambda path: None) -> Change:
    """Something else, or nothing, in a file's or folder's place."""

    def change(checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return change


def all_of(*changes: Change) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        for one in changes:
            one(checkpoint)

    return change


Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and data."""

Tensors = dict[str, Tensor]


def tensors(file: str, edit: Callable[[Tensors, Checkpoint], object]) -> Change:
    """Changes the tensors of a file, or of one drawn for "", and writes a file whose header fits them."""

    def change(checkpoint: Checkpoint) -> None:
        name = file or checkpoint.pick(*WEIGHTS.values())
        header, data = split((checkpoint.folder / name).read_bytes())
        found: Tensors = {}
        for key in tensor_names(header):
            begin, end = header[key]["data_offsets"]
            found[key] = (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])
        edit(found, checkpoint)
        entries, position = {}, 0
        for key, (dtype, shape, values) in found.items():
            offsets = [position, position + len(values)]
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            position += len(values)
        checkpoint.write(name, join(entries, b"".join(values for _, _, values in found.values())))

    return change


# --- indexes of shards --------------------------------------------------------------------------------------

_FIRST, _LAST = Path(SHARDS[0]).name, Path(SHARDS[2]).name
_MIDDLE = Path(SHARD).name
_OUTSIDE: tuple[Any, ...] = (
    *("../vae/diffusion_pytorch_model.safetensors", f"../transformer/{_MIDDLE}", f"./{_MIDDLE}"),
    *("/etc/passwd", "//etc/passwd", "a/b.safetensors", "a\\b.safetensors", "C:\\x.safetensors", "..", "."),
    *("", " ", ".hidden.safetensors", "a\0b.safetensors", "a\nb.safetensors", "\x1b[2J.safetensors"),
    *("\ud800.safetensors", "file:///etc/passwd", "~/x.safetensors", "x.safetensors/", "x" * 5000 + "/y"),
    *(None, 3, 1.5, True, [], ["a.safetensors"], {"file": "a.safetensors"}),
)


def _mapped(value: Any) -> Change:
    """The index says that one tensor, drawn at random, lies in this file."""

    def change(checkpoint: Checkpoint) -> None:
        def edit(data: dict[str, Any]) -> None:
            keys = sorted(data["weight_map"])
            data["weight_map"][keys[checkpoint.draw.integers(len(keys))]] = value

        edit_json(checkpoint.folder / INDEX, edit)

    return change


def _map(edit: Callable[[dict[str, Any]], object]) -> Change:
    return json_of(INDEX, lambda data: edit(data["weight_map"]))


def _twice(checkpoint: Checkpoint) -> None:
    raw = (checkpoint.folder / INDEX).read_text()
    key = sorted(json.loads(raw)["weight_map"])[0]
    checkpoint.write(INDEX, raw.replace('"weight_map": {', f'"weight_map": {{"{key}": "{_FIRST}",').encode())


def _in_two_shards(checkpoint: Checkpoint) -> None:
    header, data = split((checkpoint.folder / SHARD).read_bytes())
    key = tensor_names(header)[0]
    begin, end = header[key]["data_offsets"]
    tensor = (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])
    tensors(SHARDS[2], lambda found, _: found.update({key: tensor}))(checkpoint)


def _swapped(checkpoint: Checkpoint) -> None:
    first, second, aside = (checkpoint.folder / name for name in (SHARDS[0], SHARD, "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _indexes() -> Iterator[Row]:
    for value in _OUTSIDE:
        yield Row(f"a shard {str(value)[:40]!r}", _mapped(value), "untrusted", ("index.json",), "sharded")
    for name, change, code, *values in (
        ("a shard that is not there", _mapped("x.safetensors"), "missing_file", "x.safetensors"),
        ("a shard that is missing", becomes(SHARD), "missing_file", _MIDDLE),
        ("a shard with a very long name", _mapped("x" * 5000), "unreadable"),
        ("the index as a shard", _mapped(Path(INDEX).name), "unreadable", Path(INDEX).name),
        ("the config as a shard", _mapped("config.json"), "unreadable", "config.json"),
        ("a pickle as a shard", _mapped("weights.bin"), "untrusted", "weights.bin"),
        ("a tensor in another shard", _map(lambda d: d.update({min(d): _LAST})), "mismatch"),
        ("two shards swapped", _swapped, "mismatch", "more"),
        ("a tensor twice in the index", _twice, "unreadable"),
        ("a tensor in two shards", _in_two_shards, "mismatch", _MIDDLE, _LAST),
        ("a tensor that is nowhere", _map(lambda d: d.update(other=_FIRST)), "mismatch", "other", _FIRST),
        (
            "a thousand tensors that are nowhere",
            _map(lambda d: d.update({f"o{i}": _FIRST for i in range(1000)})),
            *("mismatch", "o0 ", 995),
        ),
        ("an escape sequence for a tensor", _map(lambda d: d.update({"\x1b]0;x": _FIRST})), "unreadable"),
        ("no tensor of a shard", _map(lambda d: d.pop(sorted(d)[5])), "mismatch"),
        (
            "a shard that is not listed",
            _map(lambda d: [d.pop(key) for key in [key for key in d if d[key] == _MIDDLE]]),
            "mismatch",
        ),
        ("one tensor more in a shard", tensors(SHARD, _one_more), "mismatch", "extra", _MIDDLE),
        ("no weight_map", fields(INDEX, weight_map=...), "unreadable", "weight_map"),
        (
            "a file and an index",
            lambda c: shutil.copy(c.folder / SHARD, c.folder / WEIGHTS["transformer"]),
            *("wrong_kind", "diffusion_pytorch_model.safetensors"),
        ),
    ):
        yield Row(name, change, code, tuple(values), "sharded")
    for value in (None, {}, [], "a", 1, [["a", "b"]], ["a"]):
        yield Row(f"a weight_map {value!r}", fields(INDEX, weight_map=value), "unreadable", (), "sharded")
    for name, raw in {**TEXTS, "two weight_maps": b'{"weight_map": {"a": "b"}, "weight_map": {}}'}.items():
        yield Row(f"an index of {name}", text(INDEX, raw), "unreadable", ("index.json",), "sharded")


# --- what is no file, or no folder --------------------------------------------------------------------------

_PLACES = {
    **dict.fromkeys((*JSON_FILES, WEIGHTS["vae"], "transformer", "scheduler", "tokenizer"), "float32"),
    **dict.fromkeys((SHARD, INDEX), "sharded"),
    **dict.fromkeys(("transformer_2", "transformer_2/config.json", SECOND), "experts"),
}
_WEIGHT_CODES = {
    "a link to nothing": "missing_file",
    "an empty file": "damaged",
    **dict.fromkeys(("a socket", "a terabyte", "a link to itself", "a loop of two links"), "unreadable"),
}


def _code_of(place: str, thing: str) -> str:
    if place.endswith(".safetensors"):
        return _WEIGHT_CODES.get(thing, "wrong_kind")
    absent = {"a link to nothing"}
    if place == "model_index.json":
        absent |= {"a link to itself", "a loop of two links"}
    if place in ("scheduler", "tokenizer"):
        absent |= {"a folder", "a link to its folder"}
    if place in ("transformer", "transformer_2"):
        absent |= THINGS.keys()
    return "missing_file" if thing in absent else "unreadable"


def _places() -> Iterator[Row]:
    for place, base in _PLACES.items():
        named = (place.partition("/")[0],)
        for thing, make in THINGS.items():
            if place.endswith("tokenizer_config.json") and thing == "a link to nothing":
                continue  # it may be absent
            yield Row(f"{place} is {thing}", becomes(place, make), _code_of(place, thing), named, base)
    for place in ("transformer", "transformer_2", "transformer_2/config.json", SECOND):
        named = (place.partition("/")[0],)
        yield Row(f"no {place}", becomes(place), "missing_file", named, "experts")
    for place in (WEIGHTS["vae"], WEIGHTS["text_encoder"], *JSON_FILES[:3], *JSON_FILES[4:]):
        yield Row(f"no {place}", becomes(place), "missing_file", (place.partition("/")[0],))
    for component, suffix in (("vae", ".bin"), ("transformer", ".bin"), ("transformer", ".pth")):
        weights = WEIGHTS[component]
        change = _renamed(weights, str(Path(weights).with_suffix(suffix)))
        yield Row(f"pickled {component}{suffix}", change, "untrusted", (f"model{suffix}",))


def _renamed(old: str, new: str) -> Change:
    return lambda checkpoint: (checkpoint.folder / old).rename(checkpoint.folder / new)


# --- configs ------------------------------------------------------------------------------------------------

_FIELDS: dict[str, dict[str, str]] = {
    "vae/config.json": {
        **dict.fromkeys(("base_dim", "dim_mult", "num_res_blocks", "temperal_downsample"), "unreadable"),
        "latents_mean": "unreadable|mismatch",
        "z_dim": "unsupported",
    },
    "transformer/config.json": {
        **dict.fromkeys(("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers"), "unreadable"),
        **dict.fromkeys(("freq_dim", "rope_max_seq_len", "qk_norm"), "unreadable"),
        **dict.fromkeys(("text_dim", "in_channels", "patch_size"), "unsupported"),
        "_class_name": "wrong_kind",
    },
    "text_encoder/config.json": {
        **dict.fromkeys(("d_kv", "d_ff", "num_layers", "num_heads", "feed_forward_proj"), "unreadable"),
        "relative_attention_max_distance": "unreadable",
        **dict.fromkeys(("vocab_size", "d_model"), "unsupported"),
        "architectures": "wrong_kind",
    },
    "scheduler/scheduler_config.json": {
        "flow_shift": "unreadable|out_of_range",
        "prediction_type": "unreadable|wrong_kind",
        "solver_order": "unreadable",
        "_class_name": "mismatch",
    },
    "model_index.json": {
        "_class_name": "unsupported",
        **dict.fromkeys(("vae", "transformer", "unknown"), "unreadable|unsupported"),
        "boundary_ratio": "wrong_type|conflict",
        "expand_timesteps": "wrong_type",
    },
    TOKENIZER: {"model": "unreadable", "added_tokens": "unreadable"},
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    # What these values of these fields mean is supported, or is the same as leaving the field out.
    "architectures": (None, [], [None]),
    "_class_name": (None,),
    "boundary_ratio": (None,),
    "expand_timesteps": (None,),
    "flow_shift": (None, 1.5),
    "added_tokens": ([], "", {}),
}
_EMPTY = {
    **dict.fromkeys(
        ("transformer/config.json", "text_encoder/config.json", "model_index.json"), "unsupported"
    ),
    "vae/config.json": "mismatch",
    **dict.fromkeys(("scheduler/scheduler_config.json", TOKENIZER), "unreadable"),
}
_CONFIGS: tuple[tuple[str, dict[str, Any], str, tuple[object, ...]], ...] = (
    ("transformer/config.json", {"window": 7}, "unreadable", ("config.json", "window", 7)),
    ("transformer/config.json", {"in_channels": 36}, "unsupported", ("in_channels", 36, 16)),
    ("transformer/config.json", {"out_channels": 48}, "unsupported", ("out_channels", 48, 16)),
    ("transformer/config.json", {"image_dim": 1280}, "unsupported", ("image_dim",)),
    ("transformer/config.json", {"patch_size": [1, 1, 1]}, "unsupported", ("patch_size", [1, 1, 1])),
    (
        "transformer/config.json",
        {"_class_name": "SD3Transformer2DModel"},
        "wrong_kind",
        ("WanTransformer3DModel",),
    ),
    ("vae/config.json", {"patch_size": 4}, "unsupported", ("patch_size", 4)),
    ("vae/config.json", {"base_dim": "wide"}, "unreadable", ("vae/config.json", "base_dim", "'wide'")),
    ("text_encoder/config.json", {"d_model": 64}, "unsupported", ("text_dim", 32, 64)),
    ("text_encoder/config.json", {"vocab_size": 200}, "unsupported", (296, 200)),
    (
        "text_encoder/config.json",
        {"feed_forward_proj": "relu"},
        "unreadable",
        ("text_encoder/config.json", "feed_forward_proj", "'relu'", "'gated-gelu'"),
    ),
    (TOKENIZER, {"model": {"type": "BPE", "vocab": {"a": 1}}}, "unreadable", ("tokenizer.json",)),
    (JSON_FILES[3], {"pad_token": "<nothing>"}, "unreadable", ("<nothing>",)),
    (JSON_FILES[3], {"padding_side": "left"}, "mismatch", ("right", "left")),
    (
        "scheduler/scheduler_config.json",
        {"_class_name": "DPMSolverMultistepScheduler"},
        "mismatch",
        ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"),
    ),
)
_PIPELINES: tuple[tuple[dict[str, Any], str, tuple[object, ...]], ...] = (
    ({"_class_name": "FluxPipeline"}, "unsupported", ("WanPipeline", "FluxPipeline")),
    ({"_class_name": "WanVACEPipeline"}, "unsupported", ("WanTransformer3DModel", "WanVACE")),
    ({"_class_name": ...}, "unsupported", ("WanPipeline",)),
    ({"transformer_2": ["diffusers", "WanTransformer2D"]}, "unsupported", ("WanTransformer2D",)),
    (
        {"transformer_2": ["diffusers", "WanTransformer3DModel"]},
        "conflict",
        ("transformer_2", "boundary_ratio"),
    ),
    ({"boundary_ratio": 0.875}, "conflict", ("0.875", "no transformer_2")),
    ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "unsupported", ("image_encoder",)),
    ({"vae": ["diffusers", "AutoencoderKL"]}, "unsupported", ("diffusers.AutoencoderKL,",)),
    ({"vae": ["somewhere", "AutoencoderKLWan"]}, "unsupported", ("somewhere.AutoencoderKLWan",)),
    ({"vae": [None, None]}, "unsupported", ("vae",)),
    ({"text_encoder": None}, "unsupported", ("text_encoder",)),
    ({"vae": "AutoencoderKLWan"}, "unreadable", ("vae",)),
    ({"scheduler": ["diffusers", "DDIMScheduler"]}, "unsupported", ("DDIMScheduler",)),
    ({"vae_scale": 8}, "unreadable", ("vae_scale",)),
    ({"helper": [None, None]}, "unsupported", ("helper",)),
    ({"helper": ["diffusers", "Helper"]}, "unsupported", ("diffusers.Helper",)),
    ({"boundary_ratio": "0.9"}, "wrong_type", ("boundary_ratio",)),
    ({"expand_timesteps": 1}, "wrong_type", ("expand_timesteps",)),
    ({"expand_timesteps": True}, "unsupported", ("wan2.1-t2v", "expand_timesteps", "wan2.2-ti2v")),
    (
        {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": None, "helper": ["a", "B"]},
        "unsupported",
        ("vae is", "text_encoder is", "helper (a.B)", "wan2.1-t2v"),
    ),
)


def _deep(file: str, name: str) -> Change:
    """A field that cannot change a result, so deep that the manifest could not be written."""

    def change(checkpoint: Checkpoint) -> None:
        raw = json.dumps({**json.loads((checkpoint.folder / file).read_bytes()), name: "@"})
        checkpoint.write(file, raw.replace('"@"', "[" * 900 + "]" * 900).encode())

    return change


def _configs() -> Iterator[Row]:
    for file in JSON_FILES:
        for name, raw in TEXTS.items():
            yield Row(f"{file} of {name}", text(file, raw), "unreadable", (file.partition("/")[0],))
    for file, code in _EMPTY.items():
        yield Row(f"{file} of an empty object", text(file, b"{}"), code)
    draw = np.random.default_rng(20_250_301)
    for file, names in _FIELDS.items():
        for field, codes in names.items():
            for value in VALUES:
                harmless = _HARMLESS.get(field, ())
                if any(value is x or value == x for x in harmless) or draw.random() > 0.2:
                    continue  # one in five of all fields and values
                name = f"{file} with {field} {json.dumps(value)[:24]}"
                yield Row(name, fields(file, **{field: value}), codes)
    for file, values, code, named in _CONFIGS:
        yield Row(f"{file} of {values}", fields(file, **values), code, named)
    for values, code, named in _PIPELINES:
        yield Row(f"a pipeline of {values}", index(**values), code, named)
    for file, field in (("vae/config.json", "dropout"), ("scheduler/scheduler_config.json", "beta_end")):
        yield Row(f"a deep field in {file}", _deep(file, field), "unreadable", (Path(file).name, 32))


_FAR = {"content": "<far>", "id": 10**9}
_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a vocabulary that is an object": lambda d: d["model"].update(vocab={"a": 1}),
    "an empty vocabulary": lambda d: (d["model"].update(vocab=[]), d.update(added_tokens=[])),
    "pieces that are numbers": lambda d: d["model"].update(vocab=[1, 2]),
    "pieces of three": lambda d: d["model"].update(vocab=[["a", 1, 2]]),
    "pieces that are null": lambda d: d["model"].update(vocab=[None]),
    "added tokens that are numbers": lambda d: d.update(added_tokens=[1]),
    "an added token without an id": lambda d: d.update(added_tokens=[{"content": "<pad>"}]),
    "an added token with an odd id": lambda d: d.update(added_tokens=[{"content": "<pad>", "id": "x"}]),
    "an added token with a list for a name": lambda d: d.update(added_tokens=[{"content": [], "id": 0}]),
    "an added token with an infinite id": lambda d: d["added_tokens"].append({**_FAR, "id": float("inf")}),
    "an added token far behind the table": lambda d: d["added_tokens"].append(_FAR),
    "more pieces than embeddings": lambda d: d["model"]["vocab"].extend([f"p{i}", 0.0] for i in range(1000)),
}


def _tokenizers() -> Iterator[Row]:
    for name, edit in _TOKENIZERS.items():
        code = "unsupported" if "far" in name or "more" in name else "unreadable"
        yield Row(name, json_of(TOKENIZER, edit), code, ("tokenizer",))


# --- two experts, and a timestep per token ------------------------------------------------------------------

_BOTH = ("boundary_ratio", "transformer_2")
_WAN = ["diffusers", "WanTransformer3DModel"]
_OF_ONE = {
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
_BOUNDARIES = (-0.1, 1.0001, 875, -1e-300, -1e-9, 1 + 1e-9, "0.875", True, [0.9], *VALUES)


def _experts() -> Iterator[Row]:
    for value in _BOUNDARIES:
        if value is not None and not (type(value) is int and value == 0):
            change = index(boundary_ratio=value)
            yield Row(
                f"a boundary {str(value)[:24]!r}", change, "wrong_type", ("boundary_ratio", 0, 1), "experts"
            )
    for value in (*VALUES, ["diffusers"], ["diffusers", None]):
        code = "conflict" if value is None else "unreadable"
        name = f"transformer_2 {json.dumps(value)[:24]}"
        yield Row(name, index(transformer_2=value), code, ("transformer_2",), "experts")
    for field, value in _OF_ONE.items():
        change = fields("transformer_2/config.json", **{field: value})
        yield Row(f"{field} {value} in one expert", change, "mismatch", (field,), "experts")
    for name, change, code, *values in (
        ("a boundary and no entry", index(transformer_2=...), "conflict", *_BOTH, 0.875),
        ("a boundary and an entry of null", index(transformer_2=[None, None]), "conflict", *_BOTH, 0.875),
        ("experts and no boundary", index(boundary_ratio=...), "conflict", *_BOTH),
        ("experts and a boundary of null", index(boundary_ratio=None), "conflict", *_BOTH),
        (
            "an expert that is not listed",
            index(transformer_2=..., boundary_ratio=...),
            *("mismatch", "transformer_2", "model_index.json"),
        ),
        (
            "a VAE as an expert",
            index(transformer_2=["diffusers", "AutoencoderKLWan"]),
            "unsupported",
            "transformer_2",
        ),
        (
            "the low-noise expert alone",
            all_of(becomes("transformer"), index(transformer=[None, None])),
            *("unsupported", "transformer is", "wan2.2-t2v"),
        ),
        (
            "one file beside two experts",
            _renamed(SECOND, Path(SECOND).name),
            *("missing_file", "/transformer_2 "),
        ),
        (
            "experts of two configs",
            fields("transformer_2/config.json", eps=1e-5, rope_max_seq_len=512),
            *("mismatch", "eps 1e-06", "rope_max_seq_len 1024", "eps 1e-05", "rope_max_seq_len 512"),
        ),
        (
            "experts of two shapes",
            tensors(SECOND, _narrower),
            "mismatch",
            "transformer_2: ",
            "proj_out.bias",
            "[60]",
            "[64]",
        ),
        (
            "an expert without a tensor",
            tensors(SECOND, lambda found, _: found.pop("blocks.1.attn1.to_k.weight")),
            *("mismatch", "transformer_2: ", "blocks/attn1/to_k/weight", "1"),
        ),
        ("an expert that is not finite", tensors(SECOND, _nan), "not_finite", "transformer_2: proj_out.bias"),
        (
            "a timestep per token with experts",
            index(expand_timesteps=True),
            "unsupported",
            "wan2.2-t2v",
            "expand_timesteps",
        ),
        (
            "experts with the VAE of 2.2",
            fields("vae/config.json", patch_size=2, z_dim=48),
            *("unsupported", "vae patch_size", "out_channels", 48),
        ),
    ):
        yield Row(name, change, code, tuple(values), "experts")
    for base, variant, other in (("float32", "wan2.1-t2v", "ti2v"), ("ti2v", "wan2.2-ti2v", "float32")):
        named = (f"{variant}: vae patch_size", "vae z_dim")
        yield Row(f"{variant} with the VAE of {other}", _vae_of(other), "unsupported", named, base)
    for value, code, *values in (
        (..., "unsupported", "wan2.2-ti2v", "expand_timesteps", False),
        ("yes", "wrong_type", "expand_timesteps", "'yes'"),
    ):
        yield Row(f"TI2V with {value!r}", index(expand_timesteps=value), code, tuple(values), "ti2v")


def _vae_of(other: str) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        shutil.rmtree(checkpoint.folder / "vae")
        shutil.copytree(checkpoint.good.with_name(other) / "vae", checkpoint.folder / "vae")

    return change


def _narrower(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, (size,), values = found["proj_out.bias"]
    found["proj_out.bias"] = dtype, (size - 4,), values[:-16]


def _nan(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, shape, values = found["proj_out.bias"]
    found["proj_out.bias"] = dtype, shape, b"\xff" * len(values)


# --- tensors ------------------------------------------------------------------------------------------------


def _some(found: Tensors, checkpoint: Checkpoint, rank: int = 1) -> str:
    """A tensor of at least this rank, whose first sizes differ; a vector may have axes of one."""
    fitting = [key for key, (_, shape, _) in found.items() if len(shape) >= rank]
    if rank > 1:
        fitting = [key for key in fitting if 1 != found[key][1][1] != found[key][1][0]]
    return str(checkpoint.pick(*fitting))


def _one_more(found: Tensors, checkpoint: Checkpoint) -> None:
    found["extra"] = ("F32", (2,), checkpoint.draw.bytes(8))


def _stored_as(dtype: str, item_bytes: int) -> Change:
    """The same number of values in another dtype."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        _, shape, values = found[key]
        found[key] = (dtype, shape, checkpoint.draw.bytes(len(values) // 4 * item_bytes))

    return tensors("", edit)


def _reshaped(reshape: Callable[[tuple[int, ...]], tuple[int, ...]], rank: int = 1) -> Change:
    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint, rank)
        dtype, shape, values = found[key]
        found[key] = (dtype, reshape(shape), values)

    return tensors("", edit)


def _becomes_tensor(shape: tuple[int, ...], nbytes: int = 0) -> Change:
    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        found[_some(found, checkpoint)] = ("F32", shape, checkpoint.draw.bytes(nbytes))

    return tensors("", edit)


def _half_as_wide(found: Tensors, checkpoint: Checkpoint) -> None:
    key = _some(found, checkpoint, 2)
    dtype, shape, values = found[key]
    found[key] = (dtype, (1, *shape[1:]), values[: len(values) // shape[0]])


def _swap_names(found: Tensors, checkpoint: Checkpoint) -> None:
    first = _some(found, checkpoint)
    second = checkpoint.pick(*(key for key in found if found[key][1] != found[first][1]))
    found[first], found[second] = found[second], found[first]


def _copied(name: Callable[[str], str], keep: bool = False) -> Change:
    """A tensor under another name, besides its own or instead."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        found[name(key)] = found[key] if keep else found.pop(key)

    return tensors("", edit)


def _eight_bit_nan(dtype: str) -> Change:
    """Values of one byte, of which one is not a number; without it they are weights as any."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        _, shape, _ = found[key]
        found[key] = (dtype, shape, b"\x01" * (int(np.prod(shape)) - 1) + b"\x7f")

    return tensors("", edit)


def _layer(number: str) -> Change:
    name = f"blocks.{number}.norm2.bias"
    return tensors(
        WEIGHTS["transformer"], lambda found, _: found.update({name: found["blocks.2.norm2.bias"]})
    )


def _two_embeddings(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, shape, values = found["shared.weight"]
    found["encoder.embed_tokens.weight"] = dtype, shape, values[::-1]


def _large(found: Tensors, checkpoint: Checkpoint) -> None:
    """A value of float32 that is infinite in bfloat16."""
    dtype, shape, values = found["patch_embedding.weight"]
    found["patch_embedding.weight"] = dtype, shape, values[:-4] + b"\xff\xff\x7f\x7f"


_PLAIN = "BF16 or F16 or F32"
_OTHER_DTYPES = (
    *(("BOOL", 1), ("U8", 1), ("F8_E8M0", 1), ("U16", 2), ("I16", 2), ("U32", 4), ("I32", 4), ("U64", 8)),
    *(("I64", 8), ("F64", 8)),
)
# Signalling and quiet NaN with payloads, and both infinities.
_NOT_FINITE = {
    "float32": ("F32", (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF)),
    "float16": ("F16", (0x7C00, 0xFC00, 0x7C01, 0x7E55, 0xFFFF)),
    "bfloat16": ("BF16", (0x7F80, 0xFF80, 0x7F81, 0x7FC5, 0xFFFF)),
}


def _bits_in(component: str, last: bool, *bits: int) -> Change:
    """One value of these bits, the first or the last of a tensor drawn at random."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        dtype, shape, values = found[key]
        size = len(values) // int(np.prod(shape))
        value = int(checkpoint.pick(*bits)).to_bytes(size, "little")
        found[key] = (dtype, shape, values[:-size] + value if last else value + values[size:])

    return tensors(WEIGHTS[component], edit)


def _several(checkpoint: Checkpoint) -> None:
    """A problem in each component, and three in the transformer."""

    def transformer(found: Tensors, _: Checkpoint) -> None:
        del found["blocks.1.attn1.to_k.weight"]
        found["blocks.9.attn1.to_k.weight"] = found["blocks.0.attn1.to_k.weight"]
        dtype, (rows, columns), values = found["blocks.0.ffn.net.2.weight"]
        found["blocks.0.ffn.net.2.weight"] = dtype, (rows, columns - 1), values[: -4 * rows]

    tensors(WEIGHTS["transformer"], transformer)(checkpoint)
    tensors(WEIGHTS["vae"], lambda found, _: found.pop("decoder.conv_out.bias"))(checkpoint)
    tensors(WEIGHTS["text_encoder"], _one_more)(checkpoint)


def _tensors() -> Iterator[Row]:
    for dtype, item_bytes in _OTHER_DTYPES:
        yield Row(f"dtype {dtype}", _stored_as(dtype, item_bytes), "wrong_kind", (_PLAIN, dtype))
    yield Row("dtype I8", _stored_as("I8", 1), "unknown_name", ("integers",))
    for dtype in ("F8_E4M3", "F8_E5M2"):
        yield Row(f"{dtype} that is not finite", _eight_bit_nan(dtype), "not_finite")
    sizes: dict[str, Change] = {
        "swapped sizes": _reshaped(lambda s: (s[1], s[0], *s[2:]), rank=2),
        "a flat shape": _reshaped(lambda s: (int(np.prod(s)),), rank=2),
        "one more axis": _reshaped(lambda s: (*s, 1, 1, 1)),
        "32 axes": _reshaped(lambda s: (*s, *[1] * (32 - len(s)))),
        "half as wide": tensors("", _half_as_wide),
        "a scalar": _becomes_tensor((), 4),
        "no values": _becomes_tensor((0,)),
        "no values and a huge axis": _becomes_tensor((0, 2**62)),
        "no values and huge axes": _becomes_tensor((2**62, 2**62, 0)),
        "a missing tensor": tensors("", lambda found, c: found.pop(_some(found, c))),
        "one tensor alone": tensors("", lambda found, _: [found.pop(key) for key in sorted(found)[1:]]),
        "names of two tensors swapped": tensors("", _swap_names),
        "a renamed tensor": _copied(lambda key: key + "_"),
        "a name in capitals": _copied(str.upper),
        "a name with a path": _copied(lambda key: f"../../{key}"),
    }
    for name, change in sizes.items():
        yield Row(name, change, "mismatch")
    many = tensors(
        "", lambda found, c: [found.update({f"e{i}": ("F32", (1,), bytes(4))}) for i in range(1000)]
    )
    for name, change, code, *values in (
        ("no tensors", tensors("", lambda found, _: found.clear()), "unreadable"),
        ("one tensor more", tensors("", _one_more), "mismatch", "extra"),
        ("a thousand tensors more", many, "mismatch", "e0", 980),
        ("a copy under another name", _copied(lambda key: f"copy.{key}", keep=True), "mismatch", "copy."),
        ("a layer too many", _layer("3"), "mismatch", "blocks.3.norm2.bias"),
        ("a layer of 900 digits", _layer("9" * 900), "mismatch", "blocks.99"),
        ("the same layer twice", _layer("02"), "mismatch", "blocks.02.norm2.bias"),
        (
            "two values of the tied embedding",
            tensors(WEIGHTS["text_encoder"], _two_embeddings),
            *("mismatch", "shared.weight", "encoder.embed_tokens.weight"),
        ),
        (
            "a problem in each component",
            _several,
            *("mismatch", "blocks/attn1/to_k/weight", "blocks.9.attn1.to_k.weight", "[40, 55]", "[40, 56]"),
            *("blocks/ffn/down/weight", "decoder/conv_out/bias", "extra"),
        ),
        (
            "finite, but not in bfloat16",
            tensors(WEIGHTS["transformer"], _large),
            "not_finite",
            "transformer",
        ),
    ):
        yield Row(name, change, code, tuple(values))
    for base, (dtype, bits) in _NOT_FINITE.items():
        for component in WEIGHTS:
            for last in (False, True):
                name = f"{dtype} {component} not finite, {'last' if last else 'first'} value"
                yield Row(name, _bits_in(component, last, *bits), "not_finite", (component,), base)


ROWS: tuple[Row, ...] = (*_indexes(), *_places(), *_configs(), *_tokenizers(), *_experts(), *_tensors())
