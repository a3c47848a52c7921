"""The share of small faults in the runtime that its packages' own fast tests notice.

PYTHONPATH=tests python tests/helpers/mutate.py RECORD [--again OLD] [--lines N] [--minutes M]

Lines are drawn with a fixed seed; each gets one fault, in a copy of the repository in a temporary folder, and
meets the tests beside its package. RECORD gets a row for each line; one that is there is continued. With
``--again`` the lines of an older record are found again by the function and the text, also in another module;
those that are gone are listed, and the next ones that the seed draws take their places.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
TESTS: Mapping[str, str] = MappingProxyType(
    {"runtime/wanrun": "tests/runtime", "runtime/wancli": "tests/cli"}
)
"""Where the tests of a package lie: below it as the modules do."""

SEED = 55
COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = MappingProxyType(
    {
        ast.Lt: (ast.LtE, ast.GtE),
        ast.LtE: (ast.Lt, ast.Gt),
        ast.Gt: (ast.GtE, ast.LtE),
        ast.GtE: (ast.Gt, ast.Lt),
        ast.Eq: (ast.NotEq,),
        ast.NotEq: (ast.Eq,),
        ast.Is: (ast.IsNot,),
        ast.IsNot: (ast.Is,),
        ast.In: (ast.NotIn,),
        ast.NotIn: (ast.In,),
    }
)
"""A neighbour, which differs at the boundary, and the contrary."""

ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = MappingProxyType(
    {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
)


class Fault(NamedTuple):
    """Bytes of a module and what stands in their place."""

    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Line:
    """A line of code that may get a fault.

    Attributes:
        file: its module, in the repository.
        number: from 1 on.
        key: the function, the text, and which one it is of those that have both in common.
        faults: all that are possible.
    """

    file: str
    number: int
    key: tuple[str, str, int]
    faults: Sequence[Fault]

    @property
    def rank(self) -> str:
        """Its place in the draw, which depends on nothing else in the repository."""
        return hashlib.sha256(repr((SEED, *self.key)).encode()).hexdigest()

    def fault(self, source: bytes) -> tuple[Fault, bytes]:
        """Draws a fault that is right in its syntax and no equal; returns it, and the module with it."""
        order = random.Random(self.rank).sample(list(self.faults), len(self.faults))
        for fault in order:
            changed = source[: fault.begin] + fault.text.encode() + source[fault.end :]
            try:
                if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)):
                    return fault, changed
            except SyntaxError:
                continue
        raise AssertionError(f"{self.file}:{self.number} has no fault")


def changes(node: ast.AST) -> Iterator[str]:
    """The faults of one node, as the text in its place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for other in COMPARISONS[type(op)]:
                yield f"({ast.unparse(ast.Compare(left, [other()], [right]))})"
        case ast.BoolOp(op=op, values=values):
            contrary = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(contrary, values))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield from (f"({value + 1})", f"({value - 1})")
        case ast.Call(func=func, args=[one, other, *rest], keywords=keywords):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                yield ast.unparse(ast.Call(func, [other, one, *rest], keywords))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


class Finder:
    """Finds the faults of a module, outside of types, decorators and f-strings."""

    def __init__(self, source: bytes) -> None:
        self.found: dict[tuple[str, int], list[Fault]] = {}
        self._names: list[str] = []
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._visit(ast.parse(source))

    def _visit(self, node: ast.AST) -> None:
        for text in changes(node):
            self._add(node, text)
        match node:
            case (
                ast.If(test=ast.Name("TYPE_CHECKING")) | ast.JoinedStr()
            ):  # Python 3.11 mistakes places in these
                pass
            case ast.AnnAssign(value=value):
                self._visit(value or ast.Pass())
            case (
                ast.FunctionDef(name=name, args=args, body=body)
                | ast.AsyncFunctionDef(name=name, args=args, body=body)
            ):
                self._below(name, *args.defaults, *filter(None, args.kw_defaults), *body)
            case ast.ClassDef(name=name, body=body):
                self._below(name, *body)
            case _:
                if isinstance(node, ast.If | ast.While | ast.IfExp):
                    self._add(node.test, f"(not ({ast.unparse(node.test)}))")
                for child in ast.iter_child_nodes(node):
                    self._visit(child)

    def _below(self, name: str, *nodes: ast.AST) -> None:
        self._names.append(name)
        for node in nodes:
            self._visit(node)
        self._names.pop()

    def _add(self, node: ast.AST, text: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        place = ".".join(self._names), node.lineno
        self.found.setdefault(place, []).append(Fault(begin, end, text))


def lines(repository: Path) -> list[Line]:
    """All lines that may get a fault, in the order of the draw."""
    found, seen = [], Counter[tuple[str, str]]()
    for package in TESTS:
        for file in sorted((repository / package).rglob("*.py")):
            place, source = file.relative_to(repository).as_posix(), file.read_bytes()
            if file.stem.startswith("__"):
                continue
            texts = source.decode().split("\n")
            for (function, number), faults in sorted(
                Finder(source).found.items(), key=lambda item: item[0][1]
            ):
                text = texts[number - 1].strip()
                key = function, text, seen[function, text]
                seen[function, text] += 1
                found.append(Line(place, number, key, faults))
    return sorted(found, key=lambda line: line.rank)


def rows(record: Path) -> list[tuple[tuple[str, str, int], str, str]]:
    """The key of each line of a record, its module and what came of it."""
    found = [row.split("\t") for row in record.read_text(encoding="utf-8").splitlines()]
    return [
        ((function, text, int(number)), file, outcome) for outcome, file, function, number, text, _ in found
    ]


def chosen(drawn: Sequence[Line], count: int, again: Path | None) -> Sequence[Line]:
    """The lines to take: the first ones of the draw, or those of an older record while they are there."""
    if again is None:
        return drawn[:count]
    old = {key for key, _, _ in rows(again)}
    there = {line.key: line for line in drawn}
    for key in sorted(old - there.keys()):
        print(f"gone\t{key[0]}\t{key[1]}", flush=True)
    kept = [line for line in drawn if line.key in old]
    rest = (line for line in drawn if line.key not in old)
    return [*kept, *rest][: max(count, len(kept))]


def tests_of(file: str) -> str:
    """The tests that a module meets, as a pattern: those of its folder, or those next to it at the top."""
    package = next(package for package in TESTS if file.startswith(f"{package}/"))
    first, _, below = file.removeprefix(f"{package}/").partition("/")
    return f"{TESTS[package]}/{first}" if below else f"{TESTS[package]}/test_*.py"


class Copy:
    """A copy of the repository whose modules may have a fault."""

    def __init__(self, folder: Path, cache: Path | None) -> None:
        self.folder, self._cache, self._output = folder / "repository", cache, folder / "output"
        leave = shutil.ignore_patterns(".*", "__pycache__", "artifacts")
        shutil.copytree(REPOSITORY, self.folder, ignore=leave)
        self._seconds: dict[str, float] = {}

    def _run(self, tests: str, seconds: float) -> int | None:
        """Runs tests, and returns pytest's exit code; None if they took too long."""
        # Short names: tests hold the lengths of messages that show paths.
        temporary, cache = (self.folder.with_name(name) for name in ("t", "cache"))
        for left in (temporary, cache):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
        changes = {
            "PYTHONPATH": f"{self.folder / 'runtime'}{os.pathsep}{self.folder / 'build'}",
            "PYTEST_DEBUG_TEMPROOT": str(temporary),
            "TMPDIR": str(temporary),
        }
        if self._cache is not None:  # a fault may write into it
            shutil.copytree(self._cache, cache)
            changes["WAN_TEST_CACHE"] = str(cache)
        options = ["-x", "-q", "-n", "0", "-m", "not slow", "--without-torch", "-p", "no:cacheprovider"]
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *sorted(self.folder.glob(tests))],
                cwd=self.folder,
                env={**os.environ, **changes},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end_all()
            process.wait()

    def _end_all(self) -> None:
        """Ends what works below the copy: tests start processes, also in sessions of their own."""
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if entry.readlink().is_relative_to(self.folder.parent):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
            except OSError:
                continue

    def measure(self, tests: str) -> None:
        """Runs tests without a fault, for the time that they may take with one.

        Raises:
            RuntimeError: if they fail.
        """
        begin = time.monotonic()
        if self._run(tests, 600) != 0:
            raise RuntimeError(self._output.read_text())
        self._seconds[tests] = time.monotonic() - begin

    def outcome(self, line: Line) -> tuple[str, str]:
        """Returns what came of a line with a fault, and the fault."""
        tests, file = tests_of(line.file), self.folder / line.file
        source = file.read_bytes()
        fault, changed = line.fault(source)
        try:
            self._write(file, changed)
            code = self._run(tests, 20 + 4 * self._seconds[tests])
        finally:
            self._write(file, source)
        before = " ".join(source[fault.begin : fault.end].decode().split())
        outcome = "late" if code is None else "survived" if code == 0 else "killed"
        return outcome, f"{before} -> {fault.text}"

    def _write(self, file: Path, source: bytes) -> None:
        """Python takes a compiled module by its time in seconds and its size: it may not have this one's."""
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()
        file.write_bytes(source)


def wilson(killed: int, all: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson."""
    z, share = 1.96, killed / all
    middle = share + z * z / (2 * all)
    half = z * math.sqrt(share * (1 - share) / all + z * z / (4 * all * all))
    return (middle - half) / (1 + z * z / all), (middle + half) / (1 + z * z / all)


def table(record: Path) -> Iterator[str]:
    """Lines of a table: of each tests' folder, and of all together, those that were noticed."""
    killed, all = Counter[str](), Counter[str]()
    for _, file, outcome in rows(record):
        for name in (tests_of(file), "all"):
            all[name] += 1
            killed[name] += outcome != "survived"
    for name in sorted(all, key=lambda name: (name == "all", name)):
        low, high = wilson(killed[name], all[name])
        share = killed[name] / all[name]
        yield f"| {name} | {all[name]} | {killed[name]} | {share:.0%} | {low:.0%} to {high:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60)
    given = parser.parse_args()
    cache = os.environ.get("WAN_TEST_CACHE")
    given.record.touch()
    done = {key for key, _, _ in rows(given.record)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, given.record.open("a") as record:
        copy = Copy(Path(folder), Path(cache) if cache else None)
        taken = [line for line in chosen(lines(REPOSITORY), given.lines, given.again) if line.key not in done]
        for tests in sorted({tests_of(line.file) for line in taken}):
            copy.measure(tests)
        for line in taken:
            if _used_minutes() > given.minutes:
                print("no more CPU time")
                break
            outcome, fault = copy.outcome(line)
            function, text, number = line.key
            print(outcome, line.file, function, number, text, fault, sep="\t", file=record, flush=True)
    print("\n".join(table(given.record)))
    print(f"{_used_minutes():.1f} CPU minutes")


def _used_minutes() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60


if __name__ == "__main__":
    main()
