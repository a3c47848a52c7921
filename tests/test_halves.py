"""Tests are in two halves: those in parity/ have torch, and the others run, and are complete, without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.rules import parsed

TESTS = Path(__file__).parent
RUNTIME = {"runtime/wanrun": "runtime", "runtime/wancli": "cli"}
"""Where the tests of a package are, below this folder."""

WITH_TORCH = {"torch", "diffusers", "transformers", "peft", "accelerate"}
FOR_PARITY = {
    "reference_guidance",
    "published_shapes",
    "reference_models",
    "vae_reference",
    "whole_path",
}
"""Helpers that have torch too."""


def imported(file: Path) -> set[str]:
    """The top packages that a file imports, and the helpers by their own names."""
    names = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    helpers = {name.split(".")[1] for name in names if name.startswith("helpers.")}
    torch = {"torch"} if "safetensors.torch" in names else set()
    return {name.partition(".")[0] for name in names} | helpers | torch


@pytest.mark.thorough
def test_tests_with_torch_are_in_parity() -> None:
    files = [file for file in TESTS.rglob("*.py") if "parity" not in file.relative_to(TESTS).parts]
    with_torch = {file for file in files if imported(file) & {*WITH_TORCH, *FOR_PARITY}}
    assert {file.stem for file in with_torch if file.parent.name == "helpers"} == FOR_PARITY
    assert {file for file in with_torch if file.parent.name != "helpers"} == set()


@pytest.mark.parametrize(("package", "tests"), RUNTIME.items())
def test_each_room_has_its_tests(package: str, tests: str) -> None:
    missing, root = [], TESTS.parent / package
    for room in sorted(file.parent.relative_to(root) for file in root.rglob("__init__.py")):
        place = TESTS / tests / room
        if not (list(place.glob("test_*.py")) or place.with_name(f"test_{place.name}.py").is_file()):
            missing.append(str(room))
    assert missing == []


@pytest.mark.parametrize("name", sorted(WITH_TORCH))
def test_without_torch_nothing_imports_it(request: pytest.FixtureRequest, name: str) -> None:
    """In this process where the option is given, and in every process that finds the hook."""
    hook = TESTS / "helpers" / "without_torch"
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        env={"PYTHONPATH": str(hook)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")
    assert f"'{name}' in tests" in done.stderr
    if request.config.getoption("--without-torch"):
        with pytest.raises(ModuleNotFoundError, match=f"'{name}' in tests"):
            __import__(name)
