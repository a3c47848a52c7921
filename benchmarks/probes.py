"""The measurements of start.py, each in a separate process: ``python probes.py NAME JSON``.

Only light standard library modules are imported at the top, because imports are part of the timed start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

BUILD_PACKAGES = ("wanbuild", "flax", "torch", "transformers", "orbax", "tensorstore")
"""Packages that a local start must not import."""


def leave(arguments: dict[str, Any], result: dict[str, Any]) -> NoReturn:
    """Writes the result and ends the process at once, whatever its other threads are doing."""
    spent = os.times()
    cpu = {"cpu_user_seconds": spent.user, "cpu_system_seconds": spent.system}
    Path(arguments["result"]).write_text(json.dumps({**result, **cpu}))
    os._exit(0)


def floor(arguments: dict[str, Any]) -> NoReturn:
    """Times process start, import jax, and a parallel read of the files into fresh memory."""
    spawned = arguments["spawned"]
    started = time.monotonic()
    import jax  # noqa: F401

    imported = time.monotonic()
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    def read(item: tuple[str, int]) -> Any:
        path, size = item
        buffer = np.empty(size, np.uint8)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            view, done = buffer.data, 0
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise EOFError(path)
                done += count
        return buffer

    with ThreadPoolExecutor(arguments["threads"]) as pool:
        buffers = list(pool.map(read, arguments["files"]))
    finished = time.monotonic()
    nbytes = sum(buffer.nbytes for buffer in buffers)
    leave(
        arguments,
        {
            "interpreter_seconds": started - spawned,
            "import_jax_seconds": imported - started,
            "read_seconds": finished - imported,
            "floor_seconds": finished - spawned,
            "bytes": nbytes,
            "read_gb_per_second": nbytes / 1e9 / (finished - imported),
        },
    )


def _io_bytes() -> int:
    """Returns the bytes that this process has requested in reads, cached or not; 0 if unknown."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["rchar"])


def command(arguments: dict[str, Any]) -> NoReturn:
    """Runs the wanrun command, and ends it when its timings say ready, or after some steps.

    The command runs as installed, with its own parsing, checks and progress. Only the two methods that record
    that moment are wrapped, so that a start does not cost a generation.
    """
    stop, events = arguments["stop"], []
    if arguments.get("listen"):
        import jax

        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration_secs, **facts: events.append(
                [event, facts.get("fun_name", ""), duration_secs]
            )
        )
    from wancli.__main__ import main as run
    from wanrun.timing.timings import Timings

    def finish(timings: Timings) -> NoReturn:
        elapsed = time.monotonic() - arguments["spawned"]
        leave(
            arguments,
            {
                "timing": timings.as_json(),
                "elapsed_seconds": elapsed,
                "io_bytes": _io_bytes(),
                "events": events,
                "modules": list(sys.modules) if arguments.get("modules") else None,
                "build_packages": [name for name in BUILD_PACKAGES if name in sys.modules],
            },
        )

    mark_ready, steps = Timings.mark_ready, Timings.steps
    done = []

    def mark_ready_and_stop(self: Timings) -> None:
        mark_ready(self)
        finish(self)

    def step_and_stop(self: Timings, loop: str, count: int, seconds: float, together: bool = False) -> None:
        steps(self, loop, count, seconds, together)
        done.append(seconds)
        if len(done) == stop:
            finish(self)

    if stop == "ready":
        Timings.mark_ready = mark_ready_and_stop  # type: ignore[method-assign]
    else:
        Timings.steps = step_and_stop  # type: ignore[method-assign]
    sys.argv = ["wanrun", *arguments["arguments"]]
    run()
    raise SystemExit(f"wanrun ended before {stop}")


def imports(arguments: dict[str, Any]) -> NoReturn:
    """Imports modules in this order; skips names that exist only while their parent is imported."""
    from importlib import import_module

    missing = []
    started = time.monotonic()
    for name in arguments["modules"]:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    leave(arguments, {"import_seconds": time.monotonic() - started, "missing": missing})


def main() -> None:
    probe = {"floor": floor, "command": command, "imports": imports}[sys.argv[1]]
    probe(json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
