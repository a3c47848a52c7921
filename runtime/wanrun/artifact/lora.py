"""The record of a LoRA's file whose changes are in the weights, or in an adapter."""

from __future__ import annotations

from typing import Any

from wanrun.artifact.record import NotNegative, Record

__all__ = ["Lora"]


class Lora(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA that was merged at conversion, or that an adapter was made of.

    Attributes:
        file: its name, without a folder.
        sha256: digest of its bytes, hexadecimal.
        scale: its strength, the factor of all that it changes.
        component: the transformer that it changes; None for every one.
        adapter_config_sha256: digest of PEFT's configuration beside it; empty if there is none.
        left_out: tensors of the file that belong to layers which the model does not have.
    """

    file: str
    sha256: str
    scale: int | float
    component: str | None
    adapter_config_sha256: str = ""
    left_out: NotNegative = 0

    def __str__(self) -> str:
        where = "" if self.component is None else f" in {self.component}"
        return f"{self.file} at strength {self.scale:g}{where}"

    @property
    def facts(self) -> dict[str, Any]:
        """What the metadata of a video says of it."""
        return {
            "file": self.file,
            "scale": self.scale,
            "sha256": self.sha256,
            "component": self.component,
        }
