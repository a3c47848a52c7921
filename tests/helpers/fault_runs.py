"""Builds that are killed, interrupted or compete, as forked children of a process that has all imported.

python fault_runs.py FOLDER CHECKPOINT CHECKPOINT

FOLDER is empty, and the checkpoints differ in weights alone. Any other exit code than 0 is a failure.
"""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from wanbuild.build import convert
from wanbuild.check.verify import check_files
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.console import leave, run
from wancli.early import start
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import UsageError

KILLS = 8
INTERRUPTS = 12
SEED = 20_250_301


def fork(function: Callable[[], Any]) -> int:
    """Runs a function in a child, which exits with 0, with 2 for a UsageError, or with 1."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except UsageError:
            os._exit(2)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def wait(child: int) -> int:
    """A child's exit code; minus the signal's number if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Builds:
    """The artifact that is built again and again in a folder, and what each checkpoint's has to be."""

    def __init__(self, folder: Path, *checkpoints: Path) -> None:
        self.folder, self.checkpoints = folder, checkpoints
        self.artifact, self.replaced = folder / "artifact", folder / ".artifact.replaced"
        self.digests: list[str] = []
        self.files: dict[str, dict[str, int]] = {}
        for checkpoint in checkpoints:
            digest = self.build(checkpoint).content_digest
            self.digests.append(digest)
            self.files[digest] = self.sizes(self.artifact)
        assert len(set(self.digests)) == len(checkpoints)

    def build(self, checkpoint: Path, force: bool = True) -> Any:
        return convert(ConvertRequest(checkpoint, self.artifact, force=force, threads=2))

    def command(self, checkpoint: Path, *options: str) -> int:
        """The command's exit code, as in a process of its own."""
        start()
        return run(wanbuild, ["convert", str(checkpoint), "--artifact", str(self.artifact), *options])

    @staticmethod
    def sizes(folder: Path) -> dict[str, int]:
        return {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }

    def whole(self, folder: Path) -> str | None:
        """The digest of an artifact that verifies in full and holds no other file; None if there is none."""
        if not folder.exists():
            return None
        manifest = read_manifest(folder)
        check_files(Artifact(manifest, folder), lambda line: None)
        assert self.sizes(folder) == self.files[manifest.content_digest]
        return manifest.content_digest

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def clean(self) -> None:
        """Nothing is beside the artifact."""
        assert self.names() in ([], ["artifact"]), self.names()

    def remove(self) -> None:
        if self.artifact.exists():
            shutil.rmtree(self.artifact)

    @cached_property
    def seconds(self) -> float:
        """How long a child needs for a conversion."""
        times = []
        for _ in range(3):
            self.remove()
            started = time.monotonic()
            assert wait(fork(lambda: self.build(self.checkpoints[0], force=False))) == 0
            times.append(time.monotonic() - started)
        return statistics.median(times)


def moments(count: int, seconds: float, random_numbers: random.Random) -> list[float]:
    """Random moments, one in each of this many equal parts of a conversion and a little more, shuffled."""
    parts = [(number + random_numbers.random()) / count for number in range(count)]
    random_numbers.shuffle(parts)
    return [1.1 * part * seconds for part in parts]


def random_kills(builds: Builds) -> None:
    """kill -9, in turn of a first conversion and of one that replaces; the next cleans up and succeeds."""
    random_numbers = random.Random(SEED)
    seconds, found = builds.seconds, collections.Counter[str]()
    digest = builds.digests[0]
    for number, moment in enumerate(moments(KILLS, seconds, random_numbers)):
        new, force = number // 2 % 2, bool(number % 2)
        old = digest if force else None
        if not force:
            builds.remove()
        child = fork(partial(builds.build, builds.checkpoints[new], force))
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        ended = wait(child)
        assert ended in (0, -signal.SIGKILL), ended
        there = builds.whole(builds.artifact)
        moved_aside = force and there is None and builds.whole(builds.replaced) == old
        assert moved_aside or there in (old, builds.digests[new]), number
        writing = (builds.folder / ".artifact.building").exists()
        found["finished" if ended == 0 else "while writing" if writing else "before or after"] += 1
        # The next one has the other weights, so that nothing of the killed one can pass for its own.
        builds.build(builds.checkpoints[1 - new], force=force or there is not None)
        digest = builds.digests[1 - new]
        assert builds.whole(builds.artifact) == digest
        builds.clean()
    print(f"seed {SEED}, {KILLS} kills in {seconds:.2f} s: {dict(found)}")
    assert found["while writing"] >= KILLS // 4, found
    assert found["before or after"] >= KILLS // 10, found


def interrupts(builds: Builds) -> None:
    """Ctrl-C and SIGTERM: their exit codes, the old artifact or the new one, and nothing is left."""
    random_numbers = random.Random(SEED)
    seconds, codes = builds.seconds, collections.Counter[int]()
    for number, moment in enumerate(moments(INTERRUPTS, seconds, random_numbers)):
        new = number // 2 % 2
        options = ["--threads", "2"]
        if number % 2:
            options.append("--force")
            old = builds.whole(builds.artifact)
        else:
            builds.remove()
            old = None
        name = signal.SIGTERM if number % 3 == 2 else signal.SIGINT
        arguments = (builds.checkpoints[new], *options)
        child = fork(lambda arguments=arguments: leave(builds.command(*arguments)))
        time.sleep(0.02 + moment)  # a Python child needs a moment to set its handlers
        os.kill(child, name)
        code = wait(child)
        codes[code] += 1
        assert code in (0, 130 if name == signal.SIGINT else 143), (name, code)
        builds.clean()
        digest = builds.whole(builds.artifact)
        assert digest == builds.digests[new] or (code and digest == old), (number, code)
    print(f"seed {SEED}, {INTERRUPTS} signals in {seconds:.2f} s: exit codes {dict(codes)}")
    assert codes[130] >= 3 and codes[143] >= 1, codes


Stop = int | tuple[str, int]
"""The number of an event, or ("before", n) or ("after", n) for the moment before or after the n-th rename,
from 0 before and from 1 after."""


def counted(stop: Stop | None, function: Callable[[], Any]) -> list[str]:
    """Runs with every change to the file system counted; killed before the event of this number, or then.

    Counts from the first mkdir on, so not what a build clears away before it begins.
    """
    trace: list[str] = []

    def count(name: str) -> None:
        original = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            moment = "before" if name == "rename" else "", trace.count("rename")
            if stop in (len(trace), moment, ("after", trace.count("rename"))):
                os.kill(os.getpid(), signal.SIGKILL)
            if trace or name == "mkdir":
                trace.append(name)
            return original(*args, **kwargs)

        setattr(os, name, wrapper)

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
        count(name)
    function()
    return trace


def kills_at_events(builds: Builds) -> None:
    """kill -9 before and after each rename, at the first and the last steps, and in the flush."""
    random_numbers, found = random.Random(SEED), collections.Counter[bool]()

    def after_kill() -> None:
        """There was an artifact, so there is one: under its name, or moved aside for the next build."""
        there = builds.whole(builds.artifact)
        found[there is not None] += 1
        assert there or builds.whole(builds.replaced), "the artifact is lost"

    reader, writer = os.pipe()
    build = partial(builds.build, builds.checkpoints[1])
    wait(fork(lambda: os.write(writer, " ".join(counted(None, build)).encode())))
    trace = os.read(reader, 1 << 20).decode().split()
    moves = [index for index, name in enumerate(trace) if name == "rename"]
    assert len(moves) == 2, trace  # the old one aside, the new one into place
    # By name, for threads that make folders at once may need a call more or less before them.
    stops: list[Stop] = [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    stops += [len(trace) - 10, moves[1] + 20, trace.index("fsync") + 3]
    stops += random_numbers.sample(range(len(trace) - 10), 3)
    for number, stop in enumerate(stops):
        build = partial(builds.build, builds.checkpoints[number % 2])
        assert wait(fork(partial(counted, stop, build))) == -signal.SIGKILL, stop
        after_kill()
    assert found[False] == 2, found  # between the two renames
    # The next build, forced or not, puts the old one back before it does anything else.
    build = partial(builds.build, builds.checkpoints[1])
    assert wait(fork(partial(counted, ("after", 1), build))) == -signal.SIGKILL
    assert not builds.artifact.exists() and builds.replaced.exists()
    before = builds.whole(builds.replaced)
    assert wait(fork(lambda: builds.build(builds.checkpoints[1], force=False))) == 2
    assert builds.whole(builds.artifact) == before
    builds.clean()


def two_at_once(builds: Builds) -> None:
    """Two builders of one artifact: the second waits, and replaces or refuses; never a mixture."""

    def both(force: bool) -> list[int]:
        children = [fork(partial(builds.build, checkpoint, force)) for checkpoint in builds.checkpoints]
        return [wait(child) for child in children]

    assert both(force=True) == [0, 0]
    assert builds.whole(builds.artifact)
    builds.remove()
    codes = both(force=False)
    assert sorted(codes) == [0, 2], codes
    assert builds.whole(builds.artifact) == builds.digests[codes.index(0)]
    builds.clean()


def main(folder: str, *checkpoints: str) -> None:
    builds = Builds(Path(folder), *map(Path, checkpoints))
    for faults in (random_kills, interrupts, kills_at_events, two_at_once):
        print(faults.__name__, flush=True)
        faults(builds)
        builds.build(builds.checkpoints[0])
        assert builds.whole(builds.artifact) == builds.digests[0]
        builds.clean()


if __name__ == "__main__":
    main(*sys.argv[1:])
