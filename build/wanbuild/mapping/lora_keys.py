"""Names of tensors in LoRA files: a key is a prefix, the module it changes, and the tensor's role.

Supported layouts: diffusers and PEFT (``transformer.blocks.0.attn1.to_q.lora_A.weight``), Wan's own module
names (``diffusion_model.blocks.0.self_attn.q.lora_down.weight``), the same with underscores as in kohya's
trainers (``lora_unet_blocks_0_self_attn_q.lora_down.weight``), and the full deltas ``.diff``, ``.diff_b`` and
``.diff_m`` of a weight, a bias and a modulation table, which extraction scripts write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum

from wanbuild.mapping.original import MODULES, PARAMETERS
from wanbuild.mapping.prefixes import LEADING, unwrapped

_UNDERSCORED = re.compile(r"(lora_unet|lora_transformer|lycoris)__?")  # VideoX-Fun writes lora_unet__


class LoraRole(Enum):
    """The role of a tensor in its module."""

    DOWN = "down matrix"
    UP = "up matrix"
    UP_BIAS = "bias of the up matrix"
    ALPHA = "alpha"
    WEIGHT = "weight delta"
    BIAS = "bias delta"


# PEFT may insert the adapter's name: lora_A.default.weight.
_ROLES: tuple[tuple[re.Pattern[str], LoraRole], ...] = (
    (re.compile(r"\.(lora_A(\.[\w-]+)?|lora_down|lora\.down)\.weight$"), LoraRole.DOWN),
    (re.compile(r"\.(lora_B(\.[\w-]+)?|lora_up|lora\.up)\.weight$"), LoraRole.UP),
    (re.compile(r"\.(lora_B(\.[\w-]+)?|lora_up|lora\.up)\.bias$"), LoraRole.UP_BIAS),
    (re.compile(r"\.alpha$"), LoraRole.ALPHA),
    (re.compile(r"\.diff(_m)?$"), LoraRole.WEIGHT),
    (re.compile(r"\.diff_b$"), LoraRole.BIAS),
)

_UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(text_encoders?|te\d?)\..*|lora_te\d?_.*"), "a text encoder's LoRA"),
    (re.compile(r".*\.(dora_scale|lora_magnitude_vector)(\..*)?"), "DoRA"),
    (re.compile(r".*\.hada_\w+(\..*)?"), "LoHa"),
    (re.compile(r".*\.lokr_\w+(\..*)?"), "LoKr"),
    (re.compile(r".*\.b?oft_\w+(\..*)?"), "OFT"),
    (re.compile(r".*\.lora_mid(\..*)?"), "a LoRA with a middle matrix"),
)


_ADAPTED = re.compile(r"\.(lora[._]\w+|alpha|diff(_\w+)?|dora_scale|hada_\w+|lokr_\w+|b?oft_\w+)(\.|$)")


@dataclass(frozen=True)
class LoraKey:
    """A parsed key: the name of the module or table as in the file, without prefixes, and the tensor's role.

    ``underscored`` is whether the name's dots are written as underscores.
    """

    module: str
    underscored: bool
    role: LoraRole


def parse_key(key: str) -> LoraKey | None:
    """Parses a key; returns None if it has none of the supported layouts."""
    for pattern, role in _ROLES:
        if suffix := pattern.search(key):
            name = unwrapped(key[: suffix.start()])
            underscored = _UNDERSCORED.match(name)
            prefix = underscored or LEADING.match(name)
            module = name[prefix.end() :] if prefix else name
            if suffix.group().endswith("_m"):  # blocks.0.diff_m is the delta of blocks.0.modulation
                module += "_modulation" if underscored else ".modulation"
            return LoraKey(module, underscored is not None, role)
    return None


def of_adapter(key: str) -> bool:
    """Returns whether a key is that of an adapter, of any kind and for any model."""
    return _ADAPTED.search(key) is not None


def unsupported(key: str) -> str | None:
    """Returns the kind of adapter that a key belongs to, if it cannot be used."""
    return next((kind for pattern, kind in _UNSUPPORTED if pattern.fullmatch(key)), None)


class Parameters:
    """The parameters of one model, found by the names that LoRA files use; ``keys`` are diffusers' names."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(keys)
        known = self._keys | {key.rpartition(".")[0] for key in self._keys}
        self._names = _originals(known) | {name: name for name in known}
        self._underscored = {name.replace(".", "_"): found for name, found in self._names.items()}

    def find(self, part: LoraKey) -> str | None:
        """Returns the parameter that a part changes (for an alpha, the weight), or None if there is none."""
        found = (self._underscored if part.underscored else self._names).get(part.module)
        if found is None:
            return None
        if part.role is LoraRole.WEIGHT and found in self._keys:
            return found  # a table, whose name has no ".weight"
        key = f"{found}.bias" if part.role in (LoraRole.BIAS, LoraRole.UP_BIAS) else f"{found}.weight"
        return key if key in self._keys else None


def _originals(known: Set[str]) -> dict[str, str]:
    """Returns original name -> diffusers name of every known module and table in the mapping."""
    blocks = {match.group() for name in known if (match := re.match(r"(vace_)?blocks\.\d+", name))}
    numbers = {number for name in known for number in re.findall(r"\d+", name)}
    names: dict[str, str] = {}
    for original, diffusers in (*MODULES, *PARAMETERS):
        for block in blocks if "{blocks}" in original else [""]:
            for number in numbers if "{i}" in original else [""]:
                name = diffusers.format(blocks=block, i=number)
                if name in known:
                    names[original.format(blocks=block, i=number)] = name
    return names
