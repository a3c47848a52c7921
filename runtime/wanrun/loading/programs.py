"""The programs of one profile, with the weights that they are bound to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from wanrun.artifact.programs import Profile, Program
from wanrun.loading.executables import Executables
from wanrun.loading.weights import WeightStore


class Programs(Mapping[str, Program]):
    """A profile's programs by name, as the manifest describes them, and what runs them.

    Nothing is held here: executables and weights are the opened artifact's, and its profiles share them.

    Args:
        profile: the profile.
        executables: the opened artifact's.
        weights: the opened artifact's.

    Raises:
        ArtifactError: if a program or an executable is missing or damaged, all of which are checked at once.
    """

    def __init__(self, profile: Profile, executables: Executables, weights: WeightStore) -> None:
        self._profile, self._executables, self._weights = profile, executables, weights
        self._programs = executables.check(profile)

    def __getitem__(self, name: str) -> Program:
        return self._programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def components(self, name: str) -> list[str]:
        """The components whose weights a program takes, in the order of its inputs."""
        return [key for key in self._programs[name].inputs if key in self._weights.components]

    def request(self, *, programs: Iterable[str] = (), components: Iterable[str] = ()) -> list[Future[Any]]:
        """Starts loading what is not loaded yet, in this order, and returns everything's futures."""
        return [
            *self._weights.request(components),
            *self._executables.request(self._profile, programs),
        ]

    def prefetch(self, components: Iterable[str]) -> list[Future[Any]]:
        """Starts reading components into host memory; as ``WeightStore.prefetch``."""
        return self._weights.prefetch(components)

    def release(self, component: str) -> None:
        """Lets go of a component's weights; as ``WeightStore.release``."""
        self._weights.release(component)

    def put(self, tree: Any) -> Any:
        """Arrays of the host, on the device: for what many calls of a program take."""
        return self._weights.put(tree)

    def bound(self, name: str, **components: str) -> Callable[..., Mapping[str, Any]]:
        """A program with its weights, which takes its other inputs by name; waits for both.

        Args:
            name: the program.
            components: the component to bind to an input, by the input's name, where it is not the component
                of that name: ``transformer="transformer_2"``. The executable is the same.

        Raises:
            ArtifactError: if the program or the weights cannot be loaded.
            ValueError: if the program takes no such weights.
        """
        inputs = self.components(name)
        if unknown := components.keys() - set(inputs):
            raise ValueError(f"{name} takes no weights {sorted(unknown)}")
        futures = self.request(programs=[name], components=[components.get(key, key) for key in inputs])
        *trees, program = (future.result() for future in futures)
        return functools.partial(program, **dict(zip(inputs, trees, strict=True)))
