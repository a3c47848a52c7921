"""What strangers send to a server: tries a door, prints what is wrong, and exits with 9 then.

python -m campaign.at_doors DOOR SEED FOLDER ARTIFACT

The folder is empty; of the artifact those of ``picture`` take a first image.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from helpers.pictures import many_scans
from helpers.small_disk import fill
from serve_client import Server, memory_bytes

QUICK_SECONDS = 5.0
"""Within which an answer comes, and a server ends that has no job."""

MOST_BYTES = 700 << 20
"""Of a server's own process."""

FORM = {"content-type": "multipart/form-data; boundary=xyz"}


def users_files(rng: random.Random, folder: Path, artifact: Path) -> Iterator[str]:
    """A folder of data that has files of the user, whose names are like the server's."""
    places = (
        "",
        "incoming",
        "incoming/photos",
        "incoming/tmp1234abcd",
        "videos",
        "videos/video_1",
        "videos/a",
    )
    data, kept = folder / "data", dict[Path, bytes]()
    for place in rng.sample(places, rng.randint(1, len(places))):
        path = data / place / rng.choice(("a.jpg", "notes.txt", "image-0.bin", ".hidden"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept.setdefault(path, rng.randbytes(9)))
    with _server(folder, artifact) as server:
        if rng.randrange(2):
            server.call("POST", "/v1/videos", b"{", **{"content-type": "application/json"})
    for path, content in kept.items():
        if not path.is_file() or path.read_bytes() != content:
            yield f"{path} has gone or changed"


def picture(rng: random.Random, folder: Path, artifact: Path) -> Iterator[str]:
    """One client's picture that takes long or much, another one's that does not, and perhaps a signal."""
    large = _picture(rng)
    small = io.BytesIO()
    Image.new("RGB", (64, 32)).save(small, "PNG")
    with _server(folder, artifact, keys=True) as server:
        sent = [threading.Thread(target=_send, args=(server, "a", large), daemon=True) for _ in range(3)]
        for thread in sent:
            thread.start()
        time.sleep(rng.uniform(0, 1))
        started = time.monotonic()
        answer = _send(server, "b", small.getvalue())
        if time.monotonic() - started > QUICK_SECONDS or answer != 200:
            yield f"another client's picture: {answer} after {time.monotonic() - started:.1f} s"
        if (taken := memory_bytes(server.process.pid)) > MOST_BYTES:
            yield f"the server has {taken >> 20} MB"


def _picture(rng: random.Random) -> bytes:
    data, side = io.BytesIO(), rng.choice((500, 3000, 7000))
    image = Image.new("RGB", (side, side), rng.choice(("black", "red")))
    if rng.randrange(2):
        return many_scans(image, rng.choice((1, 100, 5000)))
    image.save(data, *(("JPEG2000",), ("WEBP",), ("GIF",))[rng.randrange(3)])
    return data.getvalue()


def _send(server: Server, key: str, image: bytes) -> int:
    """Sends a picture; returns the status."""
    fields = "".join(_part(name) + value + "\r\n" for name, value in (("model", "toy"), ("prompt", "a fox")))
    body = (fields + _part('input_reference"; filename="x')).encode() + image + b"\r\n--xyz--\r\n"
    with contextlib.suppress(OSError):  # the server has ended
        return server.call("POST", "/v1/videos", body, authorization=f"Bearer {key * 20}", **FORM).status
    return 0


def _part(name: str) -> str:
    return f'--xyz\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'


def body(rng: random.Random, folder: Path, artifact: Path) -> Iterator[str]:
    """JSON that is large, deep, or of many small things, several times at once."""
    unit = rng.choice((b"{}", b"[]", b"1", b'""', b"[[[[[]]]]]", b'{"a":1}'))
    count = rng.choice((10, 10**4, 10**7))
    texts = (b"[" + unit + (b"," + unit) * count + b"]", b"[" * count, b'"' + b"a" * 4 * count + b'"')
    text = rng.choice(texts)
    name = rng.choice((b"timesteps", b"prompt", b"extra_body", b"seed"))
    data = b'{"model": "toy", "prompt": "x", "' + name + b'": ' + text[: 60 << 20] + b"}"
    with _server(folder, artifact) as server:
        statuses = list[int]()

        def send() -> None:
            answer = server.call("POST", "/v1/videos", data, **{"content-type": "application/json"})
            statuses.append(answer.status)

        sent = [threading.Thread(target=send, daemon=True) for _ in range(4)]
        for thread in sent:
            thread.start()
        slowest = most = 0.0
        while any(thread.is_alive() for thread in sent):
            started = time.monotonic()
            server.call("GET", "/healthz")
            slowest = max(slowest, time.monotonic() - started)
            most = max(most, memory_bytes(server.process.pid))
        if slowest > QUICK_SECONDS / 2 or most > MOST_BYTES:
            yield f"{name!r}, {len(data)} bytes: others wait {slowest:.1f} s, {int(most) >> 20} MB"
        if not set(statuses) <= {200, 400, 413, 429}:
            yield f"{name!r}, {len(data)} bytes: {statuses}"


def full_disk(rng: random.Random, folder: Path, artifact: Path) -> Iterator[str]:
    """A disk that is full for a while; the folder is on a small one."""
    with _server(folder, artifact) as server:
        filler = fill(folder, rng.choice((0, 5000, 50_000)))
        for _ in range(rng.randint(1, 4)):
            answer = server.call("POST", "/v1/videos", {"prompt": "a fox" * rng.choice((1, 2000))})
            if answer.status not in (200, 400, 507) or b"internal" in answer.body:
                yield f"without room: {answer.status} {answer.body[:200]!r}"
        if server.call("GET", "/readyz").status == 200:
            yield "ready without room"
        filler.unlink()
        server.ready(60)
        status = server.call("POST", "/v1/videos", {"prompt": "a fox"}).status
        if status not in (200, 400):  # a model may want an image too
            yield f"with room again: {status}"
        if any("Traceback" in line for line in server.lines):
            yield "a traceback in the log"


DOORS: Mapping[str, Callable[[random.Random, Path, Path], Iterator[str]]] = MappingProxyType(
    {door.__name__: door for door in (users_files, picture, body, full_disk)}
)


@contextlib.contextmanager
def _server(folder: Path, artifact: Path, keys: bool = False) -> Iterator[Any]:
    """A server of the artifact, which has to end by itself in time, also while the last requests go on."""
    options: Sequence[object] = ()
    if keys:
        file = folder / "keys"
        file.write_text(f"a {'a' * 20}\nb {'b' * 20}\n")
        file.chmod(0o600)
        options = ("--keys", file)
    server = Server(folder / "data", f"toy={artifact}", "--grace", 1, *options)
    try:
        yield server
        started = time.monotonic()
        if (code := server.end(signal.SIGTERM)) != 0 or time.monotonic() - started > 2 * QUICK_SECONDS:
            raise SystemExit(f"SIGTERM: exit code {code} after {time.monotonic() - started:.1f} s")
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def main() -> None:
    """Tries one door."""
    door, seed, folder, artifact = sys.argv[1:]
    wrong = list(DOORS[door](random.Random(int(seed)), Path(folder), Path(artifact)))
    if wrong:
        print(json.dumps(wrong), file=sys.stderr)
        raise SystemExit(9)


if __name__ == "__main__":
    main()
