"""A limit of the address space that JAX cannot live with is one line, before JAX ends the process."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from wanrun.errors import WanError
from wanrun.machine import address_space
from wanrun.machine.address_space import BYTES_A_CORE, JAX_BYTES, MOST_CORES, check_address_space


def limited(monkeypatch: pytest.MonkeyPatch, limit: int, taken: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    monkeypatch.setattr(address_space, "_taken", lambda: taken)


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_as_much_as_is_needed(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    needed, taken = JAX_BYTES + min(cores, MOST_CORES) * BYTES_A_CORE, 123_000_000
    limited(monkeypatch, needed + taken, taken)
    check_address_space(cores)
    limited(monkeypatch, needed + taken - 1, taken)
    with pytest.raises(WanError, match="ulimit -v") as caught:
        check_address_space(cores)
    assert caught.value.exit_code == 1


def test_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY, 2**60)
    check_address_space(2)


@pytest.mark.parametrize(
    ("kind", "megabytes"), [("AS", 300), ("AS", 600), ("AS", 900), ("AS", 1200), ("DATA", 400)]
)
def test_jax_is_not_imported(kind: str, megabytes: int) -> None:
    """At each of these, JAX's own start ends in SIGABRT, SIGSEGV or a failed import."""
    program = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_{kind}, ({megabytes} * 2**20,) * 2)\n"
        "from wanrun.machine.environment import importing_jax\n"
        "from wanrun.errors import WanError\n"
        "try:\n"
        "    with importing_jax():\n"
        "        import jax\n"
        "except WanError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "leaves too little for JAX" in done.stdout
