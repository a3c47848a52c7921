"""``wanrun serve``: reads the options, starts the first worker, and only then imports the server."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

import wanhub
import wanrun
from wancli.click_options import click_option
from wancli.command import Command, InputPath, Number, OutputPath, fetch, folder_found, options_of
from wancli.console import leave, run
from wancli.error_line import JSON_ERRORS, JSON_ERRORS_HELP
from wanrun.artifact.overlay import overlaid
from wanrun.artifact.select import BUILD_EXTRA, can_build
from wanrun.errors import UsageError
from wanrun.opened.policy import LoadPolicy
from wanrun.rows import rows_of
from wanrun.terminal.lines import warn
from wanserve.process import WorkerProcess, begin_line
from wanserve.settings import Settings

LOOPBACK = ("localhost", "127.0.0.1", "::1")
KEYS = "WANRUN_API_KEYS"
OPEN_FILES = 8192
"""Each connection is one; the usual limit is 1024."""

OF_LOADING = ("target", "allow_compile", "verify", "memory")
"""The options of ``wanrun.load`` that a server has."""

MOST_SECONDS = 1e6
"""Of an option."""

MOST_PIXELS = 1 << 30
"""Of an option: the memory of a decoder follows it, which the system counts in an address's bits."""

MOST_LIMIT = 1 << 40
"""Of an option: pixels in all frames."""

MOST_WORKERS = 1024
"""Of an option."""

_network, _limits = options_of("Network"), options_of("Limits")
_jobs, _loading, _log = options_of("Jobs"), options_of("Loading"), options_of("Log")
_path = InputPath()
_positive = click.IntRange(min=1)


def _of_loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds those options of loading that hold for every artifact of a server, in the order of the table."""
    for row in reversed(rows_of(LoadPolicy)):
        if row.name in OF_LOADING:
            function = click_option(row, row.section)(function)
    return function


def named(words: tuple[str, ...]) -> dict[str, Path]:
    """Returns the folder of each artifact by the model's name: ``NAME=DIR``, or the folder's own name.

    An address may stand for a folder: see docs/sharing.md. Raises UsageError for two of one name, or an empty
    name.
    """
    found = dict[str, Path]()
    for word in words:
        url = re.fullmatch(r"(?:([^=:/]*)(=))?(\w+://.*)", word)
        name, equals, folder = word.rpartition("=") if url is None else url.groups("")
        path = folder_found(folder)
        if equals and not name:
            raise UsageError("missing_parameter", f"{word} has no name", expected="NAME=DIR")
        whole = os.path.realpath(path) if url is None else re.split("[@?]", folder)[0]
        name = name or whole.rpartition("/")[2]
        if name in found:
            raise UsageError("conflict", f"two artifacts are called {name}", remedy="name them: NAME=DIR")
        found[name] = path.absolute() if path.is_dir() else path  # errors name another path as it is written
    return found


@click.command(
    "wanrun serve",
    cls=Command,
)
@click.argument("artifacts", nargs=-1, required=True, metavar="[NAME=]ARTIFACT...")
@_network("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@_network(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: a free one."
)
@_network(
    "--keys",
    type=_path,
    help=f"File with a line NAME KEY [JOBS THAT MAY WAIT [SECONDS OF A LIVE VIDEO]] per client; also {KEYS}.",
)
@_network(
    "--allow-host", multiple=True, metavar="NAME", help="Name of this server, behind a proxy; repeatable."
)
@_network("--cors", multiple=True, metavar="ORIGIN", help="Site whose pages may call the API; repeatable.")
@_network("--tls-certificate", type=_path, help="Certificate, PEM.")
@_network("--tls-key", type=_path, help="Its key, PEM.")
@_network("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@_jobs(
    "--data",
    type=OutputPath(),
    default=Path("wanrun-videos"),
    show_default=True,
    help="Folder of jobs and videos.",
)
@_jobs("--max-waiting", type=_positive, default=100, show_default=True, help="Jobs that may wait.")
@_jobs(
    "--attempts",
    type=_positive,
    default=3,
    show_default=True,
    help="How often a job is begun if its process is killed.",
)
@_jobs(
    "--grace",
    type=Number(0, MOST_SECONDS),
    default=30.0,
    show_default=True,
    help="Seconds for a running job to end after SIGTERM.",
)
@_jobs("--keep-days", type=Number(0, 36_500, min_open=True), help="Days that ended jobs are kept.")
@_jobs("--keep-gb", type=Number(0, 1e9, min_open=True), help="Gigabytes of videos that are kept.")
@_limits(
    "--max-live-seconds",
    type=Number(1, MOST_SECONDS),
    default=600.0,
    show_default=True,
    help="Seconds of a live video; of its device --live-wait more.",
)
@_limits(
    "--live-wait",
    type=Number(0.1, MOST_SECONDS),
    default=10.0,
    show_default=True,
    help="Seconds that a live video waits for a reader.",
)
@_limits(
    "--live-gb",
    type=Number(0, 1e9, min_open=True),
    default=1.0,
    show_default=True,
    help="Gigabytes of a live video that are kept, the newest.",
)
@_limits(
    "--max-upload", type=_positive, default=64, show_default=True, metavar="MB", help="Size of a request."
)
@_limits(
    "--max-pixels",
    type=click.IntRange(1, MOST_PIXELS),
    default=50_000_000,
    show_default=True,
    help="Pixels of an image.",
)
@_limits(
    "--timeout",
    type=Number(0.1, MOST_SECONDS),
    default=30.0,
    show_default=True,
    help="Seconds for a slow client.",
)
@_loading(
    "--workers",
    type=click.IntRange(1, MOST_WORKERS),
    help="Processes with a device.  [default: one for each, or for a mesh]",
)
@_of_loading
@_loading("--build", is_flag=True, help="Build missing shapes for requests, as wanrun --build.")
@_loading(
    "--build-limit",
    type=click.IntRange(1, MOST_LIMIT),
    metavar="PIXELS",
    help="Pixels in all frames of such a shape.  [default: twice the largest profile's]",
)
@_loading(
    "--loras",
    type=InputPath(),
    metavar="DIR",
    help="Folder of adapters that requests may choose, besides the artifacts' own.",
)
@_loading(
    "--require-signature",
    type=_path,
    metavar="KEY",
    help="Refuse artifacts that were not signed with this key (PEM), or whose files differ.",
)
@_log(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="debug: also GET requests, and the options of jobs with their prompts.",
)
@_log(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: an object in each line.",
)
@click.option("--debug", is_flag=True, help="Print tracebacks.")
@click.option(JSON_ERRORS, is_flag=True, help=JSON_ERRORS_HELP)
def serve(artifacts: tuple[str, ...], debug: bool, json_errors: bool, **given: Any) -> int:
    """Serves artifacts: OpenAI's video API, and a page at its root."""
    _check_build(given)
    opened = {name: wanhub.open_artifact(folder) for name, folder in named(artifacts).items()}
    if given["build"]:
        opened = {name: overlaid(artifact) for name, artifact in opened.items()}
    if given["require_signature"] is not None:
        for artifact in opened.values():
            wanhub.check_signed(artifact, given["require_signature"])
        given["verify"] = "sha256"  # also of what is read now
    if given["loras"] is not None:
        from wanserve.loras import read_loras, with_loras  # maps their files

        opened, left = with_loras(opened, read_loras(given["loras"]))
        for name, why in left.items():
            warn(f"no model takes {name}: {why}")
    loading = {name: given[name] for name in OF_LOADING if given[name]}
    settings = _settings(opened, loading, given)
    for artifact in opened.values():
        _fetch(artifact, loading)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    keys = os.environ.pop(KEYS, None)  # workers need not know them
    first = _started(settings)
    try:
        return _serve(settings, {**given, "more_keys": keys}, first)
    finally:
        if first is not None:
            first.kill()


def _check_build(given: dict[str, Any]) -> None:
    """Raises UsageError if shapes are to be built, and cannot be here or may not."""
    if not given["build"]:
        if given["build_limit"] is not None:
            raise UsageError("no_effect", "--build-limit is for --build", remedy="pass --build too")
        return
    if given["require_signature"] is not None:
        raise UsageError(
            "conflict", "--build makes what is not signed", remedy="leave it or --require-signature out"
        )
    if not can_build():
        raise UsageError(
            "not_installed", "--build needs wanbuild, which is not installed", remedy=BUILD_EXTRA
        )


def _settings(
    artifacts: dict[str, wanrun.Artifact], loading: dict[str, Any], given: dict[str, Any]
) -> Settings:
    certificate = given["tls_certificate"], given["tls_key"]
    if (certificate[0] is None) != (certificate[1] is None):
        raise UsageError("conflict", "--tls-certificate and --tls-key go together")
    for origin in given["cors"]:
        if not re.fullmatch(r"https?://[^/\s*]+/?", origin):
            raise UsageError(
                "invalid_value", f"--cors {origin} is no site", expected="such as https://example.com"
            )
    days, gigabytes = given["keep_days"], given["keep_gb"]
    return Settings(
        artifacts=artifacts,
        data=given["data"].absolute(),
        loading=loading,
        build=given["build"],
        build_limit=given["build_limit"],
        workers=given["workers"],
        host=given["host"],
        port=given["port"],
        origins=tuple(origin.rstrip("/") for origin in given["cors"]),
        hosts=tuple(name.lower() for name in given["allow_host"]),
        certificate=None if certificate[0] is None else certificate,
        max_waiting=given["max_waiting"],
        max_upload=given["max_upload"] << 20,
        max_pixels=given["max_pixels"],
        body_seconds=given["timeout"],
        grace_seconds=given["grace"],
        attempts=given["attempts"],
        keep_seconds=None if days is None else days * 86400,
        keep_bytes=None if gigabytes is None else int(gigabytes * 1e9),
        max_live_seconds=given["max_live_seconds"],
        live_wait_seconds=given["live_wait"],
        live_bytes=int(given["live_gb"] * 1e9),
    )


def _fetch(artifact: wanrun.Artifact, loading: dict[str, Any]) -> None:
    """Fetches what workers read of an artifact that is elsewhere: all profiles of its target."""
    if artifact.origin:
        fetch(artifact, wanrun.needed(artifact, loading))


def _started(settings: Settings) -> WorkerProcess | None:
    """Starts the first worker, which imports JAX and loads while this process imports the server."""
    # Of several devices, the manifests decide which one it has: then it is not started yet.
    from wanserve.environments import environments

    places = environments((), settings.workers)
    if len(places) > 1:
        return None
    return WorkerProcess(places[0], begin_line(settings.artifacts, settings.loading, settings.max_pixels))


def _serve(settings: Settings, given: dict[str, Any], first: WorkerProcess | None) -> int:
    import asyncio
    from dataclasses import replace

    try:
        from wanserve.keys import read_keys
        from wanserve.log import LOG, start_log
        from wanserve.service import Service
    except ModuleNotFoundError as error:
        raise UsageError(
            "not_installed",
            f"wanrun serve needs {error.name}",
            remedy="pip install '.[serve]' in the checkout",
        ) from None
    start_log(given["log_level"], given["log_format"])
    keys = read_keys(given["keys"], given["more_keys"])
    local = settings.host in LOOPBACK
    if not keys and (local or settings.hosts):
        settings = replace(settings, hosts=(*settings.hosts, *LOOPBACK))

    def say(line: str) -> None:
        if given["log_format"] == "json":
            LOG.info(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def opened(url: str) -> None:
        if given["open_page"]:
            import webbrowser

            webbrowser.open(url)

    async def main() -> None:
        service = Service(settings, keys, first)
        if not keys and not local:
            LOG.warning("everybody who reaches %s may use it; --keys FILE changes that", service.url)
        await service.run(say, opened)

    asyncio.run(main())
    return 0


def main() -> NoReturn:
    """Runs the command and ends the process."""
    leave(run(serve, sys.argv[2:]))
