"""The words of all errors in docs/messages.txt, read from the source. Run as a script it writes them anew.

PYTHONPATH=tests python tests/helpers/messages.py

``{}`` stands for a value, ``(a|b)`` for one of several; a ``problem`` is a part of an error of several.
No line says where an error is made, so that code may move without a change here.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from helpers.rules import REPOSITORY, parsed

FILE = REPOSITORY / "docs" / "messages.txt"
ABOUT = "What errors say. PYTHONPATH=tests python tests/helpers/messages.py writes this file.\n"

ROOTS = frozenset({"WanError", "RefusedError", "Mismatch", "BadParameter", "ValueError"})
"""These and the classes below them are what users read; a ValueError becomes a part of another error."""

PARTS = ("what", "expected", "found", "remedy")
OF_THE_SERVER = ("what", "status", "code")
DEPTH, MOST = 3, 12
"""How many names an expression is followed through, and of how many texts one may stand for one of them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        node: it.
        name: the last name of what is called.
        around: the functions that it is in, the outermost first.
        own: the class that it is in.
    """

    node: ast.Call
    name: str
    around: tuple[Function, ...]
    own: str


@dataclass
class Helper:
    """A function that makes an error of some of its arguments.

    Attributes:
        kind: the error's class.
        order: its parameters.
        said: those that are among the error's words.
    """

    kind: str
    order: Sequence[str]
    said: set[str] = field(default_factory=set)


class Messages:
    """The errors of some modules."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._calls = [call for tree in trees for call in calls(tree, (), "")]
        self._classes = classes(trees)
        self._constants = constants(trees)
        self._helpers = dict[str, Helper]()
        size = -1
        while size != (size := sum(len(helper.said) for helper in self._helpers.values())):
            for call in self._calls:  # one helper may call another
                self._find_helper(call)

    def _find_helper(self, call: Call) -> None:
        kind, parts = self._parts(call)
        if not kind or not call.around:
            return
        function = call.around[-1]
        order = [one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "self"]
        used = {node.id for part in parts.values() for node in ast.walk(part) if isinstance(node, ast.Name)}
        if said := used & set(order):
            name = call.own if function.name == "__init__" else function.name
            self._helpers.setdefault(name, Helper(kind, order)).said |= said

    def _parts(self, call: Call) -> tuple[str, Mapping[str, ast.expr]]:
        """The class of the error that a call makes, and its words; no class if it makes none."""
        given = {word.arg: word.value for word in call.node.keywords if word.arg is not None}
        kind = call.own if call.name == "__init__" else call.name
        helper = self._helpers.get(call.name)
        if kind in self._classes and (helper is None or call.name == "__init__"):
            order = OF_THE_SERVER if kind == "RefusedError" else PARTS
            given = {**dict(zip(order, call.node.args, strict=False)), **given}
            return kind, {name: given[name] for name in (*PARTS, *OF_THE_SERVER) if name in given}
        if helper is None:
            return "", {}
        given = {**dict(zip(helper.order, call.node.args, strict=False)), **given}
        said = {name: given[name] for name in helper.order if name in given and name in helper.said}
        return helper.kind, {
            name: value for name, value in said.items() if " " in self._words(value, call.around)
        }

    def lines(self) -> Iterator[str]:
        """A line for each error that has words of its own."""
        for call in self._calls:
            kind, parts = self._parts(call)
            said = {part: self._words(value, call.around) for part, value in parts.items()}
            texts = {
                part: said[part] for part in said if part not in ("status", "code") and said[part] != "None"
            }
            if kind and any(text.replace("None", "").strip("{}, ") for text in texts.values()):
                shown = [
                    f"{part} {texts[part]}" if part in ("expected", "found") else texts[part]
                    for part in texts
                ]
                answer = "".join(f" [{said[part]}]" for part in ("status", "code") if part in said)
                yield " ".join(f"{kind}: {'; '.join(shown)}{answer}".split())
            elif is_problem(call.node):
                yield " ".join(f"problem: {self._words(call.node.args[0], call.around)}".split())

    def _words(self, node: ast.expr, around: Sequence[Function], depth: int = DEPTH) -> str:
        """What an expression says, as far as the source tells it."""
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.JoinedStr(values=values):
                return "".join(self._words(value, around, depth) for value in values)
            case ast.FormattedValue(value=value):
                return self._words(value, around, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._words(left, around, depth) + self._words(right, around, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return one_of(self._words(part, around, depth) for part in (body, orelse))
            case ast.BoolOp(values=values):
                return one_of(self._words(part, around, depth) for part in values)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return ", ".join(self._words(part, around, depth) for part in elements)
            case ast.Name(id=name) if depth:
                values = [value for function in around for value in assigned(function).get(name, ())]
                if not values and name in self._constants:
                    values = [self._constants[name]]
                found = {self._words(value, around, depth - 1) for value in values}
                return one_of(sorted(found)) if 0 < len(found) <= MOST else "{}"
        return "{}"


def one_of(texts: Iterable[str]) -> str:
    """Several texts in one; those without words are a value."""
    found = list(dict.fromkeys(texts))
    if not any(character.isalpha() for text in found for character in text):
        return "{}"
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"


def named(node: ast.expr) -> str:
    """The last of a dotted name; empty for what is no name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def calls(node: ast.AST, around: tuple[Function, ...], own: str) -> Iterator[Call]:
    """All calls below a node, which is inside of some functions and perhaps of a class."""
    if isinstance(node, ast.Call):
        yield Call(node, named(node.func), around, own)
    if isinstance(node, Function):
        around = (*around, node)
    if isinstance(node, ast.ClassDef):
        own = node.name
    for child in ast.iter_child_nodes(node):
        yield from calls(child, around, own)


def classes(trees: Sequence[ast.Module]) -> set[str]:
    """The names of the errors' classes."""
    every = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, size = set(ROOTS), 0
    while size != (size := len(found)):
        found |= {node.name for node in every if found & {named(base) for base in node.bases}}
    return found


def constants(trees: Sequence[ast.Module]) -> dict[str, ast.expr]:
    """The values of names in capitals; of a name that two modules have, none."""
    found = defaultdict[str, list[ast.expr]](list)
    for node in (node for tree in trees for node in tree.body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                found[name].append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name.isupper():
                found[name].append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def is_problem(call: ast.Call) -> bool:
    """Whether a text is appended to a list of problems."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name("problems"), attr="append"), args=[_]):
            return True
    return False


@cache
def assigned(function: Function) -> Mapping[str, Sequence[ast.expr]]:
    """The values that the names of a function are given."""
    found = defaultdict[str, list[ast.expr]](list)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name].append(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    found[named(target)].append(value)
    return dict(found)


def messages() -> str:
    """The file's text."""
    files = sorted(file for top in ("runtime", "build") for file in (REPOSITORY / top).rglob("*.py"))
    trees = list(map(parsed, files))
    return ABOUT + "".join(f"{line}\n" for line in sorted(Messages(trees).lines()))


if __name__ == "__main__":
    FILE.write_text(messages(), encoding="utf-8")
