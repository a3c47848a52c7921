"""Compares programs with the arguments that they get: names, dtypes and shapes, role by role.

``check_set`` compares the manifest's records with one another and with the model, before anything is
compiled; ``check_program`` compares a program's file with its record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wanrun.artifact.guiders import NAG, inputs_of
from wanrun.artifact.layout import BITS, ArrayLayout
from wanrun.artifact.manifest import EXPERT_OPTIONS, TINY_VAE, TRANSFORMERS, Manifest
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.parameters import Component, flat, nest
from wanrun.artifact.programs import Profile, Program, ProgramSet, aval, with_role
from wanrun.artifact.roles import DECODERS, FORMS, ROLES, Form, roles_when
from wanrun.artifact.slots import LORA, slots_of
from wanrun.artifact.staged import ROWS, WEIGHTS, padded_shape, spread_name
from wanrun.denoising.latents import latents_shape, leading_latents
from wanrun.denoising.solvers import COLUMNS
from wanrun.denoising.steps import TABLES
from wanrun.errors import ArtifactError
from wanrun.media.preparations import PREPARATIONS
from wanrun.text.artifact_encoder import text_programs
from wanrun.weights.layers import OUTSIDE

if TYPE_CHECKING:
    from jax.export import Exported

Trees = Mapping[str, Any]
"""Descriptions of arrays by name: text such as ``float32[2,3]``, or dicts of texts."""

SCALAR, COUNT, NOTHING = "float32[]", "int32[]", "nothing"


def aval_text(dtype: str, *sizes: int) -> str:
    """How an array of this dtype and shape is described: ``float32[2,3]``."""
    return f"{dtype}[{','.join(map(str, sizes))}]"


def check_program(
    name: str, program: Program, components: Mapping[str, Component], bits: bool, exported: Exported
) -> None:
    """Checks that a program's file has the name, inputs and outputs that the manifest says.

    Two inputs of one shape that the manifest exchanges would give another video, without an error. An input
    with the name of one of ``components`` is its parameters; ``bits`` is whether weights of ``BITS`` are
    passed as integers. Raises ArtifactError with the first difference.
    """
    import jax

    def described(tree: Any, avals: Any) -> Any:
        return jax.tree.unflatten(tree, [aval_text(str(one.dtype), *one.shape) for one in avals])

    unnamed, inputs = described(exported.in_tree, exported.in_avals)
    if unnamed:
        raise _unlike(f"program {name}", "inputs without a name", NOTHING, len(unnamed))
    outputs = described(exported.out_tree, exported.out_avals)
    given = {key: program.avals["inputs"].get(key, NOTHING) for key in program.inputs}
    given |= {key: _weights(components[key], bits) for key in given.keys() & components.keys()}
    expected = {"name": name, "inputs": given, "outputs": program.avals["outputs"]}
    found = {"name": exported.fun_name, "inputs": inputs, "outputs": outputs}
    _compare(f"program {name}", expected, found)


def check_set(manifest: Manifest, key: str) -> None:
    """Checks that the programs of a set fit the arrays of the host, the weights and other programs.

    Raises ArtifactError with the first input or output that does not fit.
    """
    programs = manifest.program_sets[key]
    for profile in programs.programs:
        _Wiring(manifest, manifest.profiles[profile], programs).check()


class _Wiring:
    """The arguments that each program of a profile gets, by name."""

    def __init__(self, manifest: Manifest, profile: Profile, program_set: ProgramSet) -> None:
        self._manifest, self._profile, self._set = manifest, profile, program_set
        self._programs, self._options = program_set.programs[profile.name], profile.options
        self._model, self._task = manifest.model, manifest.model.task
        self._latents = latents_shape(manifest, profile)
        forms = [FORMS[name] for name in profile.options.forms]
        self._looped = tuple(dict.fromkeys(role for form in forms for role in form.roles))
        weights = _weights(manifest.components[TRANSFORMERS[0]], program_set.kernels.weight_bits)
        self._layers = {name: _one_layer(weights[name]) for name in program_set.layers if name in weights}
        self._outside = {name: tree for name, tree in weights.items() if name not in self._layers}
        self._slots = self._slot_texts()

    def _slot_texts(self) -> Trees:
        """Returns the slots of a transformer: nested dicts, empty without slots."""
        dtype, bits = self._options.dtype, self._set.kernels.weight_bits
        found = slots_of(self._manifest.components[TRANSFORMERS[0]], self._options.lora_rank)
        passed = BITS.get(dtype, dtype) if bits else dtype
        return nest({path: aval_text(passed, *slot.shape) for path, slot in found.items()})

    def check(self) -> None:
        self._check_roles()
        self._check_model()
        others = roles_when("loading", "prompts", "media", "video", "attest")
        for name in with_role(self._programs, *others, *self._looped):
            self._check_program(name, self._programs[name])

    def _check_roles(self) -> None:
        """Checks that there is a program for every call of the runtime."""
        task = self._task
        needed = {"window": task.conditions, "start": self._options.video_to_video, "past": task.past}
        media = [role for role, is_so in needed.items() if is_so]
        full, tiny = DECODERS["full"][-1], DECODERS["tiny"][-1]
        decoders = (full, tiny) if TINY_VAE in self._manifest.components else (full,)
        for role in (*roles_when("prompts"), *decoders, *media, *self._looped):
            found = with_role(self._programs, role)
            stacks = [stack for name in found for stack in self._stacks(self._programs[name])]
            several = self._model.chunks is None and ROLES[role].makes and len(found) > 1
            if not found or several:
                raise self._problem(f"programs of role {role}", "one", ", ".join(found) or NOTHING)
            if stacks and sorted(stacks) != sorted(self._layers):
                raise self._problem(f"programs of role {role}", ", ".join(self._layers), ", ".join(stacks))
        if (tokens := self._manifest.tokenizer.max_length) not in (lengths := text_programs(self._programs)):
            raise self._problem("tokens of the longest text encoder", tokens, max(lengths))

    def _check_model(self) -> None:
        """Checks that programs take slots, the model's options and held frame, and that both experts fit."""
        slots = [LORA] if self._slots else []
        for key, form in itertools.product([*slots, *self._filled()], self._options.forms):
            taking = with_role(self._programs, *FORMS[form].roles)
            if not any(key in self._programs[name].inputs for name in taking):
                raise self._problem(f"programs of form {form} that take {key}", "one", NOTHING)
        if (held := self._task.held) is not None:
            made = [program.avals["outputs"].get(held.condition) for program in self._programs.values()]
            if not any(held.latents in _mapping(one) for one in made):
                raise self._problem(f"programs that make {held.condition}.{held.latents}", "one", NOTHING)
        for frames in {item.past for item in self._task.past.values()}:
            batch, channels, _, *cells = self._latents
            sizes = {"past": frames, "first": 1}
            kept = {key: aval_text("float32", batch, channels, size, *cells) for key, size in sizes.items()}
            _compare("what is kept of chunks", kept, self._kept)
        first, second = (self._manifest.components.get(name) for name in TRANSFORMERS)
        options = [key for key in EXPERT_OPTIONS if key in self._model.options]
        if options and second is None:
            raise self._problem(f"transformers, with a default {options[0]}", "two", "one")
        if first is not None and second is not None:
            _compare("the second transformer", _weights(first, False), _weights(second, False))

    def _check_program(self, name: str, program: Program) -> None:
        given, returned = self._around(name, program)
        weights, outputs = self._manifest.components, program.avals["outputs"]
        expected = {
            "inputs": {key: given.get(key, NOTHING) for key in program.inputs if key not in weights},
            "outputs": {**outputs, **returned},
        }
        _compare(f"program {name} of profile {self._profile.name}", expected, program.avals)

    def _around(self, name: str, program: Program) -> tuple[Trees, Trees]:
        """Returns a program's arguments, and those of its outputs that others take."""
        role = ROLES[program.role]
        if role.when == "loading":
            return self._spreading(name, program)
        if role.when == "attest":
            return program.avals["inputs"], {"out": program.avals["inputs"].get("q", NOTHING)}
        if role.when == "prompts":
            return self._encoding(program)
        if role.when == "video":
            return self._decoding(program)
        if role.name == "start":
            return self._arrays(), {"start": self._one_video()}
        if role.name == "past":
            assert self._model.chunks is not None
            return self._arrays(), dict.fromkeys(
                ("mean", "deviation"), self._one_video(self._model.chunks.each)
            )
        made = self._made(program)
        alike = {key: made[key] for key in {*program.avals["outputs"], *program.donated} if key in made}
        if role.when != "steps":
            return {**made, **self._arrays()}, alike
        form = next(form for form in FORMS.values() if program.role in form.roles)
        state = self._chunk(program) if form.chunked else self._state(form)
        given = {**made, **self._filled(program), **self._calls(form), **state}
        passed = {key: state[key] for key in program.donated if key in state} if form.chunked else state
        return given, passed if role.makes or form.chunked else alike

    def _chunk(self, program: Program) -> dict[str, Any]:
        """Returns the state of a program of chunks, the chunk's number and the cache of those before it."""
        assert self._model.chunks is not None
        batch, channels, times, *cells = self._latents
        lengths, frames = self._model.chunks.lengths(times), program.array("latents")[1][2]
        makes = bool(ROLES[program.role].makes)
        frames = frames if makes and frames in lengths else self._model.chunks.each
        sizes = [[size >> halvings for size in cells] for halvings in range(self._model.stages)]
        found = list(program.array("latents")[1][3:])
        cells = found if makes and found in sizes else cells
        dtype = self._options.scheduler_dtype if makes else "float32"
        state = {key: program.avals["inputs"][key] for key in program.donated}
        return {
            **state,
            "latents": aval_text(dtype, batch, channels, frames, *cells),
            "cache": self._kept,
            "chunk": COUNT,
        }

    @property
    def _kept(self) -> Any:
        """The cache of earlier chunks."""
        (beginner,) = with_role(self._programs, FORMS[self._options.loop].roles[0])
        return self._programs[beginner].avals["outputs"].get("cache", NOTHING)

    def _stacks(self, program: Program) -> set[str]:
        """Returns the stacks of which a program takes a layer."""
        return self._layers.keys() & set(program.inputs)

    def _made(self, program: Program) -> dict[str, Any]:
        """Returns the outputs of earlier programs of a form for one; of layers, only those of its stack."""
        made: dict[str, Any] = {**self._layers, OUTSIDE: self._outside, **self._slots_for(program)}
        own = next((form.roles for form in FORMS.values() if program.role in form.roles), ())
        for name in with_role(self._programs, *roles_when("media"), *own):
            other = self._programs[name]
            if other is program or _place(other) > _place(program):
                continue
            if ROLES[other.role].makes is None and self._stacks(other) <= self._stacks(program):
                made = {**other.avals["outputs"], **made}
        return made

    def _slots_for(self, program: Program) -> dict[str, Any]:
        """Returns the slots of the weights that a program takes."""
        slots, stacks = self._slots, self._stacks(program)
        if not slots:
            return {}
        if stacks:
            return {LORA: _one_layer(slots[stacks.pop()])}
        whole = OUTSIDE not in program.inputs
        return {LORA: {name: tree for name, tree in slots.items() if whole or name not in self._layers}}

    def _arrays(self) -> dict[str, Any]:
        """Returns the host's arrays before the steps: embeddings, images and videos, windows and modes."""
        profile, task = self._profile, self._task
        prompts, tokens = profile.num_prompts, self._manifest.tokenizer.max_length
        arrays = {"embeddings": aval_text(self._options.dtype, prompts, tokens, self._model.text_width)}
        counts = {"image": 1, "images": profile.num_references, "video": profile.num_frames}
        for item in task.inputs.values():
            prepared = PREPARATIONS[item.prepare]
            height, width = item.size or profile.height, item.size or profile.width
            count = counts["video" if item.count is not None else item.kind]
            count = self._model.chunk_frames if item.past else count
            sizes = count, height, width, *prepared.channels
            arrays[item.array] = aval_text(prepared.dtype.__name__, *sizes)
            arrays |= {name: COUNT for name in (item.flag, item.count) if name is not None}
        if (processor := self._model.image_processor) is not None:
            encoded = sum(item.encoded for item in task.inputs.values())
            arrays["pixels"] = aval_text("float32", encoded, processor.crop, processor.crop, 3)
        if task.modes is not None:
            arrays[task.modes.array] = COUNT
        if task.windows is not None:
            decoder = with_role(self._programs, *roles_when("video"))[0]
            decoded = self._programs[decoder].avals["outputs"]
            arrays |= {name: decoded.get(output, NOTHING) for name, output in task.windows.carried.items()}
            arrays |= {"overlap": COUNT, "later": COUNT}
        return arrays

    def _encoding(self, program: Program) -> tuple[Trees, Trees]:
        """Returns the tokens of one prompt, and its embeddings."""
        length = math.prod(program.array("ids")[1])
        ids = aval_text("int32", 1, length)
        rows = aval_text(self._options.dtype, 1, length, self._model.text_width)
        return {"ids": ids, "mask": ids}, {"embeddings": rows}

    def _decoding(self, program: Program) -> tuple[Trees, Trees]:
        """Returns a video's own latents, or those of a piece with the state that it passes on; its frames."""
        profile = self._profile
        (last,) = with_role(self._programs, DECODERS["full"][-1])
        carried = self._programs[last]
        state = {name: carried.avals["inputs"][name] for name in carried.donated}
        times, count = None, profile.num_frames
        if program.role == DECODERS["full"][0]:
            times, count = 1, 1
        elif program is carried and state:
            times = program.array("latents")[1][1]
            count = times * self._model.vae_temporal
        else:
            state = {}
        frames = aval_text("uint8", count, profile.height, profile.width, 3)
        return {"latents": self._one_video(times), "first": COUNT, **state}, {"frames": frames, **state}

    def _one_video(self, times: int | None = None) -> str:
        """Returns the latents of one video, or so many of them, without those in front of the video."""
        _, channels, all_times, *cells = self._latents
        times = all_times - leading_latents(self._manifest, self._profile) if times is None else times
        return aval_text("float32", channels, times, *cells)

    def _calls(self, form: Form) -> dict[str, Any]:
        """Returns the host's arrays for a call in the steps: a row of the solver's table, or all of it."""
        row: dict[str, tuple[int, ...]] = {"coefficients": (len(COLUMNS),), "timestep": ()}
        if self._model.flow_map:
            row["next_timestep"] = ()
        if (profile := self._profile).guidance:
            layers = self._set.skippable_layers(profile.name)
            row |= {"guidance_scale": (), **inputs_of(self._options.guiders, layers)}
        if form.looped:
            most = self._options.max_steps
            tables = {TABLES[name]: aval_text("float32", most, *sizes) for name, sizes in row.items()}
            return {**tables, "first": COUNT, "last": COUNT}
        scalars = {name: aval_text("float32", *sizes) for name, sizes in row.items()}
        return {**scalars, "index": COUNT} if form.streams else scalars

    def _state(self, form: Form) -> dict[str, Any]:
        """Returns the state that the programs which make a form's steps take, and return."""
        program = self._programs[with_role(self._programs, *form.makers)[0]]
        latents = aval_text(self._options.scheduler_dtype, *self._latents)
        return {key: program.avals["inputs"][key] for key in program.donated} | {"latents": latents}

    def _filled(self, program: Program | None = None) -> dict[str, Any]:
        """Returns the host's arrays in the shape that a program takes: options, a held frame's mask."""
        keys = [key for key in self._model.options if key not in EXPERT_OPTIONS]
        if self._task.held is not None and self._task.held.mask:
            keys.append(self._task.held.mask)
        if self._options.nag:
            keys.append(NAG)
        texts = {key: str(program.avals["inputs"].get(key)) if program else "" for key in keys}
        return {key: text if text.startswith("float32[") else "float32" for key, text in texts.items()}

    def _spreading(self, name: str, program: Program) -> tuple[Trees, Trees]:
        """Returns the rows that a program spreads over the mesh, and the parameters that it makes of them."""
        components = {spread_name(part): one for part, one in self._manifest.components.items()}
        if (component := components.get(name)) is None:
            raise self._problem("a program that spreads weights", " or ".join(components), name)
        weights = flat(_weights(component, self._set.kernels.weight_bits))
        devices = num_devices(self._set.mesh)
        paths = _mapping(program.avals["inputs"].get(ROWS)).keys() & weights.keys()
        rows = {
            path: aval_text(aval(weights[path])[0], *padded_shape(component.parameters[path].layout, devices))
            for path in paths
        }
        return {ROWS: rows or "parameters"}, {WEIGHTS: {path: weights[path] for path in paths}}

    def _problem(self, what: str, expected: object, found: object) -> ArtifactError:
        return _unlike(f"profile {self._profile.name}", what, expected, found)


def _place(program: Program) -> tuple[int, int]:
    """Returns when a program runs: media come before an expert, and its start before its steps."""
    role = ROLES[program.role]
    return ("media", "expert", "steps").index(role.when), [*ROLES].index(role.name)


def _weights(component: Component, bits: bool) -> Any:
    """A component's parameters as a program takes them: nested dicts of texts such as ``float32[2,3]``."""

    def text(layout: ArrayLayout) -> str:
        return aval_text(BITS.get(layout.dtype, layout.dtype) if bits else layout.dtype, *layout.shape)

    return nest({path: text(parameter.layout) for path, parameter in component.parameters.items()})


def _one_layer(tree: Any) -> Any:
    """Returns descriptions without the layer axis."""
    if isinstance(tree, Mapping):
        return {name: _one_layer(item) for name, item in tree.items()}
    dtype, sizes = aval(tree)
    return aval_text(dtype, *sizes[1:])


def _mapping(tree: Any) -> Trees:
    return tree if isinstance(tree, Mapping) else {}


def _compare(what: str, expected: Any, found: Any, where: str = "") -> None:
    """Raises ArtifactError with the first place, by name, at which two trees differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(expected.keys() | found.keys()):
            place = f"{where}.{key}" if where else str(key)
            _compare(what, expected.get(key, NOTHING), found.get(key, NOTHING), place)
    elif expected != found:
        raise _unlike(what, where, _shown(expected), _shown(found))


def _shown(tree: Any) -> Any:
    return f"a dict of {len(tree)}" if isinstance(tree, Mapping) else tree


def _unlike(what: str, where: str, expected: object, found: object) -> ArtifactError:
    return ArtifactError(
        "mismatch",
        f"{what} does not fit: {where}",
        expected=expected,
        found=found,
        remedy="build the artifact again",
    )
