"""The programs of one generation: how often each runs, and the share of one device of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from wanbuild.build_options import BuildOptions
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.vae import HISTORY
from wanbuild.plan.exchange import PlannedStep
from wanbuild.plan.prediction import Share, Time, predicted, transfer_seconds
from wanbuild.plan.work import Work, work_of
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.targets.chip import Chip
from wanrun.artifact.guiders import GUIDERS
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS, Manifest
from wanrun.artifact.mesh import Sizes, device_bytes, jax_sizes, num_devices, paired
from wanrun.artifact.programs import num_pieces
from wanrun.artifact.roles import FORMS, ROLES, Counts, RoleName
from wanrun.artifact.slots import LORA, slots_bytes, slots_of
from wanrun.denoising.guided_steps import skipping_steps
from wanrun.weights.layers import OUTSIDE, parts_of

ENCODERS = ("text_encoder", "image_encoder")
"""Components that every device runs whole, unless features are cut along ``tensor``."""

CACHE = "cache"
"""The input with the cache of earlier chunks."""


@dataclass(frozen=True)
class PlannedCalls:
    """A program of a generation, and how often it runs.

    ``component`` is that whose weights it takes, None for no weights; ``times`` is for one prompt. ``frames``
    are latent frames of which the transformer computes tokens, 0 for all of them.
    """

    name: str
    role: RoleName
    component: str | None
    times: int
    frames: int = 0


@dataclass(frozen=True)
class PlannedGeneration:
    """One generation of a model on a kind of chip.

    Options of both forms of the loop plan the form of single steps. ``streams`` is whether the transformer's
    layers stream in any case; work and temporaries are those of whole steps.
    """

    manifest: Manifest
    shape: Shape
    options: BuildOptions
    chip: Chip
    steps: int
    streams: bool = False

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components with weights."""
        return tuple(self.manifest.components)

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the transformers."""
        return tuple(name for name in TRANSFORMERS if name in self.components)

    @functools.cached_property
    def calls(self) -> tuple[PlannedCalls, ...]:
        """The programs in the order in which they run, without those that only bring weights."""
        calls = []
        for name, spec in self._counted.items():
            if ROLES[spec.role].when != "loading":
                component = next((key for key in spec.inputs if key in self.components), None)
                frames = self._frames(spec)
                made = self._counts.of_chunks(frames) if frames and ROLES[spec.role].makes else self._counts
                pieces = self.pieces(name, self._own_frames // self._counts.decoded)
                times = ROLES[spec.role].calls(made) * pieces
                calls.append(PlannedCalls(name, spec.role, component, times, frames))
        return tuple(calls)

    @property
    def chunked(self) -> bool:
        """Whether a video is made chunk by chunk."""
        return self.manifest.model.chunks is not None

    @property
    def all_steps(self) -> int:
        """The denoising steps of all chunks."""
        return self._counts.all_steps

    def _frames(self, spec: ProgramSpec) -> int:
        """Returns the latent frames of a chunk, and of those that are kept with it; 0 of other programs."""
        if not self.chunked or ROLES[spec.role].when != "steps":
            return 0
        given = dict(zip(spec.inputs, spec.arguments, strict=True))
        kept = [] if ROLES[spec.role].makes else [given[CACHE].get("latents")]
        return sum(one.shape[2] for one in (given["latents"], *kept) if one is not None)

    @property
    def _own_frames(self) -> int:
        """The latent frames of a video, without the leading ones."""
        return self.builder.latent_shape[0] - self.builder.leading

    def pieces(self, name: str, frames: int, further: bool = False) -> int:
        """Returns how often a decoder is called for so many latent frames; 1 for any other program.

        ``further``: the frames follow those of an earlier chunk.
        """
        if not self.carried(name):
            return 1
        spec = self._counted[name]
        size = spec.arguments[spec.inputs.index("latents")].shape[1]
        return num_pieces(frames + 1, size, ()) if further else num_pieces(frames, size, spec.inputs)

    def carried(self, name: str, sizes: Sizes = MappingProxyType({})) -> int:
        """Returns the bytes of the history that a decoder's pieces pass on, on one device; 0 of others."""
        spec = self._counted[name]
        whole = [tree for key, tree in zip(spec.inputs, spec.arguments, strict=True) if key == HISTORY]
        return int(_bytes_of(whole) * self._columns(sizes))

    def _columns(self, sizes: Sizes) -> float:
        """Returns the part of a video's columns that one device of a mesh encodes and decodes."""
        columns = self.builder.latent_shape[2]
        return -(-columns // num_devices(sizes)) / columns

    @functools.cached_property
    def _counts(self) -> Counts:
        """What decides how often programs run: one window, with images and videos if the model takes them."""
        return Counts(
            form=self.options.forms[0],
            steps=self.steps,
            guided=self.steps if self.shape.guidance else 0,
            skipping=len(self._skipping),
            experts=len(self.experts),
            windows=1,
            prompts=2 if self.shape.guidance or self.options.nag else 1,
            videos=self.shape.num_videos,
            media=1,
            starts=self.options.video_to_video,
            past=2 if self.manifest.model.task.past else 0,  # an image: alone, and as a chunk
            noise=False,
            chunks=self.builder.chunks or (0,),
            decoded=1 if (chunks := self.manifest.model.chunks) is None else chunks.videos(self._own_frames),
        )

    @property
    def _skipping(self) -> range:
        """The steps of a third pass by default, if the profile's steps are built for it."""
        guider = GUIDERS["skip-layer"]
        built = self.shape.guidance and guider.name in self.options.guiders
        return skipping_steps(guider.options if built else {}, self.steps)

    def past_bytes(self, name: str) -> int:
        """Returns the bytes of the cache of earlier chunks, for a program that takes it; 0 for others."""
        spec = self._counted[name]
        whole = [tree for key, tree in zip(spec.inputs, spec.arguments, strict=True) if key == CACHE]
        return _bytes_of(whole)

    def kept_bytes(self, name: str) -> int:
        """Returns the bytes kept between the programs of chunks while another one runs; 0 for theirs.

        They are the cache of earlier chunks, and the prompt's arrays for the next one.
        """
        keeping = next((call.name for call in self.makers if self.past_bytes(call.name)), None)
        making = not self._counted[name].inputs  # what is kept before the first chunk
        if keeping is None or making or self.past_bytes(name):
            return 0
        prompt, _, _ = self._beside[keeping]
        return self.past_bytes(keeping) + prompt

    def _turns(self, role: RoleName, sizes: Sizes = MappingProxyType({})) -> float:
        """Returns the passes of all steps of one call of a step or a loop; 1 for any other program."""
        row = ROLES[role]
        if not row.passes:
            return 1
        return row.cost(self._counts, paired(sizes)) / row.calls(self._counts)

    @functools.cached_property
    def makers(self) -> tuple[PlannedCalls, ...]:
        """The programs of the planned form of the loop that make steps, that of full ones first."""
        return tuple(call for call in self.calls if ROLES[call.role].makes)

    def during(self, *parts: str) -> tuple[PlannedCalls, ...]:
        """Returns the programs that run in these parts of a generation."""
        return tuple(call for call in self.calls if ROLES[call.role].when in parts)

    @functools.cached_property
    def _counted(self) -> Mapping[str, ProgramSpec]:
        """The programs for one device, by name."""
        return {spec.name: spec for spec in self._specs()}

    @functools.cached_property
    def builder(self) -> ProgramBuilder:
        """Makes the programs for one device in forms that can be counted: see ``work``."""
        own = self.chip.kernels
        kernels = msgspec.structs.replace(own, attention="cpu", attention_blocks=(), convolution="direct")
        return ProgramBuilder(self.manifest, self.shape, self.options, kernels)

    def _specs(self) -> Iterator[ProgramSpec]:
        """Yields the programs for one device: those of one form of the loop, and one of text."""
        specs = self.builder.programs()
        last = {spec.role: spec.place for spec in specs if ROLES[spec.role].when == "prompts"}
        planned, *others = (FORMS[name].roles for name in self.options.forms)
        left_out = {role for roles in others for role in roles} - set(planned)
        for spec in specs:
            if spec.role not in left_out and last.get(spec.role, spec.place) == spec.place:
                yield spec

    @functools.cached_property
    def work(self) -> Mapping[str, Work]:
        """The work of every call by program, with all passes and, of a loop, all steps."""
        work = dict[str, Work]()
        for name, spec in self._counted.items():
            body = ROLES[spec.role].body
            work[name] = Work()  # the numbers of steps and passes are inputs, so one pass is counted
            once = spec if body is None else self.builder.first(body)
            work[name].add(work_of(once), self._turns(spec.role))
        return work

    def step_of(self, call: PlannedCalls) -> PlannedStep:
        """Returns the denoising step of as many latent frames as a program has."""
        frames, height, width = self.step.latent_shape
        return dataclasses.replace(self.step, latent_shape=(call.frames or frames, height, width))

    @functools.cached_property
    def step(self) -> PlannedStep:
        """The denoising step of all latent frames."""
        name, travelling = self.experts[0], 4 if self.chip.platform == "cpu" else 2
        component = self.manifest.components[name]
        length = self.manifest.tokenizer.max_length
        return PlannedStep(
            self.config(name), component, self.shape, self.builder.latent_shape, length, travelling
        )

    def weights(self, component: str, sizes: Sizes) -> int:
        """Returns the bytes of a component's weights that lie on each device of a mesh."""
        return device_bytes(self.manifest.components[component], PARAMETERS, jax_sizes(sizes))

    def slots_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes of one transformer's slots on each device of a mesh."""
        found = slots_of(self.manifest.components[self.experts[0]], self.options.lora_rank)
        return slots_bytes(
            found.values(), jnp.dtype(self.options.dtype).itemsize, PARAMETERS, jax_sizes(sizes)
        )

    def streamed_bytes(self, layers: int) -> int:
        """Returns the bytes of one transformer's parameters outside of the stacks, and of some layers."""
        outside, *stacks = self._streamed_parts
        return outside + layers * max(nbytes // count for nbytes, count in stacks)

    @property
    def layers_bytes(self) -> int:
        """The bytes of all layers of one transformer."""
        return sum(nbytes for nbytes, _ in self._streamed_parts[1:])

    @functools.cached_property
    def _streamed_parts(self) -> tuple[Any, ...]:
        """The bytes that are in no stack; then for each stack its bytes and the number of its layers."""
        stacks = self.builder.modules[self.experts[0]].stacks
        parts = parts_of(self.manifest.components[self.experts[0]], list(stacks))
        return parts[OUTSIDE].nbytes, *((parts[name].nbytes, len(stacks[name])) for name in stacks)

    def share(self, call: PlannedCalls, sizes: Sizes) -> Share:
        """Returns what one device of a mesh does of a program.

        The VAE's exchange of neighbouring columns is left out: it takes a hundredth of the VAE's time.
        """
        if call.component is None:
            return Share(1 / num_devices(sizes))
        whole = self.manifest.components[call.component].nbytes
        used = self.weights(call.component, {"tensor": sizes.get("tensor", 1)})
        fsdp = sizes.get("fsdp", 1)
        gathered = used * (fsdp - 1) / fsdp
        if call.component == "vae":
            return Share(products=self._columns(sizes), weights=used, whole_weights=whole)
        if call.component == TINY_VAE:  # every device decodes it all
            return Share(weights=used, whole_weights=whole)
        if ROLES[call.role].when == "expert":
            # It uses a small part of the transformer, and every device computes it.
            return Share(1 / sizes.get("tensor", 1))
        if call.component in ENCODERS:
            return Share(1 / sizes.get("tensor", 1), used, whole, gathered)
        step, tensor = self.step_of(call), sizes.get("tensor", 1)
        times, alone = self._turns(call.role, sizes), self._turns(call.role)
        # What one device does of the passes, of all that are made.
        computed = times * step.tokens_of(sizes) / (alone * step.batch({}) * step.tokens * tensor)
        sent = sum(step.sent(sizes).values())
        tokens = 2 * step.tokens_of(sizes) * step.config.dim / tensor
        past = self.past_bytes(call.name) * times
        return Share(computed, used * times, whole * alone, sent * times, step.layers * times, tokens, past)

    def time(self, call: PlannedCalls, sizes: Sizes) -> Time:
        """Returns the time of one call of a program on a mesh."""
        decodes = call.component in ("vae", TINY_VAE)
        precision = self.options.vae_precision if decodes else "highest"
        return predicted(self.work[call.name], self.chip, self.share(call, sizes), precision)

    def start_seconds(self, sizes: Sizes, names: tuple[str, ...]) -> float:
        """Returns how long these components take from the host's memory to the devices of a mesh."""
        total = sum(self.manifest.components[name].nbytes for name in names)
        each = sum(self.weights(name, sizes) for name in names)
        return transfer_seconds(total, each, num_devices(sizes), self.chip)

    def beside_bytes(self, name: str, sizes: Sizes) -> int:
        """Returns the bytes of a program's inputs and outputs without weights and slots, on one device."""
        pair = paired(sizes) and self.shape.guidance
        parts = self.step.stored_parts(sizes) * sizes.get("tensor", 1) * (2 if pair else 1)
        cache, history, others = self._beside[name]
        return cache // parts + int(history * self._columns(sizes)) + others

    @functools.cached_property
    def _beside(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of keys and values, of a decoder's history, and of other inputs and outputs, by program."""
        return {name: _beside(spec, {*self.components, LORA}) for name, spec in self._counted.items()}

    def config(self, component: str) -> Any:
        """Returns a component's parsed config."""
        return self.builder.configs[component]


def _beside(spec: ProgramSpec, held: Collection[str]) -> tuple[int, int, int]:
    """Returns the bytes of a program's cache, its history, and its other arguments that are not held."""
    inputs = zip(spec.inputs, spec.arguments, strict=True)
    given = [(name, tree) for name, tree in inputs if name not in held]
    total = {"kv": 0, HISTORY: 0, "": 0}
    # What is donated is returned in its place.
    made = [(name, tree) for name, tree in spec.outputs.items() if name not in spec.donate]
    for name, tree in [*given, *made]:
        total[name if name in total else ""] += _bytes_of(tree)
    return total["kv"], total[HISTORY], total[""]


def _bytes_of(tree: Any) -> int:
    """Returns the bytes of abstract arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
