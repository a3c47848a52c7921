"""docs/errors.md: the codes of errors, and the words of all of them, read from the source.

Run as a script it writes the file anew.

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
from typing import Any

from helpers.rules import REPOSITORY, parsed
from wanrun.codes import CODES, Code
from wanserve.codes import SERVER_CODES

FILE = REPOSITORY / "docs" / "errors.md"
GENERATED = "## Codes"
"""Where the part of the file begins that is made here."""

ROOTS = frozenset({"WanError", "RefusedError", "Mismatch", "BadParameter", "ValueError"})
"""These and the classes below them are what users read; a ValueError becomes a part of another error."""

PARTS = ("what", "expected", "found", "remedy")
OF_THE_SERVER = ("what", "status", "code")
OTHERS = "parts of other errors"
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
        code: the error's code, as far as the function says it.
        said: those that are among the error's words.
    """

    kind: str
    order: Sequence[str]
    code: str
    said: set[str] = field(default_factory=set)


class Messages:
    """The errors of some modules."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._calls = [call for tree in trees for call in calls(tree, (), "")]
        self._classes, self._coded = classes(trees, ROOTS), classes(trees, {"WanError"})
        self._constants, self._modules = constants(trees), modules(trees)
        self._exits, self.exits = exit_codes(trees), defaultdict[str, set[int]](set)
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
            code = self._words(parts["code"], call.around) if "code" in parts else self._code(call, kind)
            self._helpers.setdefault(name, Helper(kind, order, code)).said |= said

    def _parts(self, call: Call) -> tuple[str, Mapping[str, ast.expr]]:
        """The class of the error that a call makes, and its words; no class if it makes none."""
        given = {word.arg: word.value for word in call.node.keywords if word.arg is not None}
        kind = call.own if call.name == "__init__" else call.name
        helper = self._helpers.get(call.name)
        match call.node.func:
            case ast.Attribute(value=ast.Name(id=owner)) if owner in self._modules:
                helper = None  # as re.compile, which is not a function of ours of the same name
        if kind in self._classes and (helper is None or call.name in ("__init__", "RefusedError")):
            coded = ("code", *PARTS) if kind in self._coded else PARTS
            order = OF_THE_SERVER if kind == "RefusedError" else coded
            given = {**dict(zip(order, call.node.args, strict=False)), **given}
            return kind, {name: given[name] for name in (*PARTS, *OF_THE_SERVER) if name in given}
        if helper is None:
            return "", {}
        given = {**dict(zip(helper.order, call.node.args, strict=False)), **given}
        said = {name: given[name] for name in helper.order if name in given and name in helper.said}
        return helper.kind, {
            name: value for name, value in said.items() if " " in self._words(value, call.around)
        }

    def by_code(self) -> Mapping[str, Sequence[str]]:
        """The words of each error that has some of its own, sorted, by its code."""
        found = defaultdict[str, list[str]](list)
        for call in self._calls:
            kind, parts = self._parts(call)
            said = {part: self._words(value, call.around) for part, value in parts.items()}
            code, status = said.pop("code", self._code(call, kind)), said.pop("status", "")
            texts = {part: text for part, text in said.items() if text != "None"}
            if kind and any(text.replace("None", "").strip("{}, ") for text in texts.values()):
                shown = [
                    f"{part} {text}" if part in ("expected", "found") else text
                    for part, text in texts.items()
                ]
                answer = f" [HTTP {status}]" if status else ""
                self.exits[code] |= self._exits.get(kind, set())
                found[code].append(" ".join(f"{'; '.join(shown)}{answer}".split()))
            elif is_problem(call.node):
                found[OTHERS].append(" ".join(self._words(call.node.args[0], call.around).split()))
        return {code: sorted(found[code]) for code in sorted(found)}

    def _code(self, call: Call, kind: str) -> str:
        """The code of an error that is given none where it is made."""
        if kind == "RefusedError" and call.name == kind:
            return "invalid_value"
        helper = self._helpers.get(call.name)
        return OTHERS if helper is None else helper.code

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


def modules(trees: Sequence[ast.Module]) -> set[str]:
    """The names of whole modules that are imported."""
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


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


def classes(trees: Sequence[ast.Module], roots: Iterable[str]) -> set[str]:
    """The names of some classes and of those that derive from them."""
    every = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, size = set(roots), 0
    while size != (size := len(found)):
        found |= {node.name for node in every if found & {named(base) for base in node.bases}}
    return found


def exit_codes(trees: Sequence[ast.Module]) -> Mapping[str, set[int]]:
    """The exit code of each class of errors, its own or that of a class that it derives from."""
    ours = classes(trees, {"WanError"})
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    every = {node.name: node for node in nodes if node.name in ours}

    def of(name: str) -> set[int]:
        if name not in every:
            return set()
        for node in every[name].body:
            match node:
                case ast.Assign(targets=[ast.Name("exit_code")], value=ast.Constant(int(code))):
                    return {code}
                case ast.AnnAssign(target=ast.Name("exit_code"), value=ast.Constant(int(code))):
                    return {code}
        return set().union(*(of(named(base)) for base in every[name].bases))

    return {name: of(name) for name in every}


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
    messages = Messages(list(map(parsed, files)))
    found = messages.by_code()
    about, _, _ = FILE.read_text(encoding="utf-8").partition(GENERATED)
    exits = {code: " or ".join(map(str, sorted(of))) for code, of in messages.exits.items()}
    parts = [about, *_table("Codes", CODES, exits), *_table("Codes of the server", SERVER_CODES)]
    parts.append("## Messages\n\n`{}` stands for a value, `(a|b)` for one of several.\n")
    for code, lines in found.items():
        title = "of the error that they are about" if "{}" in code else code
        parts.append(f"\n### {title}\n\n" + "".join(f"    {line}\n" for line in lines))
    return "".join(parts)


def _table(title: str, codes: Mapping[Any, Code], exits: Mapping[str, str] | None = None) -> Iterator[str]:
    yield f"## {title}\n\n"
    yield (
        "| code | when | what to do |\n|---|---|---|\n"
        if exits is None
        else ("| code | when | what to do | exit code |\n|---|---|---|---|\n")
    )
    for name, code in sorted(codes.items()):
        end = "" if exits is None else f" {exits.get(name, '')} |"
        yield f"| `{name}` | {code.when} | {code.remedy} |{end}\n"
    yield "\n"


if __name__ == "__main__":
    FILE.write_text(messages(), encoding="utf-8")
