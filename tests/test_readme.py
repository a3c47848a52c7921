"""README.md's commands work in their order, and what the pages name is there. `make docs` checks links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.readme import TABLES, parts
from wanbuild.targets.chip import GIB
from wanbuild.targets.chips import CHIPS

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")

PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in (".", "benchmarks", "docs", "docs/deploy", "docs/notes", "training")
    for path in (REPOSITORY / folder).glob("*.md")
)
CODE = [
    path
    for folder in ("build", "runtime", "tests", "benchmarks", "docs", "training")
    for path in (REPOSITORY / folder).rglob("*.py")
]

STAND_INS = {"832x480": "96x64", "--frames 81": "--frames 1"}
"""What is smaller here than in README.md, beside the checkpoint."""

HUB_ID = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
"""The checkpoint for which a toy stands in."""


def commands() -> list[str]:
    """The command lines of README.md, in order, without comments."""
    lines = re.findall(r"^    ((?:make|pip|wanbuild|wanrun) .*)$", TEXT, re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_declarations_say(name: str) -> None:
    """After a change of an option or a route: PYTHONPATH=tests python tests/helpers/readme.py"""
    _, found, _ = parts(name)
    assert found == TABLES[name].made()


def test_what_is_made_and_installed_is_there() -> None:
    made = {shlex.split(line)[1] for line in commands() if line.startswith("make ")}
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= made <= set(targets)
    extras = re.findall(r"pip install '\.\[(\w+)\]'", TEXT)
    assert extras
    assert all(f"\n{extra} = [" in (REPOSITORY / "pyproject.toml").read_text() for extra in extras)


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_paths_that_a_page_names_exist(name: str) -> None:
    """Paths from the top of the repository, and modules by their last folders, such as `models/params.py`."""
    text = page(name)
    tops = "artifacts|benchmarks|build|docs|runtime|tests|training"
    for path in re.findall(rf"(?<![\w/.{{-])((?:{tops})/[\w./-]*\w)", text):
        assert path.startswith("artifacts/demo") or (REPOSITORY / path).exists(), path
    modules = [path.as_posix() for path in CODE]
    for module in re.findall(r"`([\w/]+\.py)`", text):
        assert any(path.endswith(f"/{module}") for path in modules), module


@pytest.mark.parametrize("name", PAGES)
def test_names_of_modules_that_a_page_writes_exist(name: str) -> None:
    for dotted in re.findall(r"(?<![\w.])(wan(?:run|build)\.[a-z][\w.]*\w)", page(name)):
        names = dotted.split(".")
        found = REPOSITORY / ("runtime" if names[0] == "wanrun" else "build") / names[0]
        while names := names[1:]:
            if (found / names[0]).is_dir():
                found /= names[0]
            elif (module := found / f"{names[0]}.py").is_file():
                found, names = module, names[1:]
                break
            else:
                found /= "__init__.py"
                break
        assert not names or names[0] in found.read_text(encoding="utf-8"), dotted


def test_every_chip_is_in_the_tables() -> None:
    """After a new or a corrected row: python benchmarks/card_table.py"""
    for name, chip in CHIPS.items():
        assert all(f"`{name}`" in page(f"docs/{one}.md") for one in ("targets", "planning")), name
        target = f"{name}-8" if chip.platform == "tpu" else name
        assert f" | {target} | " in page("benchmarks/RESULTS.md"), name
        if chip.platform == "cuda" and chip.memory_bytes <= 32 * GIB:
            row = f"\n| {name}, {chip.memory_bytes // GIB} GB | "
            assert row in TEXT and page("docs/small-cards.md").count(row) == 2, name


@pytest.mark.slow
def test_sections_that_are_named_exist() -> None:
    """In the pages, and in what the code says of them: the page, a comma, and the section in quotes."""
    for path in (*CODE, *(REPOSITORY / name for name in PAGES)):
        text = path.read_text(encoding="utf-8")
        for target, section in re.findall(r'(?<![\w/])([\w/]+\.md)(?:\]\([^)]*\))?,\s+"([^"]+)"', text):
            there = REPOSITORY / target
            assert " ".join(section.split()) in headings(there.read_text(encoding="utf-8")), (path, section)


@pytest.mark.thorough
def test_a_reader_comes_to_a_video(toy_checkpoint: Path, tmp_path: Path) -> None:
    """Each command as it stands, from the checkpoint to the video, and then the Python beside it."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    lines = [line for line in commands() if line.startswith(("wanbuild ", "wanrun "))]
    assert [line.split()[0] for line in lines] == ["wanbuild"] * 4 + ["wanrun"]
    for line in lines:
        for large, small in STAND_INS.items():
            line = line.replace(large, small)
        out = run(*shlex.split(line.replace(HUB_ID, str(toy_checkpoint))))
    assert out.startswith("wrote cat.mp4 (") and "TIMING SUMMARY" in out
    requirements = re.search(r"pip install \S+ -r (\S+)", TEXT)
    assert requirements is not None and (tmp_path / requirements[1]).is_file()

    (code,) = re.findall(r"^    import wanrun\n(?:    .*\n)+", TEXT, re.MULTILINE)
    run(sys.executable, "-c", textwrap.dedent(code))
    for video in ("cat.mp4", "again.mp4"):
        assert (tmp_path / video).stat().st_size > 1000
