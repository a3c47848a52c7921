"""Entries of the cache: their instructions, how they are compiled, and the flags of JAX meanwhile."""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard
from jax import export
from jax._src import compilation_cache

from helpers.chips import needs_cuda
from helpers.damage import linked
from helpers.manifests import plain_manifest
from helpers.refusals import refuses
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.models.attention_forms import attention_form
from wanbuild.programs import limited
from wanbuild.programs.entry_compiler import EntryCompiler
from wanbuild.programs.export import CUSTOM_CALLS
from wanbuild.programs.instructions import _RECORD as RECORD
from wanbuild.programs.instructions import beyond, features_used, record_cpu_level
from wanbuild.programs.jax_flags import FLAGS, cache_in, jax_options, pinned
from wanbuild.programs.limited import FLAG, LimitedProcesses
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanbuild.targets.target import resolve_target
from wanrun.artifact.artifact import Artifact
from wanrun.errors import ArtifactError, WanError
from wanrun.timing.spans import Spans

RETURN = b"\xc3"

CODE = {
    "AVX": bytes.fromhex("c5fc58c1"),  # vaddps ymm0, ymm0, ymm1
    "AVX2": bytes.fromhex("c5fdfec1"),  # vpaddd ymm0, ymm0, ymm1
    "FMA": bytes.fromhex("c4e275b8c2"),  # vfmadd231ps xmm0/ymm0, ...
    "AVX512F": bytes.fromhex("62f17c4858c1"),  # vaddps zmm0, zmm0, zmm1
    "AVX512_BF16": bytes.fromhex("62f2764852c2"),  # vdpbf16ps zmm0, zmm1, zmm2
    "AVX512_VBMI": bytes.fromhex("62f275288dc2"),  # vpermb ymm0, ymm1, ymm2
}


def object_file(*sections: tuple[int, bytes]) -> bytes:
    """An ELF64 file of sections (flags, content)."""
    contents = b"".join(content for _, content in sections)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, 64 + len(contents))
    struct.pack_into("<HH", header, 0x3A, 64, len(sections))
    table, offset = b"", 64
    for flags, content in sections:
        table += struct.pack("<IIQQQQ", 0, 1, flags, 0, offset, len(content)) + bytes(24)
        offset += len(content)
    return bytes(header) + contents + table


def entry(path: Path, *files: bytes) -> Path:
    path.write_bytes(compilation_cache.compress_executable(b"before" + b"between".join(files) + b"after"))
    return path


@pytest.mark.parametrize("name", CODE)
def test_every_feature_is_seen(tmp_path: Path, name: str) -> None:
    found = features_used(entry(tmp_path / "one", object_file((4, CODE[name] + RETURN))))
    assert name in found and found <= {"X64", "AVX512F", "AVX512VL", name}


def test_all_files_and_sections_are_read(tmp_path: Path) -> None:
    plain = object_file((4, RETURN), (0, CODE["AVX512_BF16"]))
    one = entry(tmp_path / "one", plain, object_file((4, RETURN), (6, CODE["AVX512_VBMI"])))
    assert beyond(one, CPU_LEVELS["cpu-v4"].instructions) == ["AVX512_VBMI"]
    assert beyond(one, CPU_LEVELS["cpu-v3"].instructions) == ["AVX512VL", "AVX512_VBMI"]
    assert not beyond(entry(tmp_path / "two", plain), CPU_LEVELS["cpu-v3"].instructions)


def test_what_an_entry_says_that_it_needs(tmp_path: Path) -> None:
    """The first record is of a CPU with GFNI, the second too short to be one."""
    more = [f"-feature{number}" for number in range(30)]
    needs = ",".join(["+64bit", "+avx2", "+gfni", *more, "-avx512f", "+sse4.1"]).encode()
    one = entry(tmp_path / "one", needs + b"\0", b"+gfni,+vaes", object_file((4, RETURN)))
    before = compilation_cache.decompress_executable(one.read_bytes())
    record_cpu_level(one, CPU_LEVELS["cpu-v3"])
    after = compilation_cache.decompress_executable(one.read_bytes())
    assert after == before.replace(b"+gfni,-", b"-gfni,-")


def test_levels_differ(tmp_path: Path) -> None:
    for name, lowest in (("FMA", "cpu-v3"), ("AVX512F", "cpu-v4"), ("AVX512_BF16", "cpu-v4-bf16")):
        one = entry(tmp_path / name, object_file((4, CODE[name] + RETURN)))
        fitting = [level.name for level in CPU_LEVELS.values() if not beyond(one, level.instructions)]
        assert fitting == list(CPU_LEVELS)[list(CPU_LEVELS).index(lowest) :]


def test_what_is_no_machine_code(tmp_path: Path) -> None:
    with refuses("damaged", ArtifactError, what=" in one"):
        features_used(entry(tmp_path / "one", object_file((0, CODE["AVX"]))))
    with refuses("damaged", ArtifactError, what=" of two "):
        features_used(entry(tmp_path / "two", object_file((4, b"\x06" + RETURN))))


def tanh(rows: int) -> bytes:
    """An exported program."""
    shape = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
    function = export.export(jax.jit(lambda x: {"y": jnp.tanh(x) * x + 1}), platforms=["cpu"])
    return bytes(function(x=shape).serialize())


@pytest.mark.slow
def test_the_end_of_processes(tmp_path: Path) -> None:
    """One that was killed is an error; an error ends the others at once."""
    with pytest.raises(KeyboardInterrupt), LimitedProcesses() as processes:
        for limit in ("AVX2", "SSE4_2"):
            processes.compile("cpu", limit, tmp_path, {}, "program", tanh(8), ())
        process = processes._processes["cpu", "SSE4_2"]
        processes._processes["cpu", "AVX2"].kill()
        with refuses("failed", WanError, what="program for AVX2 "):
            processes.compile("cpu", "AVX2", tmp_path, {}, "program", tanh(8), ())
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGKILL


def test_half_a_request_ends_the_process() -> None:
    """As a parent leaves it that is killed while it asks."""
    process = limited._started("AVX2")
    process.communicate(pickle.dumps("a request")[:9], timeout=60)
    assert process.returncode == 1


@pytest.mark.slow
def test_a_process_compiles_within_its_limit(tmp_path: Path) -> None:
    """On a CPU of a higher level too; this process's own limit, which is none, stays."""
    before = os.environ.get("XLA_FLAGS")
    with LimitedProcesses() as processes:
        found = {}
        for limit in ("AVX2", "SSE4_2"):
            (tmp_path / limit).mkdir()
            figures = processes.compile("cpu", limit, tmp_path / limit, {}, "program", tanh(64), ())
            assert figures["output_bytes"] >= 64 * 4096 * 4
            (path,) = (tmp_path / limit).glob("*-cache")
            found[limit] = features_used(path)
    (path,) = (tmp_path / "AVX2").glob("*-cache")
    record_cpu_level(path, CPU_LEVELS["cpu-v3"])
    listed = b",".join(RECORD.findall(compilation_cache.decompress_executable(path.read_bytes())))
    recorded = {name[1:].decode() for name in listed.split(b",") if name.startswith(b"+")}
    assert {"avx2", "fma", "sse4.2"} <= recorded <= CPU_LEVELS["cpu-v3"].recorded
    assert found["AVX2"] <= CPU_LEVELS["cpu-v3"].instructions and "AVX" in found["AVX2"]
    assert not {name for name in found["SSE4_2"] if name.startswith("AVX")}
    assert os.environ.get("XLA_FLAGS") == before and FLAG not in (before or "")


def exported(function: Callable[..., Any], tokens: int = 64, width: int = 64) -> bytes:
    """A program of one bfloat16 array of two heads, for GPUs."""
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS["cuda"]]
    make = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)
    return bytes(make(q=jax.ShapeDtypeStruct((1, tokens, 2, width), jnp.bfloat16)).serialize())


@pytest.mark.slow
@needs_cuda
def test_what_calls_cudnn_is_left_to_the_gpu(tmp_path: Path) -> None:
    """Without the GPU its executable would load, and fail when it is called."""

    def attention(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    def convolution(q: jax.Array) -> jax.Array:
        filters = jnp.ones((3, 3, 64, 64), q.dtype)
        return jax.lax.conv_general_dilated(
            q, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def plain(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q)

    with pinned("cpu"), LimitedProcesses() as processes:
        target = resolve_target("h200", {})
        compiler = EntryCompiler(
            Artifact(plain_manifest(), tmp_path), target, "executables", {}, processes, print, Spans()
        )
        left = [compiler.compile(one.__name__, exported(one), ()) for one in (attention, convolution)]
        whole = compiler.compile("plain", exported(plain), ())
    assert all(one.executable is None and one.statistics["compile_seconds"] > 0 for one in left)
    assert whole.executable is not None
    (file,) = (tmp_path / "executables").iterdir()
    assert file.name == whole.executable.file and file.stat().st_size == whole.executable.nbytes


@pytest.mark.thorough
@needs_cuda
@pytest.mark.parametrize(("name", "architecture"), [("h100", b"sm_90a"), ("b200", b"sm_100a")])
def test_attention_of_mosaic_is_in_the_entry(name: str, architecture: bytes, tmp_path: Path) -> None:
    """Its machine code is the only one there: the tokens fill whole blocks."""
    with pinned("cpu"), LimitedProcesses() as processes:
        target = resolve_target(name, {}).attending_by("mosaic")
        compiler = EntryCompiler(
            Artifact(plain_manifest(), tmp_path), target, "executables", {}, processes, print, Spans()
        )
        attend = attention_form(target.kernels)
        data = exported(lambda q: attend(q, q, q), tokens=256, width=128)
        compiled = compiler.compile("attention", data, ())
    assert compiled.executable is not None
    entry = (tmp_path / "executables" / compiled.executable.file).read_bytes()
    code = zstandard.ZstdDecompressor().decompress(entry, max_output_size=2**24)
    assert b"mosaic_gpu" in code and architecture in code


# A build pins JAX's flags and gives them back, whatever the user has set.


OTHERS: Mapping[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 7.0,
    "jax_persistent_cache_enable_xla_caches": "all",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_transfer_guard": "log",
    "jax_optimization_level": "O1",
    "jax_memory_fitting_effort": 0.25,
}
"""What a user may have set."""


def flags() -> dict[str, Any]:
    return dict(jax.config.values)


def ours() -> bool:
    """Whether every flag is as executables are built with."""
    return all(value == FLAGS[name] for name, value in flags().items() if name in FLAGS)


@pytest.fixture
def users() -> Iterator[dict[str, Any]]:
    """JAX's flags as a user has set them; all are set back at the end."""
    with jax_options(**OTHERS):
        yield flags()


def test_every_flag_is_put_back(users: dict[str, Any]) -> None:
    assert not ours()
    with pinned("cpu"):
        assert ours() and flags() != users
        with pinned("cpu"):
            assert ours()
        assert ours()
    assert flags() == users
    with pytest.raises(RuntimeError), pinned("cpu"):
        raise RuntimeError
    assert flags() == users


def test_a_flag_that_changes_others(users: dict[str, Any]) -> None:
    """That of transfers is three, which a user may have set one by one."""
    with jax_options(jax_transfer_guard_host_to_device="disallow_explicit"):
        before = flags()
        assert before["jax_transfer_guard"] == before["jax_transfer_guard_device_to_host"] == "log"
        with pinned("cpu"):
            assert flags()["jax_transfer_guard_host_to_device"] == "allow"
        assert flags() == before
    assert flags() == users


def test_a_flag_that_cannot_be_set(users: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="O9"), jax_options(jax_debug_nans=True, jax_optimization_level="O9"):
        pass
    assert flags() == users


def test_what_is_compiled_is_kept_in_the_folder(tmp_path: Path, users: dict[str, Any]) -> None:
    with pinned("cpu"), cache_in(tmp_path):
        jax.jit(lambda x: 3 * x)(np.float32(2)).block_until_ready()
    (entry,) = tmp_path.glob("*-cache")
    with pinned("cpu"):
        jax.jit(lambda x: 4 * x)(np.float32(2)).block_until_ready()
    assert list(tmp_path.glob("*-cache")) == [entry]


@pytest.mark.thorough
def test_compiling_puts_them_back(toy_artifact: Path, tmp_path: Path, users: dict[str, Any]) -> None:
    artifact = linked(toy_artifact, tmp_path / "artifact")
    request = CompileRequest(
        artifact, ["cpu"], [(96, 64)], [9], (True,), options=BuildOptions(dtype="float32")
    )
    seen: list[bool] = []
    compile_artifact(request, lambda line: seen.append(ours() and "up to date" in line))
    assert len(seen) == 9 and all(seen)
    assert flags() == users
