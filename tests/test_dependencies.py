"""What the packages import is what pyproject.toml installs with them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from types import MappingProxyType
from typing import Any

import pytest

from helpers.rules import REPOSITORY, parsed
from wanbuild.build_command import BUILD_EXTRA

EXTRAS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "runtime/wanrun": ((), ("heif",)),
        "runtime/wancli": ((), ("serve",)),
        "runtime/wanfleet": ((), ("ray",)),
        "runtime/wanhub": ((), ("hub", "sign")),
        "runtime/wanreport": ((), ()),
        "runtime/wanserve": (("serve",), ()),
        "build/wanbuild": (("build",), ("share", "test")),
    }
)
"""By package, the extras that it is installed with, and those that a function may ask for besides."""


OURS = ("wanrun", "wancli", "wanfleet", "wanhub", "wanreport", "wanserve", "wanbuild")


def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    """A distribution's name in one spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(extras: tuple[str, ...]) -> set[str]:
    """The distributions that ``pip install wanrun[extras]`` names, those of nested extras too."""
    data, names = project(), set()
    requirements = [*data["dependencies"], *(r for e in extras for r in data["optional-dependencies"][e])]
    for requirement in requirements:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == data["name"]:
            names |= installed(tuple(inner.split(",")))
            continue
        names.add(normal(name))
    return names


def imports(tree: ast.Module, everywhere: bool) -> Iterator[str]:
    """The modules that a file imports; at its top alone, or inside functions and for the type checker too."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if everywhere or not (function or typing):
            waiting += ast.iter_child_nodes(node)


distributions = cache(packages_distributions)
"""Those of each top package; to read what is installed takes as long as to read the sources."""


def foreign(folder: str, everywhere: bool) -> dict[str, str]:
    """The distributions that a package imports, and one of the files that does."""
    names = distributions()
    found = {}
    for file in sorted((REPOSITORY / folder).rglob("*.py")):
        for module in imports(parsed(file), everywhere):
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in OURS:
                distribution = names.get(top, [top])[0]  # what is not installed has its own name
                found[normal(distribution)] = str(file.relative_to(REPOSITORY))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("folder", EXTRAS)
def test_imports_are_declared(folder: str) -> None:
    always, asked = EXTRAS[folder]
    few = {"wanfleet": set[str](), "wanhub": {"msgspec"}, "wanserve": {"msgspec"}}
    few |= {"wancli": {"click", "msgspec"}, "wanreport": {"numpy", "pillow"}}
    sure = few.get(folder.rpartition("/")[2], {"click", "numpy"})
    for everywhere, extras in ((False, always), (True, (*always, *asked))):
        found = foreign(folder, everywhere)
        assert sure <= found.keys()  # they are seen at all
        assert {name: file for name, file in found.items() if name not in installed(extras)} == {}


def test_the_runtime_installs_nothing_of_the_build() -> None:
    """What ``wanbuild`` looks for before it builds is what the extra adds to the runtime."""
    build = {normal(distributions()[name.partition(".")[0]][0]) for name in BUILD_EXTRA}
    assert "orbax-checkpoint" in build
    assert installed(("build",)) - installed(()) == build


def test_versions_are_pinned() -> None:
    """constraints.txt has an exact version of whatever pyproject.toml names."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    assert len(pinned) == len(lines)
    assert installed(("test",)) - pinned == set()
