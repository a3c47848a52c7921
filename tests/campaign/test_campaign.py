"""A slice of the campaign, with the day's seed; its judge, its damage, its seeds."""

from __future__ import annotations

import datetime
import random
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from campaign.__main__ import Campaign, campaign_in, run_campaign, working_folder
from campaign.damage import KINDS, files_below
from campaign.fault import Call, Case, Ended, problems, rng_of
from campaign.kinds import WEIGHTS
from campaign.soak import growth
from campaign.sources import Sample, toy

SECONDS = 5.0


@pytest.mark.thorough
def test_every_fault_is_survived(toy_artifact: Path, toy_checkpoint: Path, ti2v_checkpoint: Path) -> None:
    """A fault that fails is told with the options that repeat it, of which the seed is one."""
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    with working_folder() as folder:
        sample = Sample(toy_checkpoint, toy_artifact, other=toy(folder, "wan2.1-t2v", 1))
        with campaign_in(folder, seed, [sample], [ti2v_checkpoint]) as campaign:
            counts, failures = run_campaign(campaign, SECONDS, repeats=2)
    print(f"seed {seed}: {counts.total()} faults, {dict(counts)}")
    assert failures == []
    assert sum(count for (_, verdict), count in counts.items() if verdict == "fails once") <= 1
    assert counts.total() > 3
    assert len({kind for kind, _ in counts}) > 2


def whole(artifact: Path) -> str | None:
    return None


def damaged(artifact: Path) -> str | None:
    return "weights/x is missing"


def call(output: Path | None = None, codes: tuple[int, ...] = (0, 3)) -> Call:
    return Call("wanrun", ["--list"], frozenset(codes), output)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(0, 1.0, ""), []),
        (Ended(3, 1.0, "error: it is damaged\n"), []),
        (Ended(0, 1.0, "warning: one\nwarning: two\n"), []),
        (Ended(None, 60.0, ""), ["hangs: no end in 60 s"]),
        (Ended(2, 1.0, "error: no\n"), ["exit code 2, which is not one of [0, 3]"]),
        (Ended(-11, 1.0, ""), ["exit code -11"]),
        (Ended(3, 1.0, "error: one\nerror: two\n"), ["2 lines on stderr"]),
        (
            Ended(1, 1.0, "error: internal error: KeyError\n"),
            ["exit code 1, which is not one of [0, 3]", "an internal error"],
        ),
        (Ended(0, 1.0, "Traceback\n"), ["1 lines on stderr", "an internal error"]),
        (Ended(130, 1.0, "interrupted\n"), ["exit code 130, which is not one of [0, 3]"]),
    ],
)  # fmt: skip
def test_what_the_judge_says(ended: Ended, expected: list[str]) -> None:
    assert problems(Case("x", "", [call()]), [ended], whole) == expected


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(143, 1.0, "terminated\n", 2.0), []),
        (Ended(-15, 0.1, "", 0.1), []),
        (Ended(-15, 0.1, "", 2.0), ["SIGTERM ended it without a word"]),
        (Ended(143, 6.0, "terminated\n", 2.0), ["6.0 s from the signal to the end"]),
        (Ended(130, 1.0, "interrupted\n", 2.0), ["exit code 130, which is not one of [0, 3]"]),
        (Ended(-11, 1.0, "", 2.0), ["exit code -11"]),
        (Ended(139, 1.0, "", 2.0), ["exit code 139"]),
        (Ended(0, 0.1, "", 2.0), []),
        (Ended(0, 1.5, "", 2.0), ["SIGTERM was ignored: exit code 0 after 1.5 s"]),
        (Ended(143, 1.0, "terminated\n", None), ["exit code 143, which is not one of [0, 3]"]),
    ],
)
def test_what_the_judge_says_after_a_signal(ended: Ended, expected: list[str]) -> None:
    case = Case("x", "", [call()], signal=signal.SIGTERM)
    assert problems(case, [ended], whole) == expected


@pytest.mark.parametrize(
    ("frame", "after", "judged"),
    [
        ("<frozen site>", 0.1, []),
        ("/x/runtime/wancli/run.py", 0.1, ["exit code 1, which is not one of [0, 3]"]),
        ("<frozen site>", 0.9, ["exit code 1, which is not one of [0, 3]"]),
    ],
)
def test_ctrl_c_before_python_has_imported_anything_of_ours(
    frame: str, after: float, judged: list[str]
) -> None:
    trace = f'Traceback (most recent call last):\n  File "{frame}", line 1\nKeyboardInterrupt\n'
    case = Case("x", "", [call()], signal=signal.SIGINT)
    assert problems(case, [Ended(1, 0.1, trace, after)], whole)[:1] == judged


def test_the_judge_sees_videos_artifacts_and_what_is_left(tmp_path: Path) -> None:
    output = tmp_path / "video.npy"
    case = Case("x", "", [call(output)], {b"right"}, artifact=tmp_path, clean=[tmp_path])
    good = Ended(0, 1.0, "")
    assert len(problems(case, [good], whole)) == 1  # no video
    output.write_bytes(b"right")
    assert problems(case, [good], whole) == []
    output.write_bytes(b"wrong")
    (tmp_path / ".artifact.building").mkdir()
    case = replace(case, kept={tmp_path / "notes": b"mine"})
    found = problems(case, [Ended(3, 1.0, "error: no\n")], damaged)
    video, half, changed, left = found
    assert "another" in video and "weights/x" in half
    assert changed.endswith(f" {tmp_path / 'notes'}") and left.endswith(f" {tmp_path / '.artifact.building'}")


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS], ids=lambda kind: str(kind.__name__))
def test_damage_changes_a_file_and_repeats(
    kind: Callable[[random.Random, Path], None], tmp_path: Path
) -> None:
    content = bytes(range(256)) * 40

    def state(path: Path) -> tuple[int, int, bytes] | None:
        """Kind, size and beginning of a file; None if there is none."""
        if not path.is_symlink() and not path.exists():
            return None
        status, data = path.lstat(), b""
        if path in files_below(path.parent):
            with path.open("rb") as file:
                data = file.read(2 * len(content))
        return status.st_mode, status.st_size, data

    seen = []
    for name in ("one", "two"):
        path = tmp_path / name / "file"
        path.parent.mkdir()
        path.write_bytes(content)
        before = state(path)
        kind(rng_of(7, 3), path)
        assert state(path) != before
        seen.append(state(path))
    assert seen[0] == seen[1]


def test_a_seed_repeats_its_faults() -> None:
    draws = [[rng_of(seed, number).random() for number in range(20)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len({maker.__name__ for maker, _ in WEIGHTS}) == len(WEIGHTS)


class Scripted:
    """A campaign whose faults fail as a script says, and then no more."""

    def __init__(self, process: bool, *wrong: bool) -> None:
        self._process, self._wrong = process, list(wrong)

    def fault(self, number: int) -> tuple[Case, list[Ended], list[str]]:
        wrong = self._wrong.pop(0) if self._wrong else False
        return Case("x", "", [call()], process=self._process), [Ended(0, 1.0, "")], ["bad"] * wrong

    def repeat(self, number: int) -> str:
        return f"--only {number}"

    def forget(self, number: int) -> None:
        pass


@pytest.mark.parametrize(
    ("process", "wrong", "repeats", "verdict"),
    [
        (True, [True], 0, "FAILS"),
        (True, [True], 2, "fails once"),
        (True, [True, False, True], 2, "FAILS"),
        (False, [True], 2, "FAILS"),
        (False, [], 2, "exit 0"),
    ],
)
def test_what_fails_by_content_or_twice_counts(
    process: bool, wrong: list[bool], repeats: int, verdict: str
) -> None:
    campaign = cast(Campaign, Scripted(process, *wrong))
    counts, failures = run_campaign(campaign, 0.01, repeats=repeats)
    assert counts["x", verdict] >= 1
    assert len(failures) == (verdict == "FAILS")
    if failures:
        assert failures[0].startswith("--only 0: ") and failures[0].endswith(" bad")


def test_the_soak_sees_growth() -> None:
    rng = random.Random(0)
    steady = [{"resident": 10**9 + rng.randrange(10**6), "threads": 20, "descriptors": 9} for _ in range(40)]
    assert growth(steady) == []
    leak = [{**one, "descriptors": 9 + number // 10} for number, one in enumerate(steady)]
    (line,) = growth(leak)
    assert line.startswith("descriptors: ") and re.findall(r"\d+", line) == ["10", "12"]
    fat = [{**one, "resident": one["resident"] + number * 10**7} for number, one in enumerate(steady)]
    assert len(growth(fat)) == 1
