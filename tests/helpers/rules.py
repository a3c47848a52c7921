"""Rules of the house that are kept by counting: the files that break one are listed in tests/exemptions.tsv,
a line for a rule and a file, with how often.

PYTHONPATH=tests python tests/helpers/rules.py

The list may only shrink. Run as a script it takes out what is mended, and never puts anything in.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

REPOSITORY = Path(__file__).parents[2]
EXEMPTIONS = REPOSITORY / "tests" / "exemptions.tsv"
MOST_LINES = 400
SENTENCE = 4
"""Words that make a text one: no code, name or number has as many."""
CHECKS = ("refuses", "check_refusal", "check_json", "declines", "denies")
"""What takes the values of an error, of ``helpers.refusals`` and in fixtures."""

Counted = Mapping[str, int]
"""How often each file breaks a rule, of those that do."""


@cache
def sources_of_ours() -> list[Path]:
    """The modules of our packages."""
    return [file for top in ("build", "runtime") for file in sorted((REPOSITORY / top).rglob("*.py"))]


def _tests() -> list[Path]:
    return sorted((REPOSITORY / "tests").rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    """A file's tree, for all that asks for it. Not to be changed."""
    on = gc.isenabled()
    gc.disable()  # it would go through all trees again and again, for two thirds of the time
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        if on:
            gc.enable()


def _package(file: Path) -> str:
    return file.relative_to(REPOSITORY).parts[1]


@cache
def _exports() -> Mapping[str, set[str]]:
    """What each package of ours exports, and each of its modules to the other packages, by its name."""
    found = {}
    for file in sources_of_ours():
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts[1:]).removesuffix(".__init__")
        lists = [
            ast.literal_eval(node.value)
            for node in parsed(file).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        found[module] = {name for names in lists for name in names}
    return MappingProxyType(found)


def inner_imports(file: Path, tree: ast.Module) -> Iterator[ast.AST]:
    """Imports of what another package of ours does not export; its errors everybody may know."""
    exports, ours = _exports(), {_package(one) for one in sources_of_ours()} - {_package(file)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            other, _, below = node.module.partition(".")
            if other in ours and below != "errors":
                yield from (alias for alias in node.names if alias.name not in exports.get(node.module, ()))
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            inner = [one for one in parts if one[0] in ours and one[1:]]
            yield from (node for one in inner if one[1:] != ["errors"])


def long_docstrings(file: Path, tree: ast.Module) -> Iterator[ast.AST]:
    """Private functions, also by where they are, whose docstring has several lines."""
    return _long_docstrings(tree, private=False)


def _long_docstrings(tree: ast.AST, private: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        inside = private
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = private or (node.name.startswith("_") and not node.name.startswith("__"))
            function = not isinstance(node, ast.ClassDef)
            if inside and function and "\n" in (ast.get_docstring(node) or ""):
                yield node
            inside = inside or function
        yield from _long_docstrings(node, inside)


def long_modules(file: Path, tree: ast.Module) -> Iterator[ast.AST]:
    """A module that is too long."""
    if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES:
        yield tree


def compared_sentences(file: Path, tree: ast.Module) -> Iterator[ast.AST]:
    """Comparisons with a sentence, in an ``assert``, as ``match=`` or by ``helpers.refusals``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from (
                one for one in ast.walk(node.test) if isinstance(one, ast.Compare) and _sentences(one)
            )
        elif isinstance(node, ast.keyword) and node.arg == "match" and _sentences(node.value):
            yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CHECKS:
            yield from (part for part in node.keywords if _sentences(part.value))


def _sentences(tree: ast.AST) -> list[ast.AST]:
    texts = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [node for node in texts if len(node.value.split()) >= SENTENCE]


Rule = Callable[[Path, ast.Module], Iterator[ast.AST]]
RULES: Mapping[str, tuple[Callable[[], list[Path]], Rule]] = MappingProxyType(
    {
        "imports of what is no export": (sources_of_ours, inner_imports),
        "long docstrings of private functions": (sources_of_ours, long_docstrings),
        "modules above 400 lines": (sources_of_ours, long_modules),
        "sentences compared in tests": (_tests, compared_sentences),
    }
)
"""By what breaks one: the files that it is for, and the places in a file."""


@cache
def counted(rule: str) -> Counted:
    """How often each file breaks a rule."""
    files, broken = RULES[rule]
    found = {}
    for file in files():
        found[file.relative_to(REPOSITORY).as_posix()] = sum(1 for _ in broken(file, parsed(file)))
    return MappingProxyType({name: count for name, count in found.items() if count})


def exempted() -> dict[tuple[str, str], int]:
    """How often each file may break each rule, by both."""
    lines = [line.split("\t") for line in EXEMPTIONS.read_text(encoding="utf-8").splitlines()]
    return {(rule, file): int(count) for rule, file, count in lines}


def main() -> None:
    """Takes out of the list what is mended."""
    left = {(rule, file): min(most, counted(rule).get(file, 0)) for (rule, file), most in exempted().items()}
    lines = [f"{rule}\t{file}\t{most}\n" for (rule, file), most in left.items() if most]
    EXEMPTIONS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
