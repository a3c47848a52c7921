"""Imports go one way, between packages and within each: ``PACKAGES`` says which."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from helpers.rules import REPOSITORY, parsed


class Package(NamedTuple):
    """What one package may import.

    Attributes:
        others: the packages that it may import, types too, and inside functions.
        layers: its own packages and modules from the bottom up. Those on one line do not use one another.
    """

    others: str
    layers: tuple[str, ...]


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "runtime/wanrun": Package(
            "",
            (
                "codes undo units",
                "errors",
                "temporary timing",
                "files terminal",
                "user_cache",
                "machine",
                "rows",
                "artifact",
                "cluster trust",
                "opened",
                "executables",
                "weights",
                "text media denoising",
                "request",
                "generation",
                "job",
                "claims",
                "intact replay",
                "attest",
                "__main__",
            ),
        ),
        "runtime/wanfleet": Package("wanrun wanhub", ("shard uploads", "rows", "ray")),
        "runtime/wanhub": Package(
            "wanrun",
            (
                "address marker",
                "pins signature url_reader",
                "origin",
                "remote_files",
                "copy",
                "opening",
                "loading",
            ),
        ),
        "runtime/wanserve": Package(
            "wanrun wanhub wanreport",
            (
                "codes environments field_names live_files log loras process settings video",
                "refusal",
                "held room route sizes",
                "catalog folders forms keys messages metrics progress protocol publisher",
                "database dispatcher field_values live_jobs live_worker pipelines request_media resolved",
                "bodies builds estimate fields retention",
                "shown worker",
                "board openapi",
                "queue",
                "device intake",
                "changes",
                "guard live_routes routes server_routes",
                "service",
            ),
        ),
        "runtime/wancli": Package(
            "wanrun wanhub wanreport wanfleet wanserve",
            (
                "aliases early error_line streams",
                "parent",
                "console",
                "jobs",
                "command",
                "click_options listing",
                "run serve",
                "__main__",
            ),
        ),
        "runtime/wanreport": Package(
            "wanrun",
            (
                "report",
                "pictures waterfall",
                "tables",
                "page",
                "run_report",
            ),
        ),
        "build/wanbuild": Package(
            "wanrun wanhub wanreport wancli",
            (
                "build_command config progress_line published",
                "staging targets",
                "convert_options",
                "build_options models",
                "mapping variants",
                "components",
                "source",
                "hub lora toy programs",
                "recipe conversion",
                "adapters check plan share",
                "build calibrate",
                "again",
                "cli",
                "__main__",
            ),
        ),
    }
)
"""By folder. A new package is an entry."""


def imported(file: Path, top: str) -> Iterator[str]:
    """The packages and modules of ``top`` that a file imports, at its top or inside a function."""
    for node in ast.walk(parsed(file)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == top and rest:
                yield rest.partition(".")[0]


def places(folder: str) -> dict[str, int]:
    """The layer of every name."""
    return {name: layer for layer, names in enumerate(PACKAGES[folder].layers) for name in names.split()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", PACKAGES)
def test_imports_go_one_way(folder: str) -> None:
    root, layer = REPOSITORY / folder, places(folder)
    wrong = []
    for file in sorted(root.rglob("*.py")):
        own = file.relative_to(root).parts[0].removesuffix(".py")
        if own == "__init__":  # the names that users import
            continue
        for other in imported(file, root.name):
            if other in layer and other != own and layer[other] >= layer[own]:
                wrong.append(f"{file.relative_to(root)} imports {other}")
    assert wrong == [], wrong


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_package_and_module_has_a_layer(folder: str) -> None:
    root = REPOSITORY / folder
    packages = {path.name for path in root.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages | {path.stem for path in root.glob("*.py")} - {"__init__"} == places(folder).keys()


@pytest.fixture(scope="module")
def modules() -> Mapping[str, set[str]]:
    """What each module of all packages imports of them, by dotted names.

    ``wanrun.__init__`` stands for what ``wanrun`` exports to others; its own modules take only the version.
    """
    files = {}
    for folder in PACKAGES:
        root = REPOSITORY / folder
        for file in root.rglob("*.py"):
            files[".".join(file.relative_to(root.parent).with_suffix("").parts)] = file
    return {
        name: set(modules_imported(file, files.keys())) - {f"{package(name)}.__init__"}
        for name, file in files.items()
    }


def modules_imported(file: Path, known: Collection[str]) -> Iterator[str]:
    """Those of the known modules that a file imports, at its top or inside a function."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = {f"{node.module}.{alias.name}", f"{node.module}.{alias.name}.__init__"} & known
                yield from inner or {node.module, f"{node.module}.__init__"} & known
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from {alias.name, f"{alias.name}.__init__"} & known


def package(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_has_an_entry() -> None:
    folders = {
        file.parent for top in ("build", "runtime") for file in (REPOSITORY / top).glob("*/__init__.py")
    }
    assert {folder.relative_to(REPOSITORY).as_posix() for folder in folders} == PACKAGES.keys()


def test_packages_import_along_the_arrows(modules: Mapping[str, set[str]]) -> None:
    may = {(Path(folder).name, other) for folder, row in PACKAGES.items() for other in row.others.split()}
    imports = {(module, other) for module, others in modules.items() for other in others}
    packages = {(module, other): (package(module), package(other)) for module, other in imports}
    against = {edge for edge, (one, other) in packages.items() if one != other and (one, other) not in may}
    assert sorted(against) == []


def test_the_build_s_commands_alone_know_those_of_the_runtime(modules: Mapping[str, set[str]]) -> None:
    importing = {module for module, others in modules.items() if "wancli" in map(package, others)}
    names = {module.rpartition(".")[2] for module in importing if package(module) == "wanbuild"}
    assert names == {
        "__main__",
        "build_command",
        "calibrate_command",
        "check_commands",
        "cli",
        "lora_command",
        "share_commands",
    }


def test_modules_make_no_circle(modules: Mapping[str, set[str]]) -> None:
    """What imports something is not imported by it, by whatever way, in one package or through several."""
    assert circle(modules) == []


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules on a circle, or on the way to one: what is left when all others are taken away."""
    left = dict(edges)
    while done := [name for name, others in left.items() if not others & left.keys()]:
        for name in done:
            del left[name]
    return sorted(left)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
