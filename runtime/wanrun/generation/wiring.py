"""Checks that a profile's programs fit together, and the model: each takes what those before it return.

All of it is in the manifest, and costs 0.1 ms; ``wanrun.executables.signature`` compares the manifest with
the programs themselves. For a model that takes images it imports Pillow (30 ms), as a run with an image
has done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wanrun.artifact.manifest import EXPERT_OPTIONS, TRANSFORMERS, Manifest
from wanrun.artifact.programs import Profile, Program, aval, aval_text
from wanrun.denoising.solvers import COLUMNS
from wanrun.denoising.steps import LOOP_PROGRAMS
from wanrun.errors import ArtifactError
from wanrun.executables.signature import difference, weights_described
from wanrun.request.options import latents_shape, leading_latents, loop_forms
from wanrun.text.backends import text_programs

Trees = Mapping[str, Any]
"""Descriptions of arrays by name: text such as ``float32[2,3]``, or nested dicts of texts."""

SCALAR = "float32[]"
COUNT = "int32[]"


def check_wiring(manifest: Manifest, profile: Profile, programs: Mapping[str, Program]) -> None:
    """Checks the recorded inputs and outputs of a profile's programs against one another and the model.

    Args:
        manifest: the artifact's manifest.
        profile: the profile.
        programs: its programs.

    Raises:
        ArtifactError: naming the first that does not fit.
    """
    _Wiring(manifest, profile, programs).check()


class _Wiring:
    """What is at hand when a program runs."""

    def __init__(self, manifest: Manifest, profile: Profile, programs: Mapping[str, Program]) -> None:
        self._manifest, self._profile, self._programs = manifest, profile, programs
        self._model, self._task, self._options = manifest.model, manifest.model.task, profile.options

    def check(self) -> None:
        order = self._task.order
        self._check_experts()
        self._check_text()
        decoded = self._decoded()
        windows = self._task.windows
        carried = {} if windows is None else {k: self._of(decoded, v) for k, v in windows.carried.items()}
        arrays = {**self._arrays(), **carried}
        made = self._run(order.once, arrays)
        made |= self._run(order.window, {**arrays, **made})
        prompts, tokens = 1 + self._profile.guidance, self._manifest.tokenizer.max_length
        embeddings = aval_text(self._options.dtype, prompts, tokens, self._model.text_width)
        prepared = self._run(order.expert, {**arrays, **made, "embeddings": embeddings})
        for form in loop_forms(self._profile):
            self._check_step(form, {**made, **prepared}, made)

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
        names = text_programs(self._programs, self._manifest.tokenizer.max_length)
        self._program(names.get(self._manifest.tokenizer.max_length, "encode_text"))
        for length, name in names.items():
            tokens = aval_text("int32", 1, length)
            made = self._run([name], {"ids": tokens, "mask": tokens})
            rows = aval_text(self._options.dtype, 1, length, self._model.text_width)
            self._compare(f"embeddings of {name}", rows, self._of(made, "embeddings"))

    def _decoded(self) -> dict[str, Any]:
        """What is returned of a video's latents, its frames among it."""
        profile, (_, *sizes) = self._profile, latents_shape(self._manifest, self._profile)
        sizes[1] -= leading_latents(self._manifest, profile)
        made = self._run(self._task.order.after, {"latents": aval_text("float32", *sizes)})
        frames = aval_text("uint8", profile.num_frames, profile.height, profile.width, 3)
        self._compare("the frames", frames, self._of(made, "frames"))
        return made

    def _arrays(self) -> dict[str, Any]:
        """What the host makes of images and videos, and says of windows and modes."""
        task, arrays = self._task, dict[str, Any]()
        if not task.inputs:
            return arrays
        from wanrun.media.preparations import PREPARATIONS  # imports Pillow

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

    def _check_step(self, form: str, given: Trees, made: Trees) -> None:
        """A form of the loop: what it carries, what each call gives it, and the options that it takes."""
        name = LOOP_PROGRAMS[form]
        program, row = self._program(name), len(COLUMNS)
        if form == "step":
            rows: dict[str, Any] = {"coefficients": aval_text("float32", row), "timestep": SCALAR}
        else:
            steps = self._options.max_steps
            rows = {
                "coefficients": aval_text("float32", steps, row),
                "timesteps": aval_text("float32", steps),
            }
            rows |= {"first": COUNT, "last": COUNT}
        inputs, outputs = _avals(program, "inputs"), _avals(program, "outputs")
        latents = latents_shape(self._manifest, self._profile)
        state = {key: self._of(inputs, key) for key in program.donated}
        self._compare(f"what {name} carries", state, outputs)
        state["latents"] = aval_text(self._options.scheduler_dtype, *latents)
        if self._profile.guidance:
            rows["guidance_scale"] = SCALAR
        rows |= dict(self._free(name, inputs, made))
        self._run([name], {**given, **rows, **state})

    def _free(self, name: str, inputs: Trees, made: Trees) -> Iterator[tuple[str, Any]]:
        """The inputs that the host fills, of any size: options, and the mask of a frame that is held."""
        filled = [key for key in self._model.options if key not in EXPERT_OPTIONS]
        if (held := self._task.held) is not None:
            filled.append(held.mask)
            self._of(_mapping(self._of(made, held.condition)), held.latents)
        for key in filled:
            text = self._of(inputs, key)
            if not isinstance(text, str) or aval(text)[0] != "float32":
                raise self._problem(f"{name} takes {key}", "float32", text)
            yield key, text

    def _run(self, names: Iterable[str], given: Trees) -> dict[str, Any]:
        """Checks that programs take what is given, or what those before them return; returns all outputs."""
        made = dict[str, Any]()
        for name in names:
            program = self._program(name)
            inputs = _avals(program, "inputs")
            for key in program.inputs:
                if key not in self._manifest.components:
                    expected = {**given, **made}.get(key, "no such input")
                    self._compare(f"{name} takes {key}", expected, inputs.get(key, "nothing"))
            made |= _avals(program, "outputs")
        return made

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            raise self._problem("a program is missing", name, None)
        return self._programs[name]

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


def _avals(program: Program, kind: str) -> Trees:
    return _mapping(program.avals.get(kind))


def _mapping(tree: Any) -> Trees:
    return tree if isinstance(tree, Mapping) else {}
