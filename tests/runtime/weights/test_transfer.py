"""Weights over a mesh: the staged way gives what the direct one gives, and damage in any row is found."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from helpers.artifacts import compiled_store, shared
from helpers.compiling import compiled_once
from helpers.damage import flip
from helpers.devices import in_processes, on_devices
from helpers.manifests import plain_program
from helpers.opened import eventually
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.parameters import Component, Parameter, nest
from wanrun.errors import ArtifactError
from wanrun.timing.timings import Timings
from wanrun.weights.buffers import Memory
from wanrun.weights.restore import Restore
from wanrun.weights.transfer import Staged, Transfer

TARGET = "cpu-tensor2"
STAGED_BYTES = 4096


def build(store: str, checkpoint: str, folder: str) -> None:
    """Makes the artifact: one frame of 32x16 over two devices, of which most matrices are staged."""
    from helpers.artifacts import compile_fast
    from wanbuild.build import convert
    from wanbuild.build_options import BuildOptions, CompileRequest
    from wanbuild.conversion.convert_request import ConvertRequest
    from wanbuild.programs import spreading

    convert(ConvertRequest(Path(checkpoint), Path(folder), {"text_encoder": "float32"}))
    options = BuildOptions(loop="step")
    request = CompileRequest(Path(folder), ["cpu"], [(32, 16)], [1], options=options, mesh={"tensor": 2})
    with mock.patch.object(spreading, "STAGED_BYTES", STAGED_BYTES), compiled_once(Path(store)):
        compile_fast(request)


@pytest.fixture(scope="module")
def mesh_artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy over two devices, bfloat16 and float32. Not to be changed."""
    store = str(compiled_store(tmp_path_factory))
    return shared(
        tmp_path_factory,
        "tensor2-artifact",
        lambda folder: print(on_devices(2, build, store, str(toy_checkpoint), str(folder))),
    )


def run(artifact: str, damaged: str) -> None:
    """Makes the same video each way; then from an artifact of which one row is damaged."""
    import wanrun

    made: dict[str, Any] = {}
    for transfer in ("direct", "staged", "auto"):
        timings = Timings()
        with wanrun.load(artifact, target=TARGET, transfer=transfer, embeddings="none") as pipeline:
            result = pipeline.generate("a fox", seed=3, num_steps=2, timings=timings)
            names = list(pipeline.manifest.components)
            weights = {name: pipeline.component_weights(name) for name in names}
            read = pipeline.timings.restore_bytes + timings.restore_bytes
            assert read == sum(one.nbytes for one in pipeline.manifest.components.values())
            spans = [span.label for span in (*pipeline.timings.labelled_spans, *timings.labelled_spans)]
            spread = {label for label in spans if label and label.endswith(", spread")}
            # One process of CPU devices has one host copy, which the devices share.
            expected = {"transformer, spread", "text_encoder, spread"} if transfer == "staged" else set()
            assert spread == expected, transfer
            bits = jax.tree.map(lambda x: (str(x.sharding), [bytes(s.data) for s in parts(x)]), weights)
            made[transfer] = result.latents.tobytes(), result.frames.tobytes(), bits
    assert made["direct"] == made["staged"] == made["auto"]
    for transfer in ("direct", "staged"):
        with pytest.raises(ArtifactError) as caught:
            wanrun.load(damaged, target=TARGET, transfer=transfer, embeddings="none")
        print(json.dumps(str(caught.value)))


def parts(array: Any) -> list[Any]:
    return [mock.Mock(data=np.asarray(shard.data).tobytes()) for shard in array.addressable_shards]


@pytest.mark.thorough
def test_staged_and_direct_make_the_same_video(mesh_artifact: Path, tmp_path: Path) -> None:
    """Also from another folder, with no cache but the artifact's: nothing is compiled."""
    manifest = read_manifest(mesh_artifact)
    (programs,) = manifest.program_sets.values()
    names = programs.programs["32x16x1-b1-cfg"].keys()
    assert names >= {"spread_transformer", "spread_text_encoder"} and "spread_vae" not in names

    moved = Path(shutil.copytree(mesh_artifact, tmp_path / "moved"))
    damaged = Path(shutil.copytree(mesh_artifact, tmp_path / "damaged"))
    layout = manifest.components["transformer"].parameters["blocks/ffn/up/weight"].layout
    assert (layout.rows, layout.chunks) == (3, 1)
    flip(damaged / "weights/transformer/blocks.ffn.up.weight" / layout.chunk_file(0), 2 * layout.row_bytes)
    lines = on_devices(2, run, str(moved), str(damaged)).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "transformer/blocks/ffn/up/weight, row 2" in line


def brought_to_processes(artifact: str) -> None:
    """Brings the transformer to a mesh over two processes, each way; prints the bytes read."""
    from wanbuild.models.partition import PARAMETERS
    from wanbuild.programs import spreading
    from wanbuild.programs.export import describe
    from wanbuild.programs.shardings import weights_placed

    component = read_manifest(Path(artifact)).components["transformer"]
    layouts = {path: one.layout for path, one in component.parameters.items()}
    dtypes = {path: "uint16" if one.dtype == "bfloat16" else one.dtype for path, one in layouts.items()}
    abstract = {path: jax.ShapeDtypeStruct(one.shape, dtypes[path]) for path, one in layouts.items()}
    axes = {path: one.axes for path, one in component.parameters.items()}
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mock.patch.object(spreading, "STAGED_BYTES", STAGED_BYTES):
        weights = weights_placed(nest(abstract), axes, mesh)
        spec = spreading.spread("transformer", component, weights, PARAMETERS, mesh)
    assert spec is not None
    with spec.tracing():
        placed = jax.tree.map(lambda leaf: leaf.sharding, spec.outputs)
        compiled = jax.jit(spec.function, out_shardings=placed).lower(*spec.arguments).compile()
    program, made, read = (
        plain_program(inputs=spec.inputs, avals=describe(spec, {})),
        list[Any](),
        list[int](),
    )
    for spread in (None, program):
        transfer = Transfer(component, PARAMETERS, mesh, spread)
        with ThreadPoolExecutor(2) as pool:
            restore = Restore(Path(artifact), "transformer", component, pool, rows=transfer.rows)
            direct, rows = transfer.put(restore.result(bits=True))
        whole = {**direct, **(compiled(rows)["weights"] if rows else {})}
        made.append({path: [part.data for part in parts(array)] for path, array in whole.items()})
        read.append(restore.nbytes)
    assert made[0] == made[1]
    print(json.dumps(read))


@pytest.mark.thorough
def test_each_process_reads_its_share(mesh_artifact: Path) -> None:
    """Of three rows, one for each of four devices: the first process reads two and the second one."""
    component = read_manifest(mesh_artifact).components["transformer"]
    layouts = [one.layout for one in component.parameters.values()]
    staged = sum(one.nbytes for one in layouts if one.nbytes >= STAGED_BYTES and one.rows == 3)
    assert staged > component.nbytes / 2
    lines = in_processes(2, 2, brought_to_processes, str(mesh_artifact))
    small = component.nbytes - staged
    expected = [[component.nbytes, small + staged * rows // 3] for rows in (2, 1)]
    assert [json.loads(line.splitlines()[-1]) for line in lines] == expected


# --- without devices ---------------------------------------------------------------------------------------

LAYOUT = ArrayLayout((3, 4), "bfloat16", 3, 3)
ONE = Component(
    "weights/c", {"a/b": Parameter(layout=LAYOUT, axes=("layers", None), crc32c=("0",) * 3, sha256="")}
)


def test_rows_are_spread_once_by_whoever_comes_first() -> None:
    calls = []

    def spread(rows: dict[str, Any]) -> dict[str, Any]:
        calls.append(rows)
        return {"weights": {"a/c": "whole"}}

    staged = Staged({"a/b": "small"}, {"a/c": "rows"}, spread)  # type: ignore[dict-item]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: staged.weights(), range(32)))
    assert calls == [{"a/c": "rows"}]
    assert all(tree is found[0] for tree in found) and found[0] == {"a": {"b": "small", "c": "whole"}}


@pytest.mark.slow
def test_spreading_leaves_no_host_copy() -> None:
    """On the CPU, rows alias the block of memory; small parameters do not, or they would keep it."""
    small = Parameter(layout=ArrayLayout((2,), "float32", 1, 1), axes=(None,), crc32c=("0",), sha256="")
    component = Component("weights/c", {**ONE.parameters, "small": small})
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    program = plain_program(
        inputs=("rows",),
        avals={"inputs": {"rows": {"a/b": "uint16[3,4]"}}, "outputs": {"weights": {"a/b": "uint16[3,4]"}}},
    )
    memory = Memory(component)
    block = weakref.ref(memory._block)
    arrays = {path: memory.array(path, one.layout, True) for path, one in component.parameters.items()}
    direct, rows = Transfer(component, {}, mesh, program).put(nest(arrays))
    assert list(direct) == ["small"] and list(rows) == ["a/b"]
    staged = Staged(direct, rows, lambda rows: {"weights": {path: one + 1 for path, one in rows.items()}})
    del memory, arrays, direct, rows
    assert block() is not None
    weights = staged.weights()
    assert eventually(lambda: gc.collect() >= 0 and block() is None)
    assert np.asarray(weights["a"]["b"]).tolist() == [[1] * 4] * 3


def test_a_program_that_fails_can_be_asked_again() -> None:
    damaged = ArtifactError("damaged", "the executable is damaged")
    answers = iter([damaged, {"weights": {"b": 2}}])

    def spread(rows: dict[str, Any]) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    staged = Staged({}, {"b": 1}, spread)  # type: ignore[dict-item]
    with pytest.raises(ArtifactError) as caught:
        staged.weights()
    assert caught.value is damaged
    assert staged.weights() == {"b": 2}
