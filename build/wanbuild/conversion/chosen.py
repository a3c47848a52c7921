"""Chooses the layers whose weights an artifact stores in 8 bits, and reports what the rounding loses."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from wanbuild.mapping.engine import Assignment
from wanbuild.models.eight_bit import linear_layers
from wanbuild.models.params import LAYERS
from wanbuild.source.component import SourceComponent
from wanrun import EIGHT_BITS, in_bytes
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import UsageError

FORMS: Mapping[str, str | None] = MappingProxyType(
    {**{one.name: one.form for one in EIGHT_BITS.values()}, "source": None}
)
"""The choices of ``--quantise``, and the manifests' name of each; ``source``: each layer has the source's."""

TABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # The blocks are 97 % of a transformer. Embeddings, modulation, time and head are few, and everything
        # goes through them.
        "transformer": ("blocks/*", "vace_blocks/*", "face_adapter/*"),
        # Rounded attention changes what a prompt means sooner than a rounded feed-forward does
        # (docs/notes/quantised.md, "The text encoder").
        "text_encoder": ("blocks/wi_0", "blocks/wi_1"),
    }
)
"""By component, the layers that are rounded to 8 bits. Both experts are ``transformer``."""

MOST_INPUTS = 2**16
"""Layers with more inputs are not stored in 8 bits; published ones have 13824 at most."""

WORST = 10
"""The most layers that a line of losses names."""


@dataclass(frozen=True)
class Quantise:
    """A choice of layers: ``form`` is one of ``FORMS``; layers that fit a pattern of ``keep`` are left out.

    Patterns are such as ``blocks/attn2/*`` or ``text_encoder/*``.
    """

    form: str
    keep: Sequence[str] = ()


def parse_quantise(form: str | None, keep: Sequence[str]) -> Quantise | None:
    """Returns what ``--quantise`` and ``--keep`` say; raises UsageError for ``--keep`` without a form."""
    if form is None and keep:
        raise UsageError(
            "no_effect", "--keep is for --quantise", remedy="add --quantise int8, or leave --keep out"
        )
    return None if form is None else Quantise(form, tuple(keep))


def chosen_layers(
    quantise: Quantise | None,
    modules: Mapping[str, Any],
    stored: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> dict[str, dict[str, str]]:
    """Returns the form of each layer that is stored in 8 bits, by component and path; experts have the same.

    ``modules`` has every component's abstract module. ``stored`` has what ``stored_in_eight_bits`` returns by
    component, for the form ``source``. Raises UsageError if a pattern fits no layer, or there is nothing to
    store in 8 bits.
    """
    if quantise is None:
        return {name: {} for name in modules}
    possible = {
        name: dict(_possible(quantise, name, module, stored.get(name, {})))
        for name, module in modules.items()
    }
    names = {f"{_table_name(name)}/{path}" for name, layers in possible.items() for path in layers}
    for pattern in quantise.keep:
        if not any(_fits(name, pattern) for name in names):
            some = ", ".join(sorted(names)[:3])
            raise UsageError(
                "no_effect",
                f"no layer fits --keep {pattern}",
                expected=f"the path of a layer, with * for any text: {some}, ..." if some else None,
                found=None if some else "no layer that could be stored in 8 bits",
            )
    kept = {name for name in names if any(_fits(name, pattern) for pattern in quantise.keep)}
    chosen = {
        name: {path: dtype for path, dtype in layers.items() if f"{_table_name(name)}/{path}" not in kept}
        for name, layers in possible.items()
    }
    experts = [name for name in TRANSFORMERS if name in chosen]  # they share their programs
    common = set.intersection(*(set(chosen[name].items()) for name in experts))
    chosen |= {name: dict(sorted(common)) for name in experts}
    if not any(chosen.values()):
        raise UsageError(
            "no_effect",
            f"--quantise {quantise.form} finds nothing to store in 8 bits",
            expected="8-bit weights in the source" if quantise.form == "source" else "a layer without --keep",
        )
    return chosen


def _table_name(component: str) -> str:
    return TRANSFORMERS[0] if component in TRANSFORMERS else component


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits a layer's name, with or without its component."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)


def _possible(
    quantise: Quantise, name: str, module: Any, stored: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields path and form of every layer that can be stored in 8 bits."""
    patterns, form = TABLE.get(_table_name(name), ()), FORMS[quantise.form]
    for path, layer in linear_layers(module).items():
        is_stacked = layer.weight.get_metadata()["axes"][0] == LAYERS
        if not is_stacked or layer.weight.shape[-1] > MOST_INPUTS:
            continue
        if form is None and path in stored:
            yield path, stored[path]
        if form is None or layer.weight.shape[-1] % max(EIGHT_BITS[form].block, 1):
            continue
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            yield path, form


def stored_in_eight_bits(
    source: SourceComponent, assignments: Sequence[Assignment], merged: Collection[str]
) -> dict[str, str]:
    """Returns the layers whose weights the source has in one form of 8 bits, and that form, by path.

    Layers of the source tensors in ``merged``, into which a LoRA is merged, are left out: the sums have other
    values than 8 bits with the source's scales.
    """
    found = dict[str, str]()
    for item in assignments:
        (form, *others) = {source.tensors[fill.key].form for fill in item.fills}
        if not others and form in EIGHT_BITS and not any(fill.key in merged for fill in item.fills):
            found[item.path.removesuffix("/weight")] = form
    return found


def in_eight_bits(assignments: Sequence[Assignment], layers: Mapping[str, str]) -> tuple[Assignment, ...]:
    """Returns the assignments, with the weights of these layers in their forms of 8 bits."""
    forms = {f"{path}/weight": form for path, form in layers.items()}
    return tuple(
        dataclasses.replace(item, dtype=jnp.dtype(EIGHT_BITS[form].dtype), form=form)
        if (form := forms.get(item.path))
        else item
        for item in assignments
    )


def widened_lines(
    source: Mapping[str, SourceComponent], written: Mapping[str, int], dtypes: Mapping[str, str]
) -> Iterator[str]:
    """Yields how much larger the source's quantised weights become in an artifact without ``--quantise``.

    ``written`` has the bytes in the artifact by component, ``dtypes`` the dtype of the weights there.
    """
    for name, nbytes in written.items():
        if source[name].quantised:
            kept = all(one.form for one in source[name].tensors.values() if one.quantised)
            remedy = f"; --quantise {'source' if kept else 'int8'} keeps the artifact small"
            yield (
                f"{name}: {in_bytes(source[name].stored_bytes)} of quantised weights become "
                f"{in_bytes(nbytes)} of {dtypes[name]}{remedy if _table_name(name) in TABLE else ''}"
            )


def lost_lines(lost: Mapping[str, Mapping[tuple[str, int], float]]) -> Iterator[str]:
    """Yields lines with the mean error of weights rounded to 8 bits, and the worst layers.

    ``lost`` has each component's ``WrittenComponent.lost``.
    """
    for name, errors in lost.items():
        rounded = {where: error for where, error in errors.items() if error}
        if errors:
            mean = sum(rounded.values()) / max(len(rounded), 1)
            kept = len(errors) - len(rounded)
            exact = f", {kept} as the source has them" if kept else ""
            yield f"{name}: {len(errors)} weights in 8 bits, mean error {100 * mean:.2f} %{exact}"
    everywhere = [
        (error, name, path.removesuffix("/weight"), layer)
        for name, errors in lost.items()
        for (path, layer), error in errors.items()
        if error
    ]
    for error, name, path, layer in sorted(everywhere, reverse=True)[:WORST]:
        yield f"  {100 * error:5.2f} % in {name}/{path}, layer {layer}"
