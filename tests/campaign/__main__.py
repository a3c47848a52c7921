"""Runs a campaign for a given time, and prints what came of it.

python -m campaign --seconds 7200 --seed 1 --log faults.jsonl     # repeats nothing that the log has
python -m campaign --seed 1 --only 4711                           # one fault again, with its folder kept
python -m campaign --seconds 600 --kind race --kind kill          # some kinds alone

A fault is survived if the command ends in time with a documented exit code and at most one line, nothing is
left behind, the artifact is whole, and the video, if there is one, has the bits of an undamaged run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from campaign.fault import Case, Ended, problems, rng_of
from campaign.kinds import WEIGHTS, kinds
from campaign.moments import SIGNALS
from campaign.runner import Runner
from campaign.sources import Sample, Sources, make_samples, toy
from helpers.small_disk import mounted
from wanrun.artifact.artifact import open_artifact

VARIANTS = ("wan2.1-t2v", "wan2.2-i2v")
"""Whose artifacts are damaged."""

CONVERTED = ("wan2.1-flf2v", "wan2.1-vace", "wan2.2-ti2v", "wan2.2-animate")
"""Whose checkpoints are damaged too."""


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """An empty folder, in memory if possible: copying an artifact of a thousand files costs 1 s on a disk."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=place) as folder:
        yield Path(folder)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path | None]:
    """A small file system, where this user may mount one."""
    folder.mkdir()
    try:
        with mounted(folder, megabytes * 2**20) as done:
            yield folder if done else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Campaign:
    """Faults of one seed, one after the other.

    Args:
        folder: to work in.
        seed: of all faults.
        sources: what is damaged; the videos are added.
        only: names of the makers that are used; none: all.
    """

    def __init__(self, folder: Path, seed: int, sources: Sources, only: Collection[str] = ()) -> None:
        self._folder, self._seed, self._only = folder, seed, sorted(only)
        (folder / "cache").mkdir(exist_ok=True)
        self._runner = Runner(folder)
        for sample in sources.samples:
            self._make_videos(sample)
        self._kinds = {
            maker: weight for maker, weight in kinds(sources).items() if not only or _name(maker) in only
        }

    def close(self) -> None:
        """Ends the worker."""
        self._runner.close()

    def fault(self, number: int) -> tuple[Case, list[Ended], list[str]]:
        """Makes one fault, runs it, and judges."""
        rng, folder = rng_of(self._seed, number), self._folder / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (maker,) = rng.choices(list(self._kinds), list(self._kinds.values()))
        case = maker(rng, folder)
        ended = self._runner(case)
        return case, ended, problems(case, ended, whole)

    def repeat(self, number: int) -> str:
        """The options that repeat a fault."""
        return " ".join([f"--seed {self._seed} --only {number}", *(f"--kind {name}" for name in self._only)])

    def forget(self, number: int) -> None:
        """Removes a fault's folder."""
        shutil.rmtree(self._folder / str(number), ignore_errors=True)

    def _make_videos(self, sample: Sample) -> None:
        """The videos that an undamaged artifact gives, with its own weights and with the others."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        artifact = Path(shutil.copytree(sample.artifact, folder / "artifact"))
        for name in ("video", "other_video"):
            output = folder / f"{name}.npy"
            calls = [sample.run(artifact, output)]
            if name == "other_video":
                calls.insert(0, sample.convert(artifact, "--force", other=True))
            for call in calls:
                (ended,) = self._runner(Case("none", "", [call]))
                if ended.code != 0:
                    raise SystemExit(f"{call}, undamaged, ended with {ended.code}: {ended.err}")
            setattr(sample, name, output.read_bytes())
        assert sample.video != sample.other_video
        shutil.rmtree(folder)


def _name(maker: Any) -> str:
    return str(maker.func.__name__)


def whole(artifact: Path) -> str | None:
    """What is wrong with an artifact; None if it is whole, or there is none."""
    from wanbuild.check.verify import check_files
    from wanrun.errors import WanError

    if not artifact.exists():
        return None
    try:
        check_files(open_artifact(artifact), lambda line: None)
    except WanError as error:
        return str(error)
    return None


@contextlib.contextmanager
def campaign_in(
    folder: Path,
    seed: int,
    samples: Sequence[Sample],
    checkpoints: Sequence[Path],
    only: Collection[str] = (),
) -> Iterator[Campaign]:
    """A campaign that works in a folder, and a small disk for it."""
    heeded = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in heeded.items():
        # Commands would inherit what is ignored, and rightly go on: under nohup, or because libtpu ignored
        # SIGHUP when it was loaded, without Python's knowledge.
        if handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    size = max(
        sum(path.stat().st_size for path in one.artifact.rglob("*") if path.is_file()) for one in samples
    )
    with small_disk(folder / f"small-{os.getpid()}", max(48, 4 + 2 * size // 2**20)) as small:
        campaign = Campaign(folder, seed, Sources(samples, checkpoints, small), only)
        try:
            yield campaign
        finally:
            campaign.close()
            for number, handler in heeded.items():
                signal.signal(number, handler)


def run_campaign(
    campaign: Campaign, seconds: float, log: Path | None = None, repeats: int = 0
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Runs faults for a time.

    Args:
        campaign: whose faults.
        seconds: how long it goes on.
        log: a line for each fault; its faults are not repeated.
        repeats: how often a fault of moments that was not survived is tried again. It counts as a failure if
            it fails once more: a moment does not come back, and what does is a defect that can be found.

    Returns:
        Counts by kind and verdict; and the failures, each with what repeats it.
    """
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures: list[str] = []
    number = sum(1 for _ in log.open()) if log is not None and log.exists() else 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        case, ended, wrong = campaign.fault(number)
        verdict = f"exit {ended[0].code}"
        if wrong:
            verdict = "FAILS"
            words = " | ".join(one.err.strip()[-300:] for one in ended)
            failure = f"{campaign.repeat(number)}: {case.kind}, {case.what}: {'; '.join(wrong)}"
            print(f"{failure} [{words}]", file=sys.stderr, flush=True)
            if repeats and case.process and not any(campaign.fault(number)[2] for _ in range(repeats)):
                verdict = "fails once"
            else:
                failures.append(failure)
        counts[case.kind, verdict] += 1
        if log is not None:
            record = {"number": number, "kind": case.kind, "what": case.what, "wrong": wrong}
            record |= {
                "codes": [one.code for one in ended],
                "seconds": [round(one.seconds, 2) for one in ended],
            }
            with log.open("a") as file:
                print(json.dumps(record), file=file)
        campaign.forget(number)
        number += 1
    return counts, failures


@click.command()
@click.option("--seconds", type=float, default=180.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", type=int, help="Repeat this fault, and keep its folder (with --folder).")
@click.option("--kind", multiple=True, type=click.Choice([maker.__name__ for maker, _ in WEIGHTS]))
@click.option(
    "--log", type=click.Path(path_type=Path), help="A line for each fault; a later run goes on after it."
)
@click.option("--folder", type=click.Path(path_type=Path), help="To work in.  [default: a temporary one]")
def main(
    seconds: float, seed: int, only: int | None, kind: tuple[str, ...], log: Path | None, folder: Path | None
) -> None:
    with working_folder() as temporary:
        place = (folder or temporary).absolute()
        place.mkdir(parents=True, exist_ok=True)
        samples = make_samples(place, VARIANTS)
        checkpoints = [toy(place, variant) for variant in CONVERTED]
        with campaign_in(place, seed, samples, checkpoints, kind) as campaign:
            if only is not None:
                case, ended, wrong = campaign.fault(only)
                print(case, *ended, wrong or "survived", sep="\n")
                sys.exit(bool(wrong))
            counts, failures = run_campaign(campaign, seconds, log)
    for (name, verdict), count in sorted(counts.items()):
        print(f"{name:20} {verdict:10} {count}")
    print(f"{sum(counts.values())} faults, {len(failures)} not survived")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
