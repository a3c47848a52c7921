"""Runs a campaign for a given time, and prints what came of it.

python -m campaign --seconds 7200 --seed 1 --log faults.jsonl     # repeats nothing that the log has
python -m campaign --seed 1 --only 4711                           # one fault again, with its folder kept

A fault is survived if the command ends in time with a documented exit code and at most one line, nothing is
left behind, the artifact is whole, and the video, if there is one, has the bits of an undamaged run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from campaign.fault import Case, Ended, problems, rng_of
from campaign.kinds import Sources, generation, kinds
from campaign.runner import Runner


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of a megabyte, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


class Campaign:
    """Faults of one seed, one after the other.

    Args:
        folder: to work in.
        seed: of all faults.
        sources: what is damaged.
    """

    def __init__(self, folder: Path, seed: int, sources: Sources) -> None:
        self._folder, self._seed, self._sources = folder, seed, sources
        self._kinds = kinds(sources)
        self._runner = Runner(folder)
        (folder / "cache").mkdir(exist_ok=True)
        video = folder / "expected.npy"
        undamaged = Case("none", "", "wanrun", generation(sources.artifact, video, "--overwrite"))
        ended = self._runner(undamaged)
        if ended.code != 0:
            raise SystemExit(f"the undamaged run ended with {ended.code}: {ended.err}")
        self._expected = video.read_bytes()

    def close(self) -> None:
        self._runner.close()

    def fault(self, number: int) -> tuple[Case, Ended, list[str]]:
        """Makes one fault, runs it, and judges."""
        rng, folder = rng_of(self._seed, number), self._folder / str(number)
        folder.mkdir()
        (maker,) = rng.choices(list(self._kinds), list(self._kinds.values()))
        case = maker(rng, folder)
        ended = self._runner(case)
        return case, ended, problems(case, ended, self._expected, whole)

    def forget(self, number: int) -> None:
        """Removes a fault's folder."""
        shutil.rmtree(self._folder / str(number), ignore_errors=True)


def whole(artifact: Path) -> str | None:
    """What is wrong with an artifact; None if it is whole, or there is none."""
    from wanbuild.check.verify import check_files
    from wanrun.artifact.manifest import read_manifest
    from wanrun.errors import WanError

    if not artifact.exists():
        return None
    try:
        check_files(artifact, read_manifest(artifact), lambda line: None)
    except WanError as error:
        return str(error)
    return None


def make_sources(folder: Path, small: Path | None) -> Sources:
    """A toy checkpoint and its artifact, small enough to be copied for each fault."""
    from helpers.artifacts import build_artifact
    from wanbuild.toy.checkpoint import write_toy

    if not (folder / "artifact").exists():
        write_toy(folder / "checkpoint", "wan2.1-t2v", seed=0)
        with contextlib.redirect_stdout(sys.stderr):
            build_artifact(folder / "checkpoint", folder / "artifact", size=(64, 32), num_frames=5)
    return Sources(folder / "checkpoint", folder / "artifact", small)


def run_campaign(
    folder: Path, seed: int, seconds: float, log: Path | None = None, most: int | None = None
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Runs faults for a time.

    Args:
        folder: to work in; the artifact is made there once.
        seed: of the campaign.
        seconds: how long it goes on.
        log: a line for each fault; its faults are not repeated.
        most: no more faults than this.

    Returns:
        Counts by kind and verdict; and the failures, each with what repeats it.
    """
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures: list[str] = []
    done = sum(1 for _ in log.open()) if log is not None and log.exists() else 0
    with small_disk(folder / f"small-{os.getpid()}") as small:
        campaign = Campaign(folder, seed, make_sources(folder, small))
        end, number = time.monotonic() + seconds, done
        try:
            while time.monotonic() < end and (most is None or number < done + most):
                case, ended, wrong = campaign.fault(number)
                counts[case.kind, "fails" if wrong else f"exit {ended.code}"] += 1
                if wrong:
                    repeat = f"--seed {seed} --only {number}"
                    failures.append(f"{repeat}: {case.kind}, {case.what}: {'; '.join(wrong)}")
                    print(failures[-1], f"[{ended.err.strip()[-300:]}]", file=sys.stderr, flush=True)
                if log is not None:
                    record = {"number": number, "kind": case.kind, "what": case.what, "code": ended.code}
                    record |= {"seconds": round(ended.seconds, 2), "wrong": wrong}
                    with log.open("a") as file:
                        print(json.dumps(record), file=file)
                campaign.forget(number)
                number += 1
        finally:
            campaign.close()
    return counts, failures


@click.command()
@click.option("--seconds", type=float, default=180.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", type=int, help="Repeat this fault, and keep its folder.")
@click.option(
    "--log", type=click.Path(path_type=Path), help="A line for each fault; a later run goes on after it."
)
@click.option("--folder", type=click.Path(path_type=Path), help="To work in.  [default: a temporary one]")
def main(seconds: float, seed: int, only: int | None, log: Path | None, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        if only is not None:
            with small_disk(place / f"small-{os.getpid()}") as small:
                campaign = Campaign(place, seed, make_sources(place, small))
                case, ended, wrong = campaign.fault(only)
                campaign.close()
            print(case, ended, wrong or "survived", sep="\n")
            sys.exit(bool(wrong))
        counts, failures = run_campaign(place, seed, seconds, log)
    for (kind, verdict), count in sorted(counts.items()):
        print(f"{kind:20} {verdict:10} {count}")
    print(f"{sum(counts.values())} faults, {len(failures)} not survived")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
