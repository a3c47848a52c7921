"""Passes JAX's connections on to its coordination service in process 0, and outlives that service.

JAX's client ends its process from C++ at once, with a stack trace, when the service closes the connection:
jaxlib 0.10 calls a Python callback for that with a type that it cannot convert. A client that talks to this
relay sees no end of the connection, and ``wanrun.cluster.watch`` says what has happened.
"""

from __future__ import annotations

import contextlib
import socket
import threading


def relayed(host: str, port: int) -> int:
    """Listens on a free port of 127.0.0.1, and connects each client to an address; returns the port."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, (host, port)), name="relay", daemon=True).start()
    return int(server.getsockname()[1])


def _accept(server: socket.socket, target: tuple[str, int]) -> None:
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection(target)
        except OSError:  # the service is not there yet; the client tries again
            near.close()
            continue
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(near, far, True), name="relay", daemon=True).start()
        threading.Thread(target=_pass_on, args=(far, near, False), name="relay", daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, closing: bool) -> None:
    """Passes data on. At its end it closes both sides, if ``closing``."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    if closing:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads there
        source.close()
