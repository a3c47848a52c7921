"""Runs the processes of gpu.py's parts, each with a time limit, and collects their rows."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_rows import Rows
from processes import clean_environment, run_timed

HERE = Path(__file__).parent
ROOT = HERE.parent
MARGIN = 5.0
"""Seconds that a measuring process is told to end before it is ended."""
_ENDED = re.compile(r"ended with (-?\d+) after (\d+) s:")


class ProcessFailedError(Exception):
    """A process ended with an error, or was ended at its time limit; the message is one line.

    Args:
        words: what the process was.
        code: its exit code; negative for a signal.
        last: the last line that it wrote.
    """

    def __init__(self, words: str, code: int, last: str) -> None:
        super().__init__(f"{words}: {last or 'no output'} (exit code {code})"[:240])
        self.code, self.last = code, last


class NotGivenError(Exception):
    """A part needs what the command line did not give; the message is one line."""


class Bench:
    """The running part, its rows and its processes.

    Args:
        folder: a folder for what the parts make; it is removed at the end.
        smoke: whether everything is tiny and on the CPU.
        artifact: a toy artifact with golden records to begin with; None to make one.
        target: the target in it that was built elsewhere; None for the first that is not a CPU's.
        kernel: a folder with an attention that was built elsewhere; None for none.

    Attributes:
        rows: the rows of the part that runs now.
        until: when the part must end, on time.monotonic().
    """

    def __init__(
        self,
        folder: Path,
        smoke: bool,
        artifact: Path | None,
        target: str | None,
        kernel: Path | None = None,
    ) -> None:
        self.folder, self.smoke, self.artifact, self.target = folder, smoke, artifact, target
        self.kernel = kernel and kernel.absolute()
        self.until = 0.0
        self.rows = Rows(folder / "rows.jsonl")
        paths = [str(ROOT / "build"), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
        self.environment = clean_environment(
            PYTHONPATH=os.pathsep.join(filter(None, paths)),
            XDG_CACHE_HOME=str(folder / "cache"),
            **({"JAX_PLATFORMS": "cpu"} if smoke else {}),
        )

    def begin(self, part: str, until: float) -> None:
        """Starts a part: its rows have their own file."""
        self.rows, self.until = Rows(self.folder / f"rows-{part}.jsonl"), until

    @property
    def left(self) -> float:
        """Seconds that the part has left.

        Raises:
            TimeoutError: if there are none.
        """
        left = self.until - time.monotonic()
        if left < 1:
            raise TimeoutError("the part's time is up")
        return left

    def run(self, what: str, words: Sequence[object], **environment: str) -> float:
        """Runs a command and returns its seconds.

        Raises:
            ProcessFailedError: if it fails, or exceeds the part's time.
            TimeoutError: if there is no time left.
        """
        limit = self.left
        started = time.monotonic()
        try:
            return run_timed(words, limit, {**self.environment, **environment})
        except SystemExit as error:
            text = str(error)
            found = _ENDED.search(text)
            code = int(found[1]) if found else 1
            written = text[found.end() :] if found else text
            last = next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "")
            if code == -9 and time.monotonic() - started >= limit:
                last = f"ended after {limit:.0f} s, its time limit; {last}"
            raise ProcessFailedError(what, code, last) from None

    def wanbuild(self, command: str, *words: object, **environment: str) -> float:
        """Runs a ``wanbuild`` command; returns its seconds, raises as ``run``."""
        words = (sys.executable, "-m", "wanbuild", command, *words)
        return self.run(f"wanbuild {command}", words, **environment)

    def measure(
        self, script: str, name: str, environment: Mapping[str, str] = MappingProxyType({}), **arguments: Any
    ) -> None:
        """Runs a measuring script, which writes rows; if it dies, that is a row too."""
        arguments |= {"smoke": self.smoke, "rows": str(self.folder / f"rows-{time.monotonic_ns()}.jsonl")}
        arguments["until"] = time.monotonic() + self.left - MARGIN
        written = Rows(Path(arguments["rows"]))
        fraction = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
        }
        words = [sys.executable, HERE / script, name, json.dumps(arguments)]
        try:
            try:
                self.run(f"{script} {name}", words, **{**fraction, **environment})
            finally:  # an interrupt too leaves what was measured
                self.rows.extend(written.read())
        except ProcessFailedError as error:
            self.rows.fail(name, str(error))


def machine() -> dict[str, Any]:
    """Returns what the first lines say: interpreter, GPU, versions of packages, and what is missing."""
    import importlib.metadata
    import platform

    versions: dict[str, str | None] = {}
    for name in (*PACKAGES, "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpu = _nvidia_smi()
    cells = gpu.split("; ")[0].split(", ")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "driver": cells[2] if len(cells) > 2 else None,
        "versions": {name: version for name, version in versions.items() if version},
        "missing": [name for name in PACKAGES if versions[name] is None],
    }


PACKAGES = (
    *("jax", "numpy", "ml_dtypes", "flatbuffers", "zstandard", "msgspec", "tokenizers", "ftfy", "click"),
    *("imageio-ffmpeg", "pillow", "crc32c", "flax", "orbax-checkpoint", "safetensors"),
    *("huggingface_hub", "gguf", "iced-x86", "torch"),
    *("starlette", "uvicorn", "h11", "python-multipart", "prometheus-client"),
)
"""What ``pip install '.[build,serve]'`` installs, and torch."""


def _nvidia_smi() -> str:
    """Returns name, memory and driver of the GPU, or why they are not known."""
    import subprocess

    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,power.limit",
        "--format=csv,noheader",
    ]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"none that nvidia-smi tells of: {type(error).__name__}"
    return found.stdout.strip().replace("\n", "; ")


def device_bytes() -> float:
    """Returns the bytes of the first GPU's memory, as nvidia-smi tells them.

    Raises:
        LookupError: if it tells of none.
    """
    found = _nvidia_smi()
    cells = found.split("; ")[0].split(", ")
    if len(cells) < 2:
        raise LookupError(found)
    return float(cells[1].split()[0]) * 2**20


def manifest_fields(artifact: Path) -> Mapping[str, Any]:
    """Returns an artifact's manifest.json as it is written; this process imports nothing of the project."""
    return json.loads((artifact / "manifest.json").read_text())
