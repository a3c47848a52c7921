"""Guiders combine a step's passes, with the positive and the negative prompt and with skipped layers.

A program has the inputs that a guider needs if it was built for it; all programs with guidance have ``cfg``.
Normalised attention guidance (NAG) gives a negative prompt to steps of one pass: in every attention to text,
the result for the prompt is moved away from that for the negative prompt (arXiv:2505.21179;
``wanbuild.models.nag`` has the formula). A profile is built for it, or not.
"""

from __future__ import annotations

__all__ = ["BUILT", "GUIDERS", "NAG", "NAG_DEFAULTS", "SKIPPED_LAYERS", "inputs_of", "nag_settings"]

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

GuiderName = Literal["cfg", "cfg-zero", "skip-layer"]

SKIPPED_LAYERS = "skip_layers"
"""The input with a number for each layer of the transformer's first stack: not 0 for one that is skipped."""


class Guider(msgspec.Struct, frozen=True):
    """A way to combine a step's passes.

    ``inputs`` are the float32 inputs of a step that programs have for it, 0 where a step does without; all
    but ``SKIPPED_LAYERS`` are scalars, and ``cfg`` has none. ``options`` are the options of a generation that
    only it has, with their defaults; None for one that must be given.
    """

    name: GuiderName
    inputs: tuple[str, ...]
    options: Mapping[str, Any]


GUIDERS: Mapping[str, Guider] = MappingProxyType(
    {
        one.name: one
        for one in (
            Guider("cfg", (), {}),
            Guider("cfg-zero", ("guidance_projection",), {"zero_steps": 1}),
            Guider(
                "skip-layer",
                ("skip_scale", SKIPPED_LAYERS),
                # As of diffusers' SkipLayerGuidance.
                {"skip_layers": None, "skip_scale": 2.8, "skip_start": 0.01, "skip_end": 0.2},
            ),
        )
    }
)
"""By name, the default first. Only ``skip-layer`` makes more passes than ``cfg``: in some steps a third."""

BUILT = tuple(one.name for one in GUIDERS.values() if one.inputs)
"""The guiders that a profile may lack."""

OWN_OPTIONS = tuple(name for one in GUIDERS.values() for name in one.options)
"""The options that one guider has."""

NAG = "nag"
"""The input of steps that are built for NAG, float32 (3,): the values of ``NAG_DEFAULTS``' options."""

NAG_DEFAULTS: Mapping[str, float] = MappingProxyType({"nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25})
"""The options of a generation. At a scale of 1 steps are as without NAG, and as fast. The others are the
defaults of its authors, who use a scale of 11 with Wan."""


def inputs_of(guiders: Sequence[str], layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the inputs that steps take for these guiders.

    Args:
        guiders: their names.
        layers: how many the transformer's first stack has; any number where none of them skips some.
    """
    names = [name for one in guiders for name in GUIDERS[one].inputs]
    return {name: (layers,) if name == SKIPPED_LAYERS else () for name in names}


def nag_settings(options: Mapping[str, Any]) -> np.ndarray:
    """Returns the input of steps for the options of a generation, which has none of them where NAG is off."""
    import numpy as np  # takes long, and the help needs the names only

    return np.array([options.get(name, default) for name, default in NAG_DEFAULTS.items()], np.float32)
