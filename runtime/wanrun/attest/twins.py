"""Programs that run twice for each call: the artifact's executable, and what is compiled here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from wanrun.artifact.programs import ProfileOptions, Program
from wanrun.artifact.roles import ROLES
from wanrun.errors import WanError
from wanrun.executables.store import Native
from wanrun.executables.tolerance import ALIKE, CALL_TOLERANCES, W8A8_FACTOR, Apart, most_apart


class CannotCompileError(WanError):
    """A program that this chip's compiler refuses, so that nothing can be compared."""


class Twins:
    """What the executables of a profile give beside what is compiled here, call by call.

    Args:
        options: the profile's.
        w8a8: whether activations are rounded to 8 bits.
        tell: gets a program's name before its first call.

    Attributes:
        found: how far the results of each program were apart at most, by name.
        unloadable: why JAX does not load an executable, by the program's name.
    """

    def __init__(self, options: ProfileOptions, w8a8: bool, tell: Callable[[str], None]) -> None:
        self._options, self._factor, self._tell = options, W8A8_FACTOR if w8a8 else 1.0, tell
        self.found: dict[str, Apart] = {}
        self.unloadable: dict[str, str] = {}
        self._native: dict[str, Native] = {}

    def beside(
        self, name: str, program: Program, shipped: Callable[..., Any], native: Callable[[], Native]
    ) -> Callable[..., Any]:
        """Returns a function that calls both, compares what they return, and returns what is right.

        Args:
            name: the program's name.
            program: the program.
            shipped: the artifact's executable.
            native: compiles the program here; it is called once, before the first comparison.
        """

        def call(**arguments: Any) -> Any:
            if name not in self._native:
                self._tell(name)
                self._native[name] = _compiled(name, native)
            copied = {key: _copied(arguments[key]) for key in program.donated}
            one = shipped(**{**arguments, **copied})
            other = self._native[name].compiled(**arguments)
            apart = most_apart(one, other, self._most(program))
            self.found[name] = max(self.found.get(name, apart), apart, key=lambda each: each.share)
            return other

        return call

    def differing(self) -> Collection[str]:
        """The names of the programs whose executables give other results."""
        return [name for name, apart in self.found.items() if not apart.agrees]

    def keep(self) -> None:
        """Keeps what was compiled here of the programs that differ, for later runs."""
        for name in self.differing():
            self._native[name].keep()

    def _most(self, program: Program) -> float:
        """Returns the relative error that is allowed of a program's results."""
        if ROLES[program.role].when in ("media", "video"):
            return max(ALIKE, CALL_TOLERANCES[self._options.vae_dtype])
        return self._factor * CALL_TOLERANCES[self._options.dtype]


def _compiled(name: str, native: Callable[[], Native]) -> Native:
    try:
        return native()
    except MemoryError:
        raise
    except Exception as error:  # the compiler's are RuntimeErrors
        found = " ".join(str(error).split())[:300]
        raise CannotCompileError(f"{name} cannot be compiled here, to be compared", found=found) from error


def _copied(tree: Any) -> Any:
    """Returns copies of arrays that a call takes away."""
    import jax

    def again(array: Any) -> Any:
        return jax.device_put(np.array(array), array.sharding) if isinstance(array, jax.Array) else array

    return jax.tree.map(again, tree)
