"""Programs that run twice for each call: the artifact's executable, and one that is compiled here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from wanrun.artifact.programs import ProfileOptions, Program
from wanrun.artifact.roles import ROLES
from wanrun.errors import WanError, shortened
from wanrun.executables.executables import Native
from wanrun.executables.tolerance import ALIKE, CALL_TOLERANCES, RUN, W8A8_FACTOR, Apart, most_apart

COPIED = 1e-6
"""The relative error of what only moves values."""


class CannotCompileError(WanError):
    """A program that this chip's compiler refuses, so that nothing can be compared."""


class Twins:
    """A comparison of a profile's executables with the same programs compiled here, call by call.

    ``w8a8`` says whether activations are rounded to 8 bits. ``tell`` gets what is about to be done, and
    whether the executables are to blame if it ends the process. By the program's name, ``found`` has the
    largest difference of the results, and ``unusable`` why an executable cannot be loaded or does not run.
    """

    def __init__(self, options: ProfileOptions, w8a8: bool, tell: Callable[[str, bool], None]) -> None:
        self._options, self._factor, self._tell = options, W8A8_FACTOR if w8a8 else 1.0, tell
        self.found: dict[str, Apart] = {}
        self.unusable: dict[str, str] = {}
        self._native: dict[str, Native] = {}

    def beside(
        self, name: str, program: Program, shipped: Callable[..., Any], native: Callable[[], Native]
    ) -> Callable[..., Any]:
        """Returns a function that calls both, compares their results, and returns the one of this machine's.

        ``shipped`` is the artifact's executable. ``native`` compiles the program here; it is called once,
        before the first comparison.
        """

        def call(**arguments: Any) -> Any:
            if name not in self._native:
                self._tell(f"while {name} was compiled here", False)
                self._native[name] = _compiled(name, native)
                self._tell(f"while {name} ran", True)
            copied = {key: _copied(arguments[key]) for key in program.donated}
            one = None if name in self.unusable else self._ran(name, shipped, {**arguments, **copied})
            other = self._native[name].compiled(**arguments)
            if one is not None:
                apart = most_apart(one, other, self._most(program), _run(program))
                self.found[name] = max(self.found.get(name, apart), apart, key=lambda each: each.share)
            return other

        return call

    def _ran(self, name: str, shipped: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Returns an executable's result on the host; None where it does not run."""
        try:
            return jax.tree.map(np.asarray, shipped(**arguments))
        except RuntimeError as error:  # of XLA, and of what it calls
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            self.unusable[name] = _in_one_line(error)
            return None

    def native(self) -> tuple[str, ...]:
        """The names of the programs whose executables are not to be used."""
        differing = (name for name, apart in self.found.items() if not apart.agrees)
        return tuple(dict.fromkeys((*differing, *self.unusable)))

    def keep(self) -> None:
        """Keeps the local executables of the programs whose own are not to be used."""
        for name in self._native.keys() & set(self.native()):
            self._native[name].keep()

    def said(self) -> str:
        """Says how the programs agree, in one line."""
        alike = [apart for name, apart in self.found.items() if name not in self.native()]
        worst = max(alike, key=lambda one: one.share, default=None)
        parts = [] if worst is None else [f"{len(alike)} programs agree with what is compiled here, {worst}"]
        for name in self.native():
            how = self.unusable.get(name)
            parts.append(f"{name} differs {self.found[name]}" if how is None else f"{name} fails: {how}")
        return "; ".join(parts)

    def _most(self, program: Program) -> float:
        """Returns the relative error that is allowed of a program's results."""
        when = ROLES[program.role].when
        if when == "loading":
            return COPIED
        if when == "attest":
            return ALIKE
        if when in ("media", "video"):
            return max(ALIKE, CALL_TOLERANCES[self._options.vae_dtype])
        return CALL_TOLERANCES[self._options.dtype] * self._factor


def _run(program: Program) -> int:
    """Returns how many differences are added: of the transformer's; others may be rounded to one side."""
    return RUN if ROLES[program.role].when in ("expert", "steps") else 1


def _compiled(name: str, native: Callable[[], Native]) -> Native:
    try:
        return native()
    except MemoryError:
        raise
    except Exception as error:  # the compiler's are RuntimeErrors
        raise CannotCompileError(
            "unsupported", f"{name} cannot be compiled here, to be compared", found=_in_one_line(error)
        ) from error


def _in_one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), 300)


def _copied(tree: Any) -> Any:
    """Returns copies of arrays that a call takes away."""

    def again(array: Any) -> Any:
        return jax.device_put(np.array(array), array.sharding) if isinstance(array, jax.Array) else array

    return jax.tree.map(again, tree)
