"""Checks that a profile's programs fit together, and the model: each takes what those before it return.

All of it is in the manifest. ``wanbuild.programs.signature`` compares the manifest with the programs
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wanbuild.programs.signature import aval_text, difference, unlike, weights_described
from wanrun.artifact.manifest import EXPERT_OPTIONS, TRANSFORMERS, Manifest
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.parameters import Component, flat
from wanrun.artifact.programs import Profile, Program, ProgramSet, aval, with_role
from wanrun.artifact.roles import FORMS, ROLES, Form, RoleName, roles_when
from wanrun.artifact.staged import ROWS, WEIGHTS, padded_shape, spread_name
from wanrun.denoising.solvers import COLUMNS
from wanrun.errors import ArtifactError
from wanrun.media.preparations import PREPARATIONS
from wanrun.request.options import latents_shape, leading_latents
from wanrun.text.artifact_encoder import text_programs
from wanrun.weights.layers import OUTSIDE

Trees = Mapping[str, Any]
"""Descriptions of arrays by name: text such as ``float32[2,3]``, or nested dicts of texts."""

SCALAR = "float32[]"
COUNT = "int32[]"


def check_wiring(manifest: Manifest, profile: Profile, program_set: ProgramSet) -> None:
    """Checks the recorded inputs and outputs of a profile's programs against one another and the model.

    Args:
        manifest: the artifact's manifest.
        profile: the profile.
        program_set: the set of its programs.

    Raises:
        ArtifactError: naming the first that does not fit.
    """
    _Wiring(manifest, profile, program_set).check()


def check_set(manifest: Manifest, key: str) -> None:
    """Checks the programs of every profile of a program set.

    Raises:
        ArtifactError: naming the first that does not fit.
    """
    program_set = manifest.program_sets[key]
    devices, bits = num_devices(program_set.mesh), program_set.kernels.weight_bits
    for name, programs in program_set.programs.items():
        check_wiring(manifest, manifest.profiles[name], program_set)
        for part, component in manifest.components.items():
            if (spread := programs.get(spread_name(part))) is not None:
                check_spread(part, component, spread, devices, bits)


def check_spread(name: str, component: Component, program: Program, devices: int, bits: bool) -> None:
    """Checks that a program takes rows of a component's parameters, and returns those parameters.

    Args:
        name: the component's name.
        component: its entry in the manifest.
        program: the program that spreads it.
        devices: the devices of the mesh.
        bits: whether weights of ``BITS`` are passed as integers.

    Raises:
        ArtifactError: naming the first difference.
    """
    inputs, outputs = _avals(program, "inputs"), _avals(program, "outputs")
    paths = _mapping(inputs.get(ROWS)).keys() & component.parameters.keys()
    whole = {path: text for path, text in flat(weights_described(component, bits)).items() if path in paths}
    rows = {
        path: aval_text(text.partition("[")[0], *padded_shape(component.parameters[path].layout, devices))
        for path, text in whole.items()
    }
    expected = {"inputs": {ROWS: rows}, "outputs": {WEIGHTS: whole}}
    other = difference(expected, {"inputs": inputs, "outputs": outputs})
    if other is not None or not paths:
        none = (f"inputs.{ROWS}", "parameters", "none")
        raise unlike(f"the program that spreads {name} does not fit it", other or none)


class _Wiring:
    """The arrays that are there when each program of a profile runs."""

    def __init__(self, manifest: Manifest, profile: Profile, program_set: ProgramSet) -> None:
        self._manifest, self._profile, self._set = manifest, profile, program_set
        self._programs = program_set.programs[profile.name]
        self._model, self._task, self._options = manifest.model, manifest.model.task, profile.options

    def check(self) -> None:
        self._check_experts()
        self._check_text()
        decoded = self._decoded()
        windows = self._task.windows
        carried = {} if windows is None else {k: self._of(decoded, v) for k, v in windows.carried.items()}
        arrays = {**self._arrays(), **carried}
        *_, last = media = roles_when("media")
        if self._task.inputs and not with_role(self._programs, last):
            raise self._problem("no program takes the images and videos", f"one of role {last}", None)
        made = self._run(media, arrays)
        prompts, tokens = 1 + self._profile.guidance, self._manifest.tokenizer.max_length
        embeddings = aval_text(self._options.dtype, prompts, tokens, self._model.text_width)
        given = {**arrays, **made, "embeddings": embeddings}
        for form in (FORMS[name] for name in self._options.forms):
            check = self._check_layers if form.streams else self._check_steps
            check(form, given, made)

    def _check_experts(self) -> None:
        """Both experts' weights go into one executable."""
        options = [name for name in EXPERT_OPTIONS if name in self._model.options]
        if options and TRANSFORMERS[1] not in self._manifest.components:
            raise self._problem(f"there is a default {options[0]}", "two experts", "one")
        first, second = (self._manifest.components.get(name) for name in TRANSFORMERS)
        if first is not None and second is not None:
            self._compare(
                "the second expert's weights", *(weights_described(one, False) for one in (first, second))
            )

    def _check_text(self) -> None:
        names = text_programs(self._programs)
        if (longest := self._manifest.tokenizer.max_length) not in names:
            raise self._problem("a program is missing", f"a text encoder of {longest} tokens", list(names))
        for length, name in names.items():
            tokens = aval_text("int32", 1, length)
            made = self._takes(name, {"ids": tokens, "mask": tokens})
            rows = aval_text(self._options.dtype, 1, length, self._model.text_width)
            self._compare(f"embeddings of {name}", rows, self._of(made, "embeddings"))

    def _decoded(self) -> dict[str, Any]:
        """Returns the outputs of decoding a video's latents, its frames among them."""
        profile, (_, *sizes) = self._profile, latents_shape(self._manifest, self._profile)
        sizes[1] -= leading_latents(self._manifest, profile)
        made = self._run(roles_when("video"), {"latents": aval_text("float32", *sizes)})
        frames = aval_text("uint8", profile.num_frames, profile.height, profile.width, 3)
        self._compare("the frames", frames, self._of(made, "frames"))
        return made

    def _arrays(self) -> dict[str, Any]:
        """Returns the arrays that the host makes of images and videos, and of windows and modes."""
        task, arrays = self._task, dict[str, Any]()
        if not task.inputs:
            return arrays
        counts = {"image": 1, "images": self._profile.num_references, "video": self._profile.num_frames}
        for item in task.inputs.values():
            prepared = PREPARATIONS[item.prepare]
            height, width = item.size or self._profile.height, item.size or self._profile.width
            sizes = counts[item.kind], height, width, *prepared.channels
            arrays[item.array] = aval_text(prepared.dtype.__name__, *sizes)
            if item.flag is not None:
                arrays[item.flag] = COUNT
        if (processor := self._model.image_processor) is not None:
            encoded = sum(item.encoded for item in task.inputs.values())
            arrays["pixels"] = aval_text("float32", encoded, processor.crop, processor.crop, 3)
        if task.modes is not None:
            arrays[task.modes.array] = COUNT
        return arrays if task.windows is None else {**arrays, "overlap": COUNT, "later": COUNT}

    def _check_steps(self, form: Form, given: Trees, made: Trees) -> None:
        """Checks a form of the loop: the state that its programs pass on, and what each call gives them."""
        steps, rows = self._options.max_steps, self._step_rows()
        if form.looped:
            del rows["timestep"]
            rows |= {
                "coefficients": aval_text("float32", steps, len(COLUMNS)),
                "timesteps": aval_text("float32", steps),
                "first": COUNT,
                "last": COUNT,
            }
        before = [role for role in form.roles if ROLES[role].when == "expert"]
        given = {**made, **self._run(before, given), **rows}
        first: dict[str, Any] | None = None
        for role in form.makers:
            name, state = self._state(form, role)
            self._compare(f"what {name} carries", state if first is None else first, state)
            self._takes(name, {**given, **dict(self._free([name], made)), **state})
            first = state

    def _step_rows(self) -> dict[str, Any]:
        """Returns what the host gives a single step."""
        scale = {"guidance_scale": SCALAR} if self._profile.guidance else {}
        return {"coefficients": aval_text("float32", len(COLUMNS)), "timestep": SCALAR, **scale}

    def _state(self, form: Form, role: RoleName) -> tuple[str, dict[str, Any]]:
        """Returns the program of a role that makes steps, and the state that it passes on."""
        name, *others = self._names(role)
        if others:
            raise self._problem(f"the loop's form {form.name} has several programs", name, others[0])
        state = self._passed_on(name)
        latents = aval_text(self._options.scheduler_dtype, *latents_shape(self._manifest, self._profile))
        self._compare(f"{name} takes latents", latents, self._of(state, "latents"))
        return name, state

    def _check_layers(self, form: Form, given: Trees, made: Trees) -> None:
        """Checks a form of streamed layers: what is outside of stacks, each layer, and what they pass on."""
        context, first, own, layer, last = form.roles
        (enter,), keys, names = self._names(first), self._names(own), self._names(layer)
        leave, state = self._state(form, last)
        layers, outside = self._stored_layers()
        given = {**given, **layers, OUTSIDE: outside}
        given |= self._run([context], given)
        given |= {
            **made,
            **self._step_rows(),
            **state,
            "index": COUNT,
            **dict(self._free([enter, *names], made)),
        }
        given |= self._takes(enter, given)
        if [self._stack(name, layers) for name in keys] != [self._stack(name, layers) for name in names]:
            raise self._problem("programs of layers do not fit those of their keys", list(names), list(keys))
        for name, its_keys in zip(names, keys, strict=True):
            passed = self._takes(name, {**given, **self._takes(its_keys, given)})
            self._compare(f"what {name} carries", {"carry": given["carry"]}, passed)
        self._takes(leave, given)

    def _stored_layers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns one layer of each stack of the transformer, and what is in no stack, for programs."""
        component, bits = self._manifest.components[TRANSFORMERS[0]], self._set.kernels.weight_bits
        whole = weights_described(component, bits)
        layers = {name: _one_layer(whole[name]) for name in self._set.layers if name in whole}
        return layers, {name: tree for name, tree in whole.items() if name not in layers}

    def _stack(self, name: str, layers: Trees) -> str:
        """Returns the stack of which a program takes a layer."""
        found = [key for key in self._programs[name].inputs if key in layers]
        if len(found) != 1:
            raise self._problem(f"{name} takes a layer", f"one of {', '.join(layers)}", found)
        return found[0]

    def _passed_on(self, name: str) -> dict[str, Any]:
        """Returns the state that a step takes, which must be what it returns."""
        program = self._programs[name]
        state = {key: self._of(_avals(program, "inputs"), key) for key in program.donated}
        self._compare(f"what {name} carries", state, _avals(program, "outputs"))
        return state

    def _free(self, names: Sequence[str], made: Trees) -> Iterator[tuple[str, Any]]:
        """Yields the inputs that the host fills, of any size: options, and the mask of a held frame."""
        inputs = {key: text for name in names for key, text in _avals(self._programs[name], "inputs").items()}
        name = names[0]
        filled = [key for key in self._model.options if key not in EXPERT_OPTIONS]
        if (held := self._task.held) is not None:
            filled.append(held.mask)
            self._of(_mapping(self._of(made, held.condition)), held.latents)
        for key in filled:
            text = self._of(inputs, key)
            if not isinstance(text, str) or aval(text)[0] != "float32":
                raise self._problem(f"{name} takes {key}", "float32", text)
            yield key, text

    def _run(self, roles: Sequence[RoleName], given: Trees) -> dict[str, Any]:
        """Checks that the programs of roles take what is given, or what those before them return.

        Returns:
            All their outputs.
        """
        made = dict[str, Any]()
        for role in roles:
            optional = ROLES[role].when == "media"
            for name in with_role(self._programs, role) if optional else self._names(role):
                made |= self._takes(name, {**given, **made})
        return made

    def _takes(self, name: str, given: Trees) -> Trees:
        """Checks that a program takes what is given; returns its outputs."""
        program = self._programs[name]
        inputs = _avals(program, "inputs")
        for key in program.inputs:
            if key not in self._manifest.components:
                self._compare(
                    f"{name} takes {key}", given.get(key, "no such input"), inputs.get(key, "nothing")
                )
        return _avals(program, "outputs")

    def _names(self, role: RoleName) -> tuple[str, ...]:
        """Returns the programs of a role that every profile has."""
        names = with_role(self._programs, role)
        if not names:
            raise self._problem("a program is missing", f"one of role {role}", None)
        return names

    def _of(self, trees: Trees, name: str) -> Any:
        if name not in trees:
            raise self._problem("an array is missing", name, f"only {', '.join(sorted(trees))}")
        return trees[name]

    def _compare(self, what: str, expected: Any, found: Any) -> None:
        if (other := difference(expected, found)) is not None:
            where, said, there = other
            raise self._problem(f"{what}{where and f' ({where})'}", said, there)

    def _problem(self, what: str, expected: object, found: object) -> ArtifactError:
        return ArtifactError(
            f"the programs of profile {self._profile.name} do not fit together: {what}",
            expected=expected,
            found=found,
            remedy="build the artifact again",
        )


def _one_layer(tree: Any) -> Any:
    """Returns descriptions without the layer axis."""
    if isinstance(tree, Mapping):
        return {name: _one_layer(item) for name, item in tree.items()}
    dtype, sizes = aval(tree)
    return aval_text(dtype, *sizes[1:])


def _avals(program: Program, kind: str) -> Trees:
    return _mapping(program.avals.get(kind))


def _mapping(tree: Any) -> Trees:
    return tree if isinstance(tree, Mapping) else {}
