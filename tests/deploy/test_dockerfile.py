"""The Dockerfile's images: which there are, and how the versions of their packages are chosen."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.deploy import DEPLOY, REPOSITORY, dockerfile, unknown

TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
PAGES = [REPOSITORY / "Dockerfile", DEPLOY / "README.md", REPOSITORY / "docs" / "serving.md"]


def stages() -> dict[str, str]:
    """Each stage by its name, with what it begins with."""
    return {name: origin for origin, name in re.findall(r"^FROM (\S+) AS (\w+)$", TEXT, re.MULTILINE)}


def part(name: str) -> str:
    """The lines of a stage."""
    (lines,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(lines)


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, REPOSITORY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_server_is_the_runtime_with_an_artifact() -> None:
    """One more layer, and nothing that the runtime has already."""
    assert stages()["serve"] == "runtime" and list(stages())[-1] == "serve"  # what is built without a target
    assert [line.split()[0] for line in part("serve").split("\n") if line] == ["ARG", "COPY"]
    assert "ARTIFACT" not in part("runtime").replace("WANRUN_ARTIFACT", "")
    assert "/artifact" in dockerfile("COPY")[-1].split()


def test_targets_and_arguments_that_pages_name_exist() -> None:
    arguments = {line.split("=")[0] for line in dockerfile("ARG")}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"(?:--target |target: )(runtime|serve|build)\b", text)
        given = re.findall(r"--build-arg (\w+)=", text)
        assert targets and set(targets) <= stages().keys(), page
        assert set(given) <= arguments, page


def test_options_in_its_examples_exist() -> None:
    examples = " ".join(line[1:].strip() for line in TEXT.splitlines() if line.startswith("#   ")).replace(
        "\\ ", ""
    )
    found = re.findall(r" (?:wan|wanrun) ((?:--prompt|serve) .*?)(?= docker |$)", examples)
    assert len(found) == 3
    for arguments in found:
        assert unknown(shlex.split(arguments)) == set(), arguments


@pytest.mark.parametrize(
    ("requirements", "others"),
    [(None, {"jax==1", "numpy==2", "jax-cuda13-pjrt==1"}), ("jax==5\n# numpy==1\n", {"numpy==2"})],
)
def test_versions_are_the_artifacts_or_ours(
    tmp_path: Path, requirements: str | None, others: set[str]
) -> None:
    """The command of the stage ``wheels`` up to pip, with and without an artifact in the context.

    jax's plug-ins have its versions, so none of ours binds them once the artifact has its own.
    """
    (command,) = (line for line in dockerfile("RUN") if "pip wheel" in line)
    command = command.replace("/artifact/", f"{tmp_path}/").replace("/own", f"{tmp_path}/own")
    command = command.replace("/others", f"{tmp_path}/others").replace("pip wheel", "printf '%s '")
    (tmp_path / "constraints.txt").write_text("jax==1\nnumpy==2\njax-cuda13-pjrt==1\n")
    if requirements is not None:
        (tmp_path / "requirements.txt").write_text(requirements)
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "EXTRA": "cuda13,hub"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set((tmp_path / "others").read_text().split()) == others
    assert done.stdout.split()[-1] == ".[serve,cuda13,hub]"
