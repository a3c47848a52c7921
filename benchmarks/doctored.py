"""Measures what attesting notices of programs that are wrong on purpose, and of right ones.

An artifact is built for this CPU, and all its programs run as on a chip that attests them
(``wanrun.attest``). At each call what is wrong runs next to what is right, with the inputs that the right
programs have made; so one run tells all cases. Rows are cases, columns programs, figures the most that
results were apart: relative errors, or levels of frames. Bold ones are noticed. A program that a case does
not change has no figure.

The tail mask of a chip's kernel is no matter of a CPU: docs/notes/chips.md, "Attention".

    python benchmarks/doctored.py CHECKPOINT [--dtype float32] [--size 96x64] [--frames 9] [--sharp 2.5]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from cpus import cpu_name
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.models import params, passes, products, transformer
from wanbuild.models.attention import BlockedAttention
from wanbuild.models.blocks import WanAttention
from wanbuild.models.condition_embedder import ConditionEmbedder
from wanbuild.models.passes import Passes
from wanbuild.models.rope import axis_dims
from wanbuild.models.transformer import WanTransformer
from wanbuild.programs import denoiser
from wanbuild.programs.export import builder_of, export_program
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.limited import LimitedProcesses
from wanbuild.programs.spec import ProgramSpec
from wanbuild.targets.target import TargetSpec, resolve_target
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile, Program
from wanrun.attest.attest import run_all
from wanrun.attest.twins import Twins
from wanrun.denoising.solvers import COLUMNS
from wanrun.executables.executables import Native
from wanrun.executables.jax_hook import compile_here, load
from wanrun.executables.lowering import lower
from wanrun.executables.tolerance import Apart
from wanrun.files import sha256_of
from wanrun.generation.load import load as load_artifact

Patch = Callable[[], AbstractContextManager[Any]]
Run = Callable[..., Any]
PIECES = 8
"""Into how many parts sums are cut that are added in bfloat16."""


def without(column: str) -> AbstractContextManager[Any]:
    """The solver's update takes the coefficient of this column as zero."""
    own = denoiser.solver_step

    def update(x: Any, v: Any, history: Any, coefficients: Any) -> Any:
        return own(x, v, history, coefficients.at[COLUMNS.index(column)].set(0.0))

    return mock.patch.object(denoiser, "solver_step", update)


def scores_larger() -> AbstractContextManager[Any]:
    """All scores are 5 % too large, in float32."""
    return mock.patch.object(Passes, "query_factor", lambda self, head_dim: 1.05)


@contextlib.contextmanager
def time_unrotated() -> Iterator[None]:
    """Rotary tables have no angle of time; and steps take none of theirs."""
    table, apply = transformer.rope_tables, passes.apply_rope

    def level(cos: Any, sin: Any) -> Any:
        pairs = axis_dims(2 * cos.shape[-1])[0] // 2
        return cos.at[:, :pairs].set(1), sin.at[:, :pairs].set(0)

    with (
        mock.patch.object(transformer, "rope_tables", lambda *given: level(*table(*given))),
        mock.patch.object(passes, "apply_rope", lambda x, cos, sin: apply(x, *level(cos, sin))),
    ):
        yield


def halves_swapped() -> AbstractContextManager[Any]:
    """Guidance takes the negative prompt's velocity as the positive one's."""
    own = denoiser._combined
    return mock.patch.object(denoiser, "_combined", lambda one, other, *rest: own(other, one, *rest))


def modulation_smaller() -> AbstractContextManager[Any]:
    """What the timestep adds to the modulation of all layers is 10 % too small."""
    own = ConditionEmbedder.time

    def time(self: ConditionEmbedder, timesteps: Any) -> Any:
        embedding, modulation = own(self, timesteps)
        return embedding, 0.9 * modulation

    return mock.patch.object(ConditionEmbedder, "time", time)


def rows_exchanged() -> AbstractContextManager[Any]:
    """Two rows of the first layer's values in self-attention are exchanged."""
    own = WanAttention.unrotated

    def unrotated(self: WanAttention, x: Any) -> Any:
        q, k, v = own(self, x)
        layer = self.to_v.weight.get_value()._layer
        return q, k, jnp.where(layer == 0, v.at[..., 0, (0, 1)].set(v[..., 0, (1, 0)]), v)

    return mock.patch.object(WanAttention, "unrotated", unrotated)


def rows_permuted() -> AbstractContextManager[Any]:
    """The rows of all layers' values lie in another order."""
    own = WanAttention.value
    return mock.patch.object(WanAttention, "value", lambda self, x: jnp.roll(own(self, x), 1, -1))


def gelu_by_erf() -> AbstractContextManager[Any]:
    """GELU by its definition, instead of tanh."""
    own = jax.nn.gelu
    return mock.patch.object(jax.nn, "gelu", lambda x, approximate: own(x, approximate=False))


def keys_dropped(part: float) -> AbstractContextManager[Any]:
    """Self-attention without one block of the keys, in the middle."""
    own = BlockedAttention.__call__

    def attend(self: BlockedAttention, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if mask is None and k.shape[1] == q.shape[1]:
            first, count = k.shape[1] // 3, max(1, round(part * k.shape[1]))
            kept = np.r_[0:first, first + count : k.shape[1]]
            k, v = k[:, kept], v[:, kept]
        return own(self, q, k, v, mask)

    return mock.patch.object(BlockedAttention, "__call__", attend)


def layers_swapped() -> AbstractContextManager[Any]:
    """The first two layers run in the other order."""
    own, own_scan = WanTransformer.run_blocks, params.scan

    def scan(body: Any, carry: Any, xs: Any) -> Any:
        return own_scan(body, carry, jax.tree.map(lambda x: x[np.r_[1, 0, 2 : len(x)]], xs))

    def run_blocks(self: WanTransformer, *arguments: Any) -> Any:
        with mock.patch.object(params, "scan", scan):
            return own(self, *arguments)

    return mock.patch.object(WanTransformer, "run_blocks", run_blocks)


def sums_rounded() -> AbstractContextManager[Any]:
    """Layers add up their products in bfloat16."""
    own = products._dot

    def dot(x: Any, weight: Any, result: Any) -> Any:
        if x.shape[-1] % PIECES or x.dtype != jnp.bfloat16 or x.shape[-1] != weight.shape[-1]:
            return own(x, weight, result)
        pieces = zip(jnp.split(x, PIECES, -1), jnp.split(weight, PIECES, -1), strict=True)
        total = jnp.zeros((), jnp.bfloat16)
        for piece in pieces:
            total = (total + own(*piece, jnp.float32)).astype(jnp.bfloat16)
        return total.astype(result)

    return mock.patch.object(products, "_dot", dot)


@dataclass(frozen=True)
class Case:
    """How a program comes about that runs in place of the artifact's.

    Args:
        patch: what of the models is replaced while programs of the transformer are exported.
        products: the form of products, as ``Kernels.products``; None for the CPU's own.
        options: the compiler's.
        limit: of instructions, a value of XLA's flag.
    """

    patch: Patch = nullcontext
    products: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: str | None = None

    @property
    def compiled_otherwise(self) -> bool:
        """Whether the same StableHLO has another executable."""
        return bool(self.options or self.limit)


MOVED = "right, inputs rounded once more"
CASES: Mapping[str, Case] = {
    "right, for AVX2": Case(limit="AVX2"),
    "right, not optimized": Case(options={"xla_backend_optimization_level": 0}),
    "right, products rounded": Case(products="rounded"),
    "right, products in float32": Case(products="widened"),
    "predictor without m1": Case(partial(without, "p_1")),
    "corrector without m1": Case(partial(without, "c_1")),
    "corrector without m2": Case(partial(without, "c_2")),
    "scores 5 % too large": Case(scores_larger),
    "time axis not rotated": Case(time_unrotated),
    "halves of guidance swapped": Case(halves_swapped),
    "modulation 10 % too small": Case(modulation_smaller),
    "two rows of one layer exchanged": Case(rows_exchanged),
    "rows of all layers permuted": Case(rows_permuted),
    "GELU by erf": Case(gelu_by_erf),
    "1 % of the keys dropped": Case(partial(keys_dropped, 0.01)),
    "5 % of the keys dropped": Case(partial(keys_dropped, 0.05)),
    "two layers swapped": Case(layers_swapped),
    "sums in bfloat16": Case(sums_rounded),
}


class Compiler:
    """Compiles a profile's programs in other ways.

    Args:
        manifest: the artifact's.
        profile: its profile.
        limited: compiles with a limit on the instructions.
        folder: for what it compiles.
    """

    def __init__(self, manifest: Manifest, profile: Profile, limited: LimitedProcesses, folder: Path) -> None:
        self._manifest, self._profile = manifest, profile
        self._limited, self._folder = limited, folder
        (programs,) = manifest.program_sets.values()
        self._programs = programs.programs[profile.name]

    def executables(self, name: str, case: Case) -> Mapping[str, Run]:
        """Returns the programs that differ in a case, or their executables do, by name."""
        target = resolve_target("cpu", {})
        if case.products is not None:
            target = dataclasses.replace(target, kernels=replace(target.kernels, products=case.products))
        found: dict[str, Run] = {}
        with case.patch():
            for spec in builder_of(self._manifest, self._profile, target).programs():
                if case.patch is not nullcontext and not self._of_transformer(spec):
                    continue
                data, program = export_program(spec, "cpu"), self._programs[spec.name]
                if case.compiled_otherwise or sha256_of(data) != program.sha256:
                    found[spec.name] = self._compiled(spec.name, program, data, target, case)
        return found

    def _of_transformer(self, spec: ProgramSpec) -> bool:
        return any(name.startswith("transformer") for name in spec.inputs)

    def _compiled(self, name: str, program: Program, data: bytes, target: TargetSpec, case: Case) -> Run:
        lowered = lower(
            data, name, program.donated, target.device, {**target.options_of(name), **case.options}
        )
        if case.limit is None:
            return compile_here(lowered)[0]
        folder = self._folder / case.limit / name
        folder.mkdir(parents=True)
        self._limited.compile(case.limit, folder, {}, name, data, program.donated)
        (entry,) = (path for path in folder.iterdir() if path.name.endswith("-cache"))
        return load(name, lowered, entry.read_bytes())


def moved(run: Run, weights: Sequence[str]) -> Run:
    """Returns an executable whose inputs are rounded once more: float32 to bfloat16, and bfloat16 to a
    neighbour, in all arrays of at least three axes that are no weights.
    """
    generator = np.random.default_rng(0)

    def again(array: Any) -> Any:
        values = np.asarray(array)
        if values.ndim < 3 or values.dtype not in (np.float32, jnp.bfloat16):
            return array
        if values.dtype == jnp.bfloat16:
            signs = generator.integers(-1, 2, values.shape)
            changed = (values.astype(np.float32) * (1 + signs * 2.0**-8)).astype(values.dtype)
        else:
            changed = values.astype(jnp.bfloat16).astype(np.float32)
        return jax.device_put(changed, array.sharding if isinstance(array, jax.Array) else None)

    def call(**arguments: Any) -> Any:
        changed = {
            name: one if name in weights else jax.tree.map(again, one) for name, one in arguments.items()
        }
        return run(**changed)

    return call


class Doctored:
    """Runs the executables of all cases beside the artifact's, each compared by ``Twins`` of its own.

    Args:
        cases: executables by program, by case.
        twins: by case.
        weights: names of inputs that are weights.
    """

    def __init__(
        self,
        cases: Mapping[str, Mapping[str, Run]],
        twins: Mapping[str, Twins],
        weights: Sequence[str],
    ) -> None:
        self._cases, self._twins, self._weights = cases, twins, weights
        self.unusable: dict[str, str] = {}

    def beside(self, name: str, program: Program, shipped: Run, native: Callable[[], Native]) -> Run:
        """Returns a function that calls all of them, and returns what is right."""
        del native
        call = shipped
        wrong = {case: found[name] for case, found in self._cases.items() if name in found}
        for case, run in {MOVED: moved(shipped, self._weights), **wrong}.items():
            call = self._twins[case].beside(name, program, run, partial(Native, call, str))
        return call


def sharpened(source: Path, folder: Path, factor: float) -> Path:
    """Copies a checkpoint; norms of queries and keys are so many times as large."""
    shutil.copytree(source, folder)
    for path in folder.glob("transformer*/*.safetensors"):
        tensors = load_file(path)
        for name, values in tensors.items():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                tensors[name] = (values * factor).astype(values.dtype)
        save_file(tensors, path)
    return folder


def built(source: Path, size: tuple[int, int], frames: int, dtype: str, folder: Path) -> Path:
    """Builds an artifact with one profile for this CPU."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        convert(ConvertRequest(source, folder, {}))
        options = BuildOptions(dtype=dtype)
        request = CompileRequest(folder, ["cpu"], [size], [frames], (True,), options=options)
        compile_artifact(request, lambda line: None)
    return folder


def measured(artifact: Path, cases: Mapping[str, Case], folder: Path) -> Mapping[str, Twins]:
    """Runs all cases of an artifact with one profile; returns what was found of each."""
    manifest = read_manifest(artifact)
    (profile,) = manifest.profiles.values()
    with ExitStack() as stack:
        with pinned("cpu"):
            compiler = Compiler(manifest, profile, stack.enter_context(LimitedProcesses()), folder)
            executables = {name: compiler.executables(name, case) for name, case in cases.items()}
        twins = {
            name: Twins(profile.options, False, lambda what, keep: None) for name in (MOVED, *executables)
        }
        pipeline = stack.enter_context(
            load_artifact(artifact, target="cpu", profile=profile.name, embeddings="none", lazy=True)
        )
        doctored = Doctored(executables, twins, tuple(manifest.components))
        pipeline.session(profile).programs.weights.executables.run_twice(doctored)
        pipeline.load_executables()
        run_all(pipeline, streams=False)
    return twins


COLUMNS_OF: Mapping[str, str] = {
    "prepare": "prepare",
    "denoise_step": "step",
    "denoise_loop": "loop",
    "encode_text": "text",
    "decode": "VAE",
}
"""Columns of the table by the beginning of a program's name."""


def row(name: str, found: Mapping[str, Apart]) -> str:
    """Returns a case's row."""

    def cell(start: str) -> str:
        of_these = [apart for program, apart in found.items() if program.startswith(start)]
        if not of_these:
            return ""
        worst = max(of_these, key=lambda apart: apart.share)
        error = f"{worst.error:.2f} levels" if worst.unit == "levels" else f"{worst.error:.1e}"
        error = "0" if math.isclose(worst.error, 0) else error
        return error if worst.agrees else f"**{error}**"

    return f"| {name} | " + " | ".join(cell(start) for start in COLUMNS_OF) + " |"


def main() -> None:
    """Measures what the command line says."""

    def size(text: str) -> tuple[int, int]:
        width, height = map(int, text.split("x"))
        return width, height

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--size", type=size, default=(96, 64))
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--sharp", type=float, default=1.0, help="Norms of queries and keys, times this.")
    parser.add_argument("--only", action="append", choices=CASES, help="A case; repeatable.")
    given = parser.parse_args()
    print(f"{given.checkpoint.name} in {given.dtype}, norms x {given.sharp:g}, on {cpu_name()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = given.checkpoint.resolve()
        if given.sharp != 1:
            source = sharpened(source, folder / "sharp", given.sharp)
        artifact = built(source, given.size, given.frames, given.dtype, folder / "artifact")
        cases = {case: CASES[case] for case in given.only or CASES}
        found = measured(artifact, cases, folder)
    print("| program | " + " | ".join(COLUMNS_OF.values()) + " |\n|" + "---|" * (1 + len(COLUMNS_OF)))
    for case, twins in found.items():
        if twins.found:  # a case may change nothing at this dtype
            print(row(case, twins.found))


if __name__ == "__main__":
    main()
