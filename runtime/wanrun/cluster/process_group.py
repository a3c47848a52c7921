"""The processes of a run: they agree on what they do, and end together.

Process 0 listens at the coordinator's address, and the others connect to it. Each has a thread that sends
heartbeats and watches for those of the others (``wanrun.cluster.watch``). JAX's own service is started later,
and is not used for any of this: it tells of a failure by ending every process from C++, without a message.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from wanrun.cluster.channel import Channel, Message
from wanrun.cluster.company_key import VARIABLE, company_key, proof_of
from wanrun.cluster.launch import Cluster, is_loopback
from wanrun.cluster.watch import CLOSE_SECONDS, GRACE_SECONDS, Watch
from wanrun.errors import ArtifactError, ClusterError, UsageError, WanError, shortened
from wanrun.terminal.undo import undone_at_exit

JOIN_SECONDS = 300.0
"""How long the processes wait for one another at the start, as JAX does."""

SURE_SECONDS = 5.0
"""How long an unexpected error waits for the news that another process is the cause of it."""

_AGAIN_SECONDS = 0.1


class ProcessGroup:
    """The processes of a run, seen from one of them. Entering it connects them; leaving it is done together.

    If another process fails, is gone or is silent, this process ends with one line on stderr and exit code 5,
    whatever its threads are doing: a collective that waits for that process cannot be interrupted. An
    exception that leaves the context ends the other processes.

    Args:
        join_seconds: how long the processes wait for one another.

    Raises:
        ClusterError: from entering, if not all processes come in time.
        UsageError: from entering, if the address cannot be listened at, or anybody could join there.
    """

    def __init__(self, cluster: Cluster, join_seconds: float = JOIN_SECONDS) -> None:
        self.cluster = cluster
        self._deadline = time.monotonic() + join_seconds
        self._join_seconds, self._number = join_seconds, 0
        self._disconnect: Callable[[], None] | None = None
        self._calling = threading.Lock()

    @property
    def process(self) -> int:
        """The number of this process; 0 prints and writes."""
        return self.cluster.process_id

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.cluster.num_processes

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.process == 0

    def __enter__(self) -> Self:
        key = company_key()
        listener = _listen(self.cluster, guarded=key != "") if self.leads else None
        channels = {} if self.leads else {0: self._connect(proof_of(key))}
        self._watch = Watch(self.process, self.num_processes, listener, channels, proof_of(key))
        self._told = undone_at_exit(partial(self._watch.fail, "ended by a signal"), CLOSE_SECONDS)
        self._told.__enter__()
        self._watch.start()
        try:
            self._join()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._disconnect is not None:
                self._disconnect()
            self.exchange(last=True)
        else:
            self._fail(error)
            if self._disconnect is not None:
                atexit.register(_leave)
        self._told.__exit__(None, None, None)
        self._watch.close()

    def at_end(self, disconnect: Callable[[], None]) -> None:
        """Keeps the function that all processes call together before they leave."""
        self._disconnect = disconnect

    def _connect(self, proof: bytes) -> Channel:
        """Connects to process 0, which may not have started yet."""
        while True:
            try:
                channel = Channel(socket.create_connection(self.cluster.address, timeout=5))
                channel.send_bytes(proof)
                channel.send(Message("hello", self.process, self.num_processes))
                return channel
            except OSError as error:
                if time.monotonic() >= self._deadline:
                    raise ClusterError(
                        f"process 0 of {self.num_processes} is not there",
                        expected=f"it at {self.cluster.coordinator} within {self._join_seconds:.0f} s",
                        found=error.strerror or error,
                        remedy="start it, or correct the address",
                    ) from None
            time.sleep(_AGAIN_SECONDS)

    def _join(self) -> None:
        """Waits until all processes are there."""
        patience = 0.0 if self.leads else 2 * GRACE_SECONDS  # process 0 knows who is missing
        if self.exchange(deadline=self._deadline + patience) is None:
            missing = ", ".join(map(str, self._watch.missing()))
            raise ClusterError(
                f"not all {self.num_processes} processes have started",
                expected=f"all within {self._join_seconds:.0f} s",
                found=f"all but {missing}" if missing else "not all",
                remedy="start them at the same time",
            )

    def exchange(self, value: Any = None, last: bool = False, deadline: float | None = None) -> Any:
        """Gives a value to all processes, and returns those of all, by process; None after the deadline.

        Every process must make the same calls in the same order.

        Args:
            value: a value that JSON can hold.
            last: whether the processes may go after this exchange.
            deadline: when to give up, of ``time.monotonic``; None for never, as ``Watch`` ends the wait for a
                process that is gone.
        """
        with self._calling:
            number, self._number = self._number, self._number + 1
            self._watch.say(Message("say", self.process, number, value, last=last))
            return self._watch.result(number, deadline)

    def agree_on_artifact(self, facts: Mapping[str, Any]) -> None:
        """Raises ArtifactError in every process unless all have the same artifact and the same target."""
        what, remedy = "the processes have different artifacts", "give all of them the same artifact"
        self._agree(facts, ArtifactError, what, remedy)

    def agree_on_request(self, facts: Mapping[str, Any]) -> None:
        """Raises UsageError in every process unless all are asked for the same."""
        what, remedy = "the processes were given different requests", "give all of them the same options"
        self._agree(facts, UsageError, what, remedy)

    def _agree(self, facts: Mapping[str, Any], kind: type[WanError], what: str, remedy: str) -> None:
        """Raises an error of this kind, in every process, that names the first fact that differs.

        Facts are values that JSON can hold, by name.
        """
        mine = json.loads(json.dumps(facts, default=str))
        every = self.exchange(mine)
        for other, theirs in enumerate(every):
            for name in [*every[0], *(name for name in theirs if name not in every[0])]:
                if (here := every[0].get(name)) != (there := theirs.get(name)):
                    expected, found = _difference(here, there, other)
                    raise kind(f"{what}: {name}", expected=expected, found=found, remedy=remedy)

    def _fail(self, error: BaseException) -> None:
        """Ends the other processes, because this one ends."""
        sure = isinstance(error, WanError | KeyboardInterrupt | OSError)
        if not sure and self._watch.told.wait(SURE_SECONDS):  # a collective has failed, as its peer is gone
            threading.Event().wait()  # until the watching thread ends the process
        first = " ".join(str(error).strip().partition("\n")[0].split()) or type(error).__name__
        text = first if sure else f"internal error: {type(error).__name__}: {first}"
        self._watch.fail(text)


def _leave() -> None:
    """Ends a Python program that has failed, before JAX waits for the others in its own last call."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(1)


def _difference(here: Any, there: Any, other: int) -> tuple[str, str]:
    """Returns two values that differ, cut before their difference if they are long."""
    texts = [
        value if isinstance(value, str) else json.dumps(value, sort_keys=True) for value in (here, there)
    ]
    same = os.path.commonprefix(texts)  # noqa: RUF071 - of characters
    start = max(0, len(same) - 20) if max(map(len, texts)) > 60 else 0
    cut = [("..." if start else "") + text[start:] for text in texts]
    return f"{shortened(cut[0])} as process 0", f"{shortened(cut[1])} in process {other}"


def _listen(cluster: Cluster, guarded: bool) -> socket.socket:
    """Listens at a port: of the loopback device if the host's name is that, else of all devices."""
    host, port = cluster.address
    try:
        family, address = cluster.resolved()
        loopback = is_loopback(address)
        if not (loopback or guarded):
            raise UsageError(
                f"anybody could join at {cluster.coordinator}",
                expected=f"a secret that all share in {VARIABLE}, or in the file that {VARIABLE}_FILE names",
                found="none",
                remedy=f"set it; {VARIABLE}=open lets anybody in",
            )
        return socket.create_server((address if loopback else "", port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"process 0 cannot listen at {host}:{port}",
            expected="a free port of this host",
            found=error.strerror or error,
            remedy="choose another port for all processes",
        ) from None
