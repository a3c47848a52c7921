"""Times a conversion and the machine's floor for it: read the source once, cast it, write the result once.

Every repeat measures the floor and then a conversion, so both see the same machine; quote the ratio. The page
cache is warm for reading, and writing counts until the data is on the device (fsync), for both.

    python benchmarks/convert.py --model 1.3b                  # real bytes, random weights
    python benchmarks/convert.py --model 14b --sparse          # 59 GB of source that takes no disk space
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from crc32c import crc32c

from checkpoints import MODELS, ensure_checkpoint
from wanbuild.conversion.tensor import finite
from wanbuild.conversion.writer import BLOCK_ITEMS
from wanbuild.staging import SYNC_THREADS
from wanrun.artifact.manifest import read_manifest

READ_BYTES = 4 * BLOCK_ITEMS
WRITE_BYTES = 2**20
CONVERT = """
import sys, time, json
from pathlib import Path
started = time.process_time()
from wanbuild.build import ConvertRequest, convert
memory = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({"import_rss": int(memory["VmRSS"].split()[0]) * 1024}), flush=True)
request = ConvertRequest(sys.argv[1], Path(sys.argv[2]), threads=int(sys.argv[3]) or None)
begun, cpu = time.perf_counter(), time.process_time()
convert(request)
print(json.dumps({"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}), flush=True)
"""


def settle() -> None:
    """Waits for the device, and for ext4, which for 5 s steps over the inodes of deleted files one by one."""
    os.sync()
    time.sleep(6)


def parallel(threads: int, work: Callable[[int], None]) -> float:
    """Returns the seconds until ``work(i)`` is done for every thread i."""
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return time.perf_counter() - started


def read_floor(files: list[Path], threads: int) -> float:
    """Times reading every file once, in blocks, into reused buffers."""

    def work(thread: int) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            size = path.stat().st_size
            share = -(-size // threads)
            for offset in range(thread * share, min(size, (thread + 1) * share), READ_BYTES):
                os.preadv(descriptor, [buffer], offset)
            os.close(descriptor)

    return parallel(threads, work)


def cast_floor(items: int, threads: int) -> float:
    """Times casting this many float32 values to bfloat16, from and to buffers that stay in cache."""
    source = np.random.default_rng(0).standard_normal(BLOCK_ITEMS, np.float32)
    blocks = -(-items // BLOCK_ITEMS // threads)

    def work(thread: int) -> None:
        mine, target = source.copy(), np.empty(BLOCK_ITEMS, ml_dtypes.bfloat16)
        for _ in range(blocks):
            target[...] = mine

    return parallel(threads, work)


def write_floor(folder: Path, sizes: list[int], threads: int, direct: bool) -> float:
    """Times writing files of these sizes until they are on the device, buffered or with O_DIRECT."""
    folder.mkdir()
    rng = np.random.default_rng(0)

    def work(thread: int) -> None:
        import mmap

        buffer = mmap.mmap(-1, WRITE_BYTES)  # page-aligned, as O_DIRECT requires
        buffer.write(rng.bytes(WRITE_BYTES))
        view = memoryview(buffer)
        for number in range(thread, len(sizes), threads):
            flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
            descriptor = os.open(folder / str(number), flags)
            size = -(-sizes[number] // 4096) * 4096 if direct else sizes[number]
            for offset in range(0, size, WRITE_BYTES):
                os.write(descriptor, view[: min(WRITE_BYTES, size - offset)])
            if not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def sync(number: int) -> None:
        descriptor = os.open(folder / str(number), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    started = time.perf_counter()
    parallel(threads, work)
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(sync, range(len(sizes))))
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def block_costs() -> dict[str, float]:
    """Returns the seconds per source byte of each operation on a float32 block, one thread, in cache."""
    values = np.random.default_rng(0).standard_normal(BLOCK_ITEMS, np.float32)
    cast = values.astype(ml_dtypes.bfloat16)
    raw, out = values.view(np.uint8).data, cast.view(np.uint8).data

    def assign() -> None:
        cast[...] = values

    costs: dict[str, Callable[[], object]] = {
        "cast": assign,
        "crc32c of the source": lambda: crc32c(raw),
        "crc32c of the result": lambda: crc32c(out),
        "sha256 of the result": lambda: hashlib.sha256(out).digest(),
        "check for NaN": lambda: finite(cast),
    }
    seconds = {}
    for name, work in costs.items():
        times = []
        for _ in range(200):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        seconds[name] = statistics.median(times) / values.nbytes
    return seconds


def convert(checkpoint: Path, artifact: Path, threads: int) -> dict[str, float]:
    """Converts in a separate process; returns seconds, CPU seconds, and peak memory above the imports."""
    command = [sys.executable, "-c", CONVERT, str(checkpoint), str(artifact), str(threads)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        baseline = json.loads(process.stdout.readline())["import_rss"]
        peak = anonymous = 0
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            with contextlib.suppress(OSError, KeyError, ProcessLookupError):
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                peak = max(peak, int(fields["VmHWM"].split()[0]) * 1024)
                anonymous = max(anonymous, int(fields["RssAnon"].split()[0]) * 1024)
            time.sleep(0.01)
        result = json.loads(process.stdout.readline())
    if process.returncode:
        raise SystemExit(f"convert ended with {process.returncode}")
    return {
        "seconds": result["seconds"],
        "cpu_seconds": result["cpu"],
        "process_seconds": time.perf_counter() - started,
        "peak_rss_above_import": peak - baseline,
        "peak_anonymous": anonymous,
        "import_rss": baseline,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="1.3b")
    parser.add_argument("--sparse", action="store_true", help="the source is holes that read as zeros")
    parser.add_argument("--layers", type=int, default=1, help="of the text encoder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: the converter's default")
    parser.add_argument("--folder", type=Path, help="kept, and used again if it holds the checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.folder or Path(temporary))


def run(options: argparse.Namespace, folder: Path) -> None:
    """Creates the checkpoint if it is missing, repeats the measurement, prints a table and a JSON line."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = ensure_checkpoint(folder, options.model, layers=options.layers, sparse=options.sparse)
    files = sorted(checkpoint.rglob("*.safetensors"))
    source_bytes = sum(path.stat().st_size for path in files)
    threads = os.cpu_count() or 1
    artifact = folder / "artifact-of-benchmark"
    shutil.rmtree(artifact, ignore_errors=True)
    runs: list[dict[str, float]] = []
    sizes: list[int] = []
    read_floor(files, threads)  # warms the page cache, as far as the source fits
    for _ in range(options.repeats):
        figures = convert(checkpoint, artifact, options.threads)
        if not sizes:
            components = read_manifest(artifact).components
            sizes = [path.stat().st_size for path in (artifact / "weights").rglob("c/**/*") if path.is_file()]
            items = sum(
                math.prod(p.layout.shape)
                for component in components.values()
                for p in component.parameters.values()
                if p.layout.dtype == "bfloat16"
            )
        shutil.rmtree(artifact)
        settle()
        figures["read"] = read_floor(files, threads)
        figures["cast"] = cast_floor(items, threads)
        figures["write"] = min(
            write_floor(folder / "write", sizes, n, direct) for n, direct in ((threads, False), (8, True))
        )
        settle()
        figures["floor"] = max(figures["read"], figures["cast"], figures["write"])
        figures["ratio"] = figures["seconds"] / figures["floor"]
        runs.append(figures)
        print(" ".join(f"{name} {value:.3g}" for name, value in figures.items()), file=sys.stderr)
    result: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result |= {"model": options.model, "source_bytes": source_bytes, "result_bytes": sum(sizes)}
    result["gb_per_second"] = source_bytes / 1e9 / result["seconds"]
    for name in ("read", "cast", "write", "floor", "seconds", "cpu_seconds", "process_seconds"):
        print(f"{name:<24} {result[name]:>8.2f} s")
    print(f"{'ratio to the floor':<24} {result['ratio']:>8.2f}")
    print(f"{'source':<24} {source_bytes / 1e9:>8.2f} GB, {result['gb_per_second']:.2f} GB/s")
    print(f"{'result':<24} {result['result_bytes'] / 1e9:>8.2f} GB in {len(sizes)} files")
    for name in ("import_rss", "peak_rss_above_import", "peak_anonymous"):
        print(f"{name:<24} {result[name] / 1e9:>8.2f} GB")
    for name, cost in block_costs().items():
        result[name] = cost * source_bytes
        print(f"  CPU, {name:<21} {result[name]:>6.2f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
