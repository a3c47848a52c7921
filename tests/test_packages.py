"""Imports between packages go one way: each may use those above it in these tables, and itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import wanrun

REPOSITORY = Path(__file__).parents[1]

LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "runtime/wanrun": (
            "errors units",
            "timing",
            "terminal",
            "files",
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
            "claims",
            "command intact jobs replay",
            "cli",
            "__main__",
        ),
        "runtime/wanfleet": ("outbox shard", "ray"),
        "runtime/wanhub": (
            "address atomic expected",
            "pins reading signature",
            "store",
            "copy",
            "complete opening",
        ),
        "runtime/wanserve": (
            "devices job names process refusal retention settings",
            "room sizes",
            "catalog estimate folders forms hub keys messages metrics pipelines protocol store uploads",
            "bodies fields running worker",
            "board openapi",
            "desk",
            "device intake",
            "guard routes",
            "service",
            "cli",
        ),
        "runtime/wanreport": (
            "report",
            "pictures waterfall",
            "page",
            "files",
            "run",
        ),
        "build/wanbuild": (
            "building config devices listed progress published",
            "staging targets",
            "models",
            "mapping variants",
            "components source",
            "hub lora toy programs",
            "recipe conversion",
            "check plan share",
            "calibrate",
            "cli",
            "__main__",
        ),
    }
)
"""From the bottom up. Those on one line do not use one another. A name is a package or a module."""


def imported(file: Path, top: str) -> Iterator[str]:
    """The packages and modules of ``top`` that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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
    return {name: layer for layer, names in enumerate(LAYERS[folder]) for name in names.split()}


@pytest.mark.parametrize("folder", LAYERS)
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


@pytest.mark.parametrize("folder", LAYERS)
def test_every_package_and_module_has_a_layer(folder: str) -> None:
    root = REPOSITORY / folder
    packages = {path.name for path in root.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages | {path.stem for path in root.glob("*.py")} - {"__init__"} == places(folder).keys()


def test_modules_of_a_package_make_no_circle() -> None:
    """Within a package too, what imports something is not imported by it, by whatever way."""
    for folder in LAYERS:
        root = REPOSITORY / folder
        edges: dict[str, set[str]] = {}
        for file in root.rglob("*.py"):
            module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
            edges[module] = modules_imported(file, root)
        assert circle(edges) == []


def modules_imported(file: Path, root: Path) -> set[str]:
    """The modules below a root that a file imports, by their dotted names."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {
            name for name in names if (root.parent / name.replace(".", "/")).with_suffix(".py").is_file()
        }
    return found


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules on a circle, or on the way to one: what is left when all others are taken away."""
    left = dict(edges)
    while done := [name for name, others in left.items() if not others & left.keys()]:
        for name in done:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("package", ["wanfleet", "wanhub", "wanreport", "wanserve"])
def test_other_packages_use_what_the_runtime_exports(package: str) -> None:
    """Each could be somebody else's; only the server's command is made as the others are."""
    root = REPOSITORY / "runtime" / package
    for file in root.rglob("*.py"):
        command = {"command", "terminal"} if file.name == "cli.py" else set()
        assert set(imported(file, "wanrun")) <= {"errors", *wanrun.__all__} | command, file.name


def test_reports_and_the_server_import_nothing_of_each_other() -> None:
    for package, other in (("wanserve", "wanreport"), ("wanreport", "wanserve")):
        for file in (REPOSITORY / "runtime" / package).rglob("*.py"):
            assert not set(imported(file, other)), file.name


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
