"""The artifacts that a worker holds: loaded by use, and the least used one released for want of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import wanrun
from wanrun.errors import CancelledError, WanError
from wanserve.messages import ChangedError

if TYPE_CHECKING:
    from wanrun import CancelToken, Pipeline, Timings

MARGIN: Final = 1.2
"""Of an artifact's weights, what it takes with its programs and what they compute."""

_FULL: Final = (
    *("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "annot allocate memory"),
    "can't start new thread",  # for want of a stack
    "failed to map segment",  # of a shared library that is imported
)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host has too little memory."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _FULL)


class Pipelines:
    """Opened artifacts by model, the least used one first.

    ``artifacts`` has, for each model, the folder, the address that it comes from, and the content digest.
    ``loading`` are keywords of ``load``, by default ``wanrun.load``. ``free`` returns the bytes that are free
    where weights go; None if that is not known.
    """

    def __init__(
        self,
        artifacts: Mapping[str, tuple[str, str, str]],
        loading: Mapping[str, Any],
        load: Callable[..., Pipeline] = wanrun.load,
        free: Callable[[], int | None] | None = None,
    ) -> None:
        self._artifacts, self._loading, self._load = artifacts, loading, load
        self._free = free or free_bytes
        self._open: dict[str, Pipeline] = {}

    @property
    def loaded(self) -> list[str]:
        """The models that are loaded, the least used one first."""
        return list(self._open)

    def get(self, model: str, timings: Timings | None = None, cancel: CancelToken | None = None) -> Pipeline:
        """Returns a model's pipeline, loaded until its first step could run.

        Raises ChangedError if the artifact was changed since the server has started; WanError as
        ``wanrun.load``; any Exception if there is too little memory, also with no other model loaded.
        """
        if model not in self._open:
            self._make_room(model)
            self._open[model] = self._loaded(model, timings, cancel)
        self._open[model] = self._open.pop(model)
        return self._open[model]

    def _loaded(self, model: str, timings: Timings | None, cancel: CancelToken | None) -> Pipeline:
        while True:
            try:
                return self._load(self._opened(model), **self._loading, timings=timings, cancel=cancel)
            except CancelledError:
                raise
            except Exception as error:
                if not self._open or not lacks_memory(error):
                    raise
            self._release()

    def _make_room(self, model: str) -> None:
        """Releases the least used models until the weights of another one fit, as far as that is known."""
        if not self._open:
            return
        try:
            components = self._opened(model).manifest.components.values()
        except WanError:
            return  # loading will fail
        needed = MARGIN * sum(component.nbytes for component in components)
        while self._open and (free := self._free()) is not None and free < needed:
            self._release()

    def _opened(self, model: str) -> wanrun.Artifact:
        folder, origin, digest = self._artifacts[model]
        artifact = wanrun.open_artifact(Path(folder), origin)
        if artifact.manifest.content_digest != digest:  # jobs were resolved for the other one
            raise ChangedError(
                "changed", f"{folder} was changed while it is served", remedy="start the server again"
            )
        return artifact

    def _release(self) -> None:
        """Closes the least used model."""
        self._open.pop(next(iter(self._open))).close()
        gc.collect()


def free_bytes() -> int | None:
    """Returns the bytes that are free on the first device, or on the host where that has its memory."""
    import jax

    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"] - statistics["bytes_in_use"])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
