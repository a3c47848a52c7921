"""Broken artifacts: what is done to a good one's manifest, or to one of its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from helpers.damage import PROFILE, PROGRAMS, executable, flip, own, program
from hostile.things import ENDLESS
from wanrun.artifact.layout import array_folder
from wanrun.artifact.manifest import MANIFEST, read_manifest

Place = Callable[[Path], Path]


class Row(NamedTuple):
    """One broken artifact.

    Attributes:
        name: of the row.
        change: what is done to its folder.
        code: of the error.
        values: that the error names.
        place: of the file that the error names.
        rewritten: whether the file has other bytes, so that the error has both digests or sizes.
        before_weights: whether a run refuses it before it reads weights.
    """

    name: str
    change: Callable[[Path], object]
    code: str
    values: tuple[object, ...] = ()
    place: Place | None = None
    rewritten: bool = False
    before_weights: bool = True


# --- manifests ----------------------------------------------------------------------------------------------

Data = dict[str, Any]


def text(content: bytes) -> Callable[[Path], object]:
    return lambda artifact: (artifact / MANIFEST).write_bytes(content)


def edited(change: Callable[[Data], object]) -> Callable[[Path], object]:
    """Edits the manifest as text, so that its digests are those of the content before."""

    def edit(artifact: Path) -> None:
        data = json.loads((artifact / MANIFEST).read_bytes())
        change(data)
        (artifact / MANIFEST).write_text(json.dumps(data))

    return edit


def _set(data: Data) -> Any:
    (program_set,) = data["program_sets"].values()
    return program_set


def _programs(data: Data) -> Any:
    return _set(data)["programs"][PROFILE]


def _target(data: Data) -> Any:
    return data["targets"]["cpu"]


def _executable(data: Data) -> Any:
    return _target(data)["executables"][PROFILE]["prepare"]


def _first(data: Data) -> Any:
    return data["components"]["vae"]["parameters"]["decoder/conv_out/bias"]


def _move_out(data: Data) -> None:
    parameters = data["components"]["vae"]["parameters"]
    parameters["../../x"] = parameters.pop("decoder/conv_out/bias")


_CONTENTS: dict[str, tuple[bytes, str, tuple[object, ...]]] = {
    "nothing": (b"", "damaged", ()),
    "cut-off JSON": (b'{"format": "wan-art', "unreadable", ()),
    "bytes": (b"\xff\x00\x80", "unreadable", ()),
    "deeply nested lists": (b'{"a": ' + b"[" * 100_000, "unreadable", ()),
    "a list": (b"[1, 2]", "wrong_kind", ("wan-artifact", "JSON")),
    "an empty object": (b"{}", "wrong_kind", ("wan-artifact",)),
    "another format": (b'{"format": "other", "format_version": 1}', "wrong_kind", ("other",)),
    "an old version": (b'{"format": "wan-artifact", "format_version": 1}', "other_release", (1,)),
    "no fields": (b'{"format": "wan-artifact", "format_version": 5}', "damaged", ("build",)),
}

_ZEROS = "sha256:" + "0" * 64
_CONTENT_EDITS: dict[str, Callable[[Data], object]] = {
    "a default": lambda data: data["model"]["defaults"].update(guidance_scale=1.5),
    "a source's file": lambda data: data["source"]["files"].pop("model_index.json"),
    "a checksum": lambda data: _first(data)["crc32c"].__setitem__(0, "00000000"),
    "a dtype": lambda data: _first(data)["layout"].update(dtype="bfloat16"),
    "the padding": lambda data: data["tokenizer"].update(pad_id=1),
    "what a program donates": lambda data: _programs(data)["prepare"].update(donate=[0]),
    "a program's digest": lambda data: _programs(data)["prepare"].update(sha256="0" * 64),
    "a profile's dtype": lambda data: data["profiles"][PROFILE]["options"].update(dtype="bfloat16"),
    "the content's digest": lambda data: data.update(content_digest=_ZEROS),
}
_TARGET_EDITS: dict[str, Callable[[Data], object]] = {
    "a device": lambda data: _target(data)["environment"].update(device_kind="another"),
    "an executable's digest": lambda data: _executable(data).update(sha256="0" * 64),
    "memory": lambda data: _target(data)["statistics"][PROFILE]["prepare"].update(temporary_bytes=1),
    "a target's folder": lambda data: _target(data).update(folder="executables/other"),
    "the manifest's digest": lambda data: data.update(manifest_digest=_ZEROS),
    "no digest": lambda data: data.pop("manifest_digest"),
}
_MALFORMED: dict[str, Callable[[Data], object]] = {
    "no components": lambda data: data.pop("components"),
    "no program sets": lambda data: data.pop("program_sets"),
    "one field more": lambda data: data.update(surprise=1),
    "a set of another platform": lambda data: _set(data).update(platform="tpu"),  # not what its key says
    "other kernels": lambda data: _set(data)["kernels"].update(image_multiple=128),
    "a mesh of none": lambda data: _set(data)["mesh"].update(data=0),
    "programs of no profile": lambda data: _set(data)["programs"].update(other=_programs(data)),
    "a target of no set": lambda data: _target(data).update(program_set="cpu-00000000"),
    "a target of another platform": lambda data: _target(data)["environment"].update(platform="tpu"),
    "executables of no profile": lambda data: _target(data)["executables"].update(other={}),
    "a list of profiles": lambda data: data.update(profiles=[]),
    "another width": lambda data: data["profiles"][PROFILE].update(width=112),  # not what its name says
    "a negative height": lambda data: data["profiles"][PROFILE].update(height=-64),
    "a shape of none": lambda data: _first(data)["layout"].update(shape=[0]),
    "more chunks": lambda data: _first(data)["layout"].update(chunks=2),
    "no checksum": lambda data: _first(data).update(crc32c=[]),
    "no machine": lambda data: _target(data)["environment"].pop("machine"),
    "packages as text": lambda data: _target(data)["environment"].update(packages="jax"),
    "features of features": lambda data: _target(data)["environment"].update(cpu_features=[["avx"]]),
    "no executables": lambda data: _target(data).update(executables=None),
}
_PATHS: dict[str, Callable[[Data], tuple[Data, str]]] = {
    "component": lambda data: (data["components"]["vae"], "folder"),
    "program": lambda data: (_programs(data)["prepare"], "file"),
    "target": lambda data: (_target(data), "folder"),
    "executable": lambda data: (_executable(data), "file"),
    "tokenizer": lambda data: (data["tokenizer"], "file"),
    "golden": lambda data: (data["golden"].setdefault(PROFILE, {"sha256": "0" * 64}), "file"),
}
_OUTSIDE = ("../x", "/etc/passwd", "a/../../x", "a//b", "", "c:x", "a\\b", "a\nb", 7)


def _path(place: Callable[[Data], tuple[Data, str]], name: object) -> Callable[[Data], object]:
    def change(data: Data) -> None:
        record, key = place(data)
        record[key] = name

    return change


def _manifests() -> Iterator[Row]:
    for name, (content, code, values) in _CONTENTS.items():
        yield Row(f"a manifest of {name}", text(content), code, values)
    for name, change in _CONTENT_EDITS.items():
        yield Row(f"edited: {name}", edited(change), "changed", (MANIFEST, "content_digest sha256:"))
    for name, change in _TARGET_EDITS.items():
        yield Row(f"edited target: {name}", edited(change), "changed", (MANIFEST, "manifest_digest"))
    for name, change in _MALFORMED.items():
        yield Row(f"malformed: {name}", edited(change), "damaged", (MANIFEST, "build"))
    for record, place in _PATHS.items():
        for outside in _OUTSIDE:
            code, values = (
                ("untrusted", (repr(outside),)) if isinstance(outside, str) else ("damaged", ("`int`",))
            )
            yield Row(f"a {record} at {outside!r}", edited(_path(place, outside)), code, values)
    yield Row("a parameter outside", edited(_move_out), "untrusted", ("parameter", "../../x"))


MANIFESTS: tuple[Row, ...] = tuple(_manifests())


# --- files --------------------------------------------------------------------------------------------------


def _at(folder: str, place: Place, change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Changes a file below a folder, which is the artifact's own by then, and no link to the good one's."""

    def made(artifact: Path) -> None:
        own(artifact, folder)
        change(place(artifact))

    return made


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def _becomes(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _executable_of(name: str) -> Place:
    return lambda artifact: executable(artifact, name)


def _program_of(name: str) -> Place:
    return lambda artifact: program(artifact, name)


def _tokenizer(artifact: Path) -> Path:
    return artifact / "tokenizer" / "tokenizer.json"


def chunk(artifact: Path, component: str, parameter: str) -> Path:
    """The first file of a parameter's weights."""
    layout = read_manifest(artifact).components[component].parameters[parameter].layout
    return artifact / "weights" / component / array_folder(parameter) / layout.chunk_file(0)


def _chunk_of(component: str, parameter: str) -> Place:
    return lambda artifact: chunk(artifact, component, parameter)


_PARAMETERS = (
    ("text_encoder", "shared"),
    ("transformer", "blocks/ffn/up/weight"),
    ("transformer", "proj_out/bias"),
    ("vae", "decoder/conv_out/bias"),
)
_PLACES: dict[str, Place] = {
    "tokenizer": _tokenizer,
    "programs": _program_of("denoise_step"),
    "executables": _executable_of("denoise_step"),
    "weights": _chunk_of("transformer", "proj_out/bias"),
}
_INSTEAD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    **ENDLESS,
}
_WHY = {
    "missing": "No such file",
    "a folder": "Is a directory",
    **dict.fromkeys(("a pipe", "a device"), "not a file"),
    "a terabyte": "bytes",
}
_BIAS_BYTES = 260
"""Of proj_out/bias in its file, with its checksum: what is expected of a larger file."""


def _files() -> Iterator[Row]:
    for name in PROGRAMS:
        place = _executable_of(name)
        yield Row(f"executable {name} cut", _at("executables", place, _cut), "damaged", (name,), place, True)
    for name in ("decode_video", "prepare"):
        place, values = _executable_of(name), (name, "wanbuild compile")
        change = _at("executables", place, _flip)
        yield Row(f"executable {name} flipped", change, "damaged", values, place, True, False)
    gone = _at("executables", lambda artifact: artifact / "executables", shutil.rmtree)
    yield Row("no folder of executables", gone, "damaged", ("No such file",))
    place = _program_of("decode_video")
    change = _at("programs", place, _flip)
    yield Row("programs: flipped", change, "damaged", ("decode_video", "copy"), place, True, False)
    change = _at("tokenizer", _tokenizer, _flip)
    yield Row("a tokenizer flipped", change, "damaged", ("tokenizer.json", "sha256"), _tokenizer, True)
    for component, parameter in _PARAMETERS:
        change = _at("weights", _chunk_of(component, parameter), _flip)
        values = (component, array_folder(parameter), "crc32c", "copy")
        yield Row(f"{component} {parameter} flipped", change, "damaged", values, before_weights=False)
    for folder, place in _PLACES.items():
        for thing, make in _INSTEAD.items():
            why = _BIAS_BYTES if (folder, thing) == ("weights", "a terabyte") else _WHY[thing]
            early = folder not in ("programs", "weights")
            change = _at(folder, place, _becomes(make))
            yield Row(f"{folder}: {thing}", change, "damaged", (why,), place, False, early)
    for thing, make in ENDLESS.items():
        change = _at("tokenizer", lambda artifact: artifact / MANIFEST, _becomes(make))
        yield Row(f"manifest: {thing}", change, "unreadable", (MANIFEST,))


FILES: tuple[Row, ...] = tuple(_files())
