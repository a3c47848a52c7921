"""The record of a merged LoRA: its JSON, which older artifacts have too, and what people read."""

from __future__ import annotations

import msgspec
import pytest

from wanrun.artifact.adapter import Lora


def test_a_record_is_what_it_was_written_as() -> None:
    """Digests cover it: a number that was written whole stays whole."""
    for text in (
        b'{"file":"a.safetensors","sha256":"0","scale":-2,"component":null}',
        b'{"file":"a.safetensors","sha256":"0","scale":0.5,"component":"transformer_2","left_out":7}',
    ):
        assert msgspec.json.encode(msgspec.json.decode(text, type=Lora)) == text
    for damaged in (b'{"file":"a"}', b'{"file":"a","sha256":"0","scale":"1","component":null}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(damaged, type=Lora)


def test_how_it_is_named() -> None:
    one = Lora(file="a.safetensors", sha256="0", scale=0.5, component="transformer_2", left_out=7)
    assert all(part in str(one) for part in ("a.safetensors", "0.5", "transformer_2"))
    assert one.facts == {"file": "a.safetensors", "scale": 0.5, "sha256": "0", "component": "transformer_2"}
