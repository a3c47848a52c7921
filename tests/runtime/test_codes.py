"""Each code of an error has a meaning and a use; the server's too."""

from __future__ import annotations

import re
from typing import get_args

from helpers.rules import sources_of_ours
from wanrun.codes import CODES, ErrorCode
from wanserve.codes import SERVER_CODES, ServerCode


def test_every_code_has_a_meaning_and_a_use() -> None:
    for codes, names in ((CODES, get_args(ErrorCode)), (SERVER_CODES, get_args(ServerCode))):
        assert list(codes) == sorted(names)
    sources = (file.read_text(encoding="utf-8") for file in sources_of_ours() if file.name != "codes.py")
    used = set(re.findall(r'"([a-z_]+)"', "\n".join(sources)))
    assert (CODES.keys() | SERVER_CODES.keys()) - used == set()
