"""Images and videos of one client keep nobody else waiting, and a server that ends waits for none."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from wanrun import CancelToken
from wanserve.intake import DECODERS, Intake
from wanserve.keys import Client
from wanserve.refusal import RefusedError


class Slow:
    """A generation whose media are decoded until that is cancelled."""

    def __init__(self) -> None:
        self.reading = 0

    def read_media(self, *, cancel: CancelToken, keep: bool) -> None:
        assert not keep
        self.reading += 1
        while not cancel.cancelled:
            time.sleep(0.01)
        cancel.check()


def test_each_client_decodes_one_thing_at_a_time() -> None:
    nobody: Any = None
    intake, slow = Intake(nobody, nobody, nobody), Slow()
    body: Any = SimpleNamespace(model=SimpleNamespace(resolve=lambda options, spell: slow), spell=str)

    async def ask(name: str) -> None:
        with pytest.raises(RefusedError) as caught:
            await intake._resolve(Client(name, b""), body, {}, {"image": "a.png"})
        assert caught.value.status == 503

    async def main() -> None:
        asked = [asyncio.create_task(ask(name)) for name in "aaab"]
        async with asyncio.timeout(5):
            while slow.reading < 2:  # one of each
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert slow.reading == 2 < DECODERS
        intake.close()
        await asyncio.gather(*asked)

    asyncio.run(main())
