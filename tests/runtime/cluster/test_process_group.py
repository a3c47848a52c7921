"""Processes that have joined: exchanges, agreement, and how the end of one ends the others."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.groups import Ended, Processes, free_port, run_threads
from wanrun.cluster.join import join
from wanrun.cluster.launch import Cluster
from wanrun.cluster.process_group import ProcessGroup
from wanrun.cluster.watch import SILENT_SECONDS
from wanrun.errors import ClusterError, UsageError

MEMBER = """
import sys, time
import click
from wanrun.cluster.join import join
from wanrun.terminal.console import leave, run
from wanrun.terminal.early import start


@click.command("wanrun")
@click.argument("port")
@click.argument("count", type=int)
@click.argument("process", type=int)
@click.argument("seconds", type=float)
def command(port, count, process, seconds):
    with join(f"127.0.0.1:{port}", count, process, timeout_seconds=60) as group:
        print("joined", flush=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
        if process == 1 and not seconds:
            raise RuntimeError("a collective failed")
        group.exchange("last")


start()
leave(run(command))
"""


def members(folder: Path, count: int = 3, seconds: float = 120.0) -> Processes:
    port = free_port()
    return Processes(
        [
            [sys.executable, "-c", MEMBER, str(port), str(count), str(index), str(seconds)]
            for index in range(count)
        ],
        folder,
    )


def test_exchanges_bring_all_values_to_all() -> None:
    def work(group: ProcessGroup) -> list[Any]:
        return [group.exchange(group.process * 10), group.exchange({"leads": group.leads})]

    leads = [{"leads": True}, {"leads": False}, {"leads": False}]
    assert run_threads(3, work) == [[[0, 10, 20], leads]] * 3


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "failed"}\n', b"x" * 2**16, b"", b'{"kind": "say"}\n']
)
def test_strangers_do_no_harm(said: bytes) -> None:
    port = free_port()

    def work(group: ProcessGroup) -> Any:
        if group.process == 1:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
                stranger.settimeout(0.5)
                with contextlib.suppress(OSError):
                    stranger.recv(1)
        return group.exchange(group.process)

    assert run_threads(2, work, port) == [[0, 1]] * 2


def test_a_second_process_of_a_number_is_sent_away(tmp_path: Path) -> None:
    port = free_port()
    commands = [[sys.executable, "-c", MEMBER, str(port), "2", process, "8"] for process in "0111"]
    keys = [{"WANRUN_COMPANY_KEY": key} for key in ("a fox", "a fox", "a fox", "a badger")]
    with Processes(commands, tmp_path, keys) as processes:
        first, *others, stranger = (processes.ended(index) for index in range(4))
    assert (stranger.code, stranger.errors) == (
        5,
        ["error: process 0 of 2 does not take this process in: its WANRUN_COMPANY_KEY is another one"],
    )
    assert (first.code, first.errors) == (0, [])
    taken, refused = sorted(others, key=lambda one: one.code)
    assert (taken.code, taken.errors, refused.code) == (0, [], 5)
    assert refused.errors == [
        "error: process 0 of 2 does not take this process in: there is a process 1 already"
    ]


def test_all_name_the_same_difference() -> None:
    def work(group: ProcessGroup) -> None:
        group.agree_on_request({"seed": 1, "prompt": "a fox"})
        prompt = "a very long description of a fox in the snow that ends with " + "fd"[group.process == 2]
        group.agree_on_request({"seed": 1, "prompt": prompt})

    first, *others = run_threads(3, work)
    assert isinstance(first, UsageError)
    assert "different requests: prompt" in str(first)
    assert "f' as process 0" in str(first) and "d' in process 2" in str(first)
    assert list(map(str, others)) == [str(first)] * 2


def test_a_group_that_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with (
        pytest.raises(ClusterError, match=r"not all 2 .* within 1 s; found all but 1"),
        join(f"127.0.0.1:{port}", 2, 0, timeout_seconds=1),
    ):
        pass
    with (
        pytest.raises(ClusterError, match=rf"process 0 of 2 is not there; expected it at 127.0.0.1:{port}"),
        join(f"127.0.0.1:{port}", 2, 1, timeout_seconds=0),
    ):
        pass


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("number", "own", "code", "word"),
    [
        (signal.SIGKILL, [], -9, "is gone: its connection is closed"),
        (signal.SIGTERM, ["terminated"], 143, "failed: ended by a signal"),
        (signal.SIGINT, ["interrupted"], 130, "failed: ended by a signal"),
    ],
    ids=["killed", "terminated", "interrupted"],
)
def test_one_end_is_the_end_of_all(
    victim: int, number: signal.Signals, own: list[str], code: int, word: str, tmp_path: Path
) -> None:
    with members(tmp_path) as processes:
        for index in range(3):
            processes.wait_for(index, "joined", "out")
        processes.signal(victim, number)
        ended = [processes.ended(index) for index in range(3)]
    assert (ended[victim].code, ended[victim].errors) == (code, own)
    for other in {0, 1, 2} - {victim}:
        assert ended[other].code == 5
        assert ended[other].errors == [f"error: process {victim} of 3 {word}"]
        assert ended[other].seconds < SILENT_SECONDS


def test_a_stopped_process_is_given_up(tmp_path: Path) -> None:
    victim = 0
    with members(tmp_path) as processes:
        for index in range(3):
            processes.wait_for(index, "joined", "out")
        processes.signal(victim, signal.SIGSTOP)
        others = [processes.ended(index) for index in sorted({0, 1, 2} - {victim})]
        processes.signal(victim, signal.SIGCONT)
        late = processes.ended(victim)
    silent = "has been silent for 15 s: it is stopped, or its network is lost"
    assert [one.errors for one in others] == [[f"error: process {victim} of 3 {silent}"]] * 2
    assert [one.code for one in others] == [5, 5]
    assert late.code == 5 and len(late.errors) == 1
    assert late.errors[0].startswith("error: process ")


def test_an_unexpected_error_is_told(tmp_path: Path) -> None:
    with members(tmp_path, 2, 0.0) as processes:
        ended: list[Ended] = [processes.ended(index) for index in range(2)]
    assert ended[0].code == 5 and ended[1].code == 1
    told = "internal error: RuntimeError: a collective failed"
    assert ended[0].errors == [f"error: process 1 of 2 failed: {told}"]
    assert len(ended[1].errors) == 1 and told in ended[1].errors[0]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(UsageError, match=f"cannot listen at {address}"),
            ProcessGroup(Cluster(address, 2, 0)),
        ):
            pass
