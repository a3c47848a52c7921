"""The programs of one profile, and the weights they are bound to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.programs import Profile, Program, with_role
from wanrun.artifact.slots import LORA
from wanrun.weights.layers import LayerStream
from wanrun.weights.loras import AppliedLora, FilledSlots
from wanrun.weights.store import WeightStore


class Programs(Mapping[str, Program]):
    """A profile's programs by name, as the manifest describes them, with their executables and weights.

    This object owns nothing: the opened artifact owns executables and weights, and its profiles share them.
    Raises ArtifactError if a program or an executable is missing or damaged; all of them are checked at once.

    ``names`` are the programs that are used; None for all of the profile. ``experts`` are the transformers,
    the high-noise one first. ``placement`` says where they are kept. ``both``: on the device; ``host``: one
    on the device and the other in host memory; ``one``: one on the device, the other is read again at the
    boundary; ``stream``: some layers of one on the device.
    """

    def __init__(
        self,
        profile: Profile,
        weights: WeightStore,
        names: Collection[str] | None = None,
        experts: Sequence[str] = (),
        placement: str = "both",
    ) -> None:
        self.profile, self.weights = profile, weights
        self._programs = weights.executables.check(profile, names)
        self._experts, self._placement = tuple(experts), placement

    def __getitem__(self, name: str) -> Program:
        return self._programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def with_role(self, *roles: str) -> tuple[str, ...]:
        """The names of the programs with these roles, in the order in which they run."""
        return with_role(self._programs, *roles)

    def components(self, name: str) -> list[str]:
        """The components whose weights a program takes, in the order of its inputs."""
        return [key for key in self._programs[name].inputs if key in self.weights.components]

    def request(self, *, programs: Iterable[str] = (), components: Iterable[str] = ()) -> list[Future[Any]]:
        """Starts to load what is named and not loaded yet, in order; returns the futures of all."""
        return [*self.weights.request(components), *self.weights.executables.request(self.profile, programs)]

    def expect(self, experts: Sequence[str]) -> list[Future[Any]]:
        """Starts to load experts of later steps, as far as they fit with the one that runs."""
        if self._placement == "both":
            return self.request(components=experts)
        return self.weights.prefetch(experts) if self._placement == "host" else []

    def streamed(self, expert: str) -> LayerStream:
        """Returns an expert on its way through the device; releases one that host memory cannot keep."""
        if not self.weights.keeps_layers:
            self.release(besides=expert)
        return self.weights.stream(expert)

    def release(self, besides: str | None = None) -> None:
        """Releases all experts but one; what is asked for again is loaded, or streams, anew."""
        for expert in self._experts:
            if expert != besides:
                self.weights.release(expert)

    def slots(self, loras: Sequence[AppliedLora] = ()) -> FilledSlots:
        """Returns the slots that programs take besides the experts' weights, as LoRAs fill them."""
        return self.weights.slots(self.profile.options, loras)

    def of_expert(
        self, name: str, expert: str, loras: Sequence[AppliedLora] = ()
    ) -> Callable[..., Mapping[str, Any]]:
        """Binds a program to an expert's weights, if it takes any; releases another expert that does not fit.

        ``loras`` change the expert. Raises ArtifactError if the program or the weights cannot be loaded;
        UsageError if the LoRAs do not fit the program's slots.
        """
        if self._placement != "both":
            self.release(besides=expert)
        takes_weights = TRANSFORMERS[0] in self._programs[name].inputs
        return self.bound(name, loras, **{TRANSFORMERS[0]: expert} if takes_weights else {})

    def bound(
        self, name: str, loras: Sequence[AppliedLora] = (), **components: str
    ) -> Callable[..., Mapping[str, Any]]:
        """Binds a program to its weights, after waiting for both; the result takes the other inputs by name.

        A program that takes a whole transformer is bound to the slots of this expert too, which ``loras``
        change. ``components`` maps an input's name to the component to bind, where the two names differ:
        ``transformer="transformer_2"``. The executable is the same.

        Raises ArtifactError if the program or the weights cannot be loaded; ValueError if the program has no
        such weight input.
        """
        inputs = self.components(name)
        if unknown := components.keys() - set(inputs):
            raise ValueError(f"{name} takes no weights {sorted(unknown)}")
        named = {key: components.get(key, key) for key in inputs}
        *_, program = self.request(programs=[name], components=named.values())
        weights = {key: self.weights.weights(component) for key, component in named.items()}
        if TRANSFORMERS[0] in named and LORA in self._programs[name].inputs:
            slots, expert = self.slots(loras), named[TRANSFORMERS[0]]
            weights[LORA] = slots.of(expert)
            weights[TRANSFORMERS[0]] = slots.changed(expert, weights[TRANSFORMERS[0]])
        return functools.partial(self.weights.opened.waits.result(program), **weights)
