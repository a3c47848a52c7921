"""The devices that JAX may use, and one error for whatever keeps it from them."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from wanrun.artifact.environment import importing_jax, open_devices, unusable_devices
from wanrun.errors import ArtifactError, Mismatch

OPEN = """
import sys
from wanrun.artifact.environment import open_devices
from wanrun.errors import ArtifactError

platform = sys.argv[1] if len(sys.argv) > 1 else None
try:
    print(*{device.platform for device in open_devices(platform)})
except ArtifactError as error:
    print(error)
"""


def opened(platform: str | None, named: str | None) -> str:
    """What a fresh process opens, or its error: JAX reads JAX_PLATFORMS once."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if named is not None:
        environment["JAX_PLATFORMS"] = named
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *([platform] if platform else [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("named", [None, "", "cuda,cpu"])
def test_the_platform_is_there(named: str | None) -> None:
    """A named platform without a device is no error beside one that has some."""
    assert opened("cpu", named) == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("named", ["cuda", "gpu", "tpu,cpu", "nonsense", " cpu"])
def test_the_variable_keeps_jax_from_the_platform(named: str) -> None:
    line = opened("cpu", named)
    assert line.startswith(f"there is no cpu device; found JAX_PLATFORMS={named!r}"), line
    assert line.endswith("; unset JAX_PLATFORMS, or set it to cpu") and "set JAX_PLATFORMS=''" not in line
    if named not in ("cuda", "gpu"):  # where there is a GPU, JAX says more
        assert "Unable to initialize backend" in line


@pytest.mark.slow
def test_any_platform() -> None:
    assert opened(None, "cpu") == "cpu"
    assert opened(None, "nonsense").startswith("there is no device that JAX may use; found JAX_PLATFORMS=")


def test_a_platform_that_this_machine_has_not() -> None:
    line = opened("tpu", None)
    assert line.startswith("there is no tpu device; found Unable to initialize backend 'tpu'")
    assert line.endswith("; run where there is one, or compile a target for this machine")


@pytest.mark.parametrize(
    ("error", "reason"), [(AssertionError(), ""), (RuntimeError("jaxlib is too old."), "jaxlib is too old")]
)
def test_what_jax_raises(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def refuse(platform: str | None) -> None:
        raise error

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ArtifactError) as caught:
        open_devices()
    assert caught.value.found == (reason or "none")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = "JAX_PLATFORMS='cpu'" + (f", {reason}" if reason else "")
    mismatch = Mismatch("platform", "cpu", found, "unset JAX_PLATFORMS, or set it to cpu")
    assert unusable_devices({"platform": "cpu", "variables": {}}) == [mismatch]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_LOGGING_LEVEL", "loud", 'Invalid value "loud" for JAX flag jax_logging_level'),
    ],
)
def test_a_variable_that_jax_does_not_take(name: str, value: str, reason: str) -> None:
    code = (
        "from wanrun.artifact.environment import open_devices\nfrom wanrun.errors import UsageError\n"
        "try: open_devices('cpu')\nexcept UsageError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("JAX does not take a variable of the environment; ")
    assert reason in done.stdout and f"{name}={value!r}" in done.stdout and "; unset it" in done.stdout


def test_other_errors_are_not_those_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    with pytest.raises(ValueError, match="ours"), importing_jax():
        raise ValueError("ours")
