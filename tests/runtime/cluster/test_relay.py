"""The relay passes bytes on both ways, and does not pass on the end of the far side."""

from __future__ import annotations

import socket

import pytest

from wanrun.cluster.relay import relayed


def test_bytes_both_ways_and_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = relayed(*server.getsockname())
        near = socket.create_connection(("127.0.0.1", port), timeout=10)
        far, _ = server.accept()
        near.sendall(b"question")
        assert far.recv(100) == b"question"
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"
        far.close()
        near.settimeout(0.5)
        with pytest.raises(TimeoutError):  # no end: JAX's client would end its process
            near.recv(1)
        near.close()


def test_the_near_side_s_end_is_passed_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = relayed(*server.getsockname())
        near = socket.create_connection(("127.0.0.1", port), timeout=10)
        far, _ = server.accept()
        far.settimeout(10)
        near.close()
        assert far.recv(1) == b""
        far.close()
