"""The transformer's original Wan-Video key names, as a table of pairs with diffusers' names.

Sources: the state dicts of WanModel, VaceWanModel and WanAnimateModel (Wan-Video/Wan2.1 and Wan2.2,
wan/modules), and of the diffusers classes with the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from types import MappingProxyType

from wanrun.errors import SourceError

LISTED = 5
"""Keys named in full in one message; the others are counted."""

_FIELDS = MappingProxyType({"{blocks}": r"(?P<blocks>(?:vace_)?blocks\.[0-9]+)", "{i}": "(?P<i>[0-9]+)"})

_MOTION_BLOCKS = 7  # of the 512-pixel motion encoder, the only published one

MODULES: tuple[tuple[str, str], ...] = (
    # The same name in both.
    ("patch_embedding", "patch_embedding"),
    ("vace_patch_embedding", "vace_patch_embedding"),
    ("pose_patch_embedding", "pose_patch_embedding"),
    ("face_encoder.out_proj", "face_encoder.out_proj"),
    # Embeddings and head.
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    ("head.head", "proj_out"),
    # Transformer blocks and VACE blocks.
    *(
        (f"{{blocks}}.{ours}.{original}", f"{{blocks}}.{theirs}.{diffusers}")
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for original, diffusers in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    ),
    ("{blocks}.cross_attn.k_img", "{blocks}.attn2.add_k_proj"),
    ("{blocks}.cross_attn.v_img", "{blocks}.attn2.add_v_proj"),
    ("{blocks}.cross_attn.norm_k_img", "{blocks}.attn2.norm_added_k"),
    # The original numbers norms in order of definition, diffusers in order of execution.
    ("{blocks}.norm3", "{blocks}.norm2"),
    ("{blocks}.ffn.0", "{blocks}.ffn.net.0.proj"),
    ("{blocks}.ffn.2", "{blocks}.ffn.net.2"),
    ("vace_blocks.{i}.before_proj", "vace_blocks.{i}.proj_in"),
    ("vace_blocks.{i}.after_proj", "vace_blocks.{i}.proj_out"),
    # Animate: motion encoder, face encoder, face adapter.
    ("motion_encoder.enc.net_app.convs.0.0", "motion_encoder.conv_in"),
    ("motion_encoder.enc.net_app.convs.0.1", "motion_encoder.conv_in.act_fn"),
    *(
        (
            f"motion_encoder.enc.net_app.convs.{block + 1}.{original}",
            f"motion_encoder.res_blocks.{block}.{diffusers}",
        )
        for block in range(_MOTION_BLOCKS)
        for original, diffusers in (
            ("conv1.0", "conv1"),
            ("conv1.1", "conv1.act_fn"),
            ("conv2.1", "conv2"),
            ("conv2.2", "conv2.act_fn"),
            ("skip.1", "conv_skip"),
        )
    ),
    (f"motion_encoder.enc.net_app.convs.{_MOTION_BLOCKS + 1}", "motion_encoder.conv_out"),
    ("motion_encoder.enc.fc.{i}", "motion_encoder.motion_network.{i}"),
    *((f"face_encoder.{conv}.conv", f"face_encoder.{conv}") for conv in ("conv1_local", "conv2", "conv3")),
    ("face_adapter.fuser_blocks.{i}.linear1_q", "face_adapter.{i}.to_q"),
    ("face_adapter.fuser_blocks.{i}.linear2", "face_adapter.{i}.to_out"),
    ("face_adapter.fuser_blocks.{i}.q_norm", "face_adapter.{i}.norm_q"),
    ("face_adapter.fuser_blocks.{i}.k_norm", "face_adapter.{i}.norm_k"),
)
"""(original, diffusers) paths of modules, each with a ``.weight``, a ``.bias`` or both.

``{blocks}`` stands for ``blocks.N`` or ``vace_blocks.N``, ``{i}`` for a number.
"""

PARAMETERS: tuple[tuple[str, str], ...] = (
    ("{blocks}.modulation", "{blocks}.scale_shift_table"),
    ("head.modulation", "scale_shift_table"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("motion_encoder.dec.direction.weight", "motion_encoder.motion_synthesis_weight"),
    ("face_encoder.padding_tokens", "face_encoder.padding_tokens"),
)
"""(original, diffusers) names of parameters that are not a module's weight or bias."""

FUSED: tuple[tuple[str, tuple[str, str]], ...] = (
    ("face_adapter.fuser_blocks.{i}.linear1_kv", ("face_adapter.{i}.to_k", "face_adapter.{i}.to_v")),
)
"""Original modules whose rows are the keys and then the values of diffusers' modules."""

CONSTANTS: tuple[str, ...] = (
    "motion_encoder.enc.net_app.convs.{i}.conv2.0.kernel",
    "motion_encoder.enc.net_app.convs.{i}.skip.0.kernel",
)
"""Stored tensors of the original that are not weights: blur kernels, which diffusers computes itself."""


def _sketch(name: str) -> str:
    """Replaces every number in a name; few rows share the result, so a look-up tries only those."""
    return re.sub("[0-9]+", "#", name)


def _pattern(template: str) -> re.Pattern[str]:
    expression = re.escape(template)
    for field, group in _FIELDS.items():
        expression = expression.replace(re.escape(field), group)
    return re.compile(expression)


class Templates:
    """Finds the template that a name matches, in rows of (template, value)."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._rows: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        for template, value in rows:
            plain = template.replace("{i}", "#")
            for blocks in ("blocks.#", "vace_blocks.#") if "{blocks}" in plain else ("",):
                sketch = _sketch(plain.replace("{blocks}", blocks))
                self._rows.setdefault(sketch, []).append((_pattern(template), value))

    def find(self, name: str) -> str | None:
        """Returns the value of the matching template, with the name's numbers; None if none matches."""
        for pattern, value in self._rows.get(_sketch(name), ()):
            if match := pattern.fullmatch(name):
                return value.format(**match.groupdict())
        return None


def _with_kinds(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


@cache
def _originals() -> Templates:
    """Finds the diffusers name of an original parameter."""
    rows = [pair for a, b in MODULES for pair in zip(_with_kinds(a), _with_kinds(b), strict=True)]
    return Templates([*rows, *PARAMETERS])


@cache
def _diffusers() -> Templates:
    """Finds a diffusers name itself."""
    modules = [*(new for _, new in MODULES), *(half for _, halves in FUSED for half in halves)]
    names = [name for module in modules for name in _with_kinds(module)]
    return Templates((name, name) for name in (*names, *(new for _, new in PARAMETERS)))


@cache
def _fused() -> Templates:
    return Templates(
        (f"{original}.{kind}", " ".join(f"{part}.{kind}" for part in parts))
        for original, parts in FUSED
        for kind in ("weight", "bias")
    )


def listed(keys: Iterable[str]) -> str:
    """Returns the first keys for a message, and how many more there are."""
    keys = tuple(keys)
    return ", ".join(keys[:LISTED]) + (f" and {len(keys) - LISTED} more" if len(keys) > LISTED else "")


def diffusers_names(keys: Iterable[str], where: str = "the transformer") -> dict[str, str]:
    """Detects the naming of a transformer's keys, and returns the diffusers name of each key.

    ``keys`` are every key of the checkpoint without prefixes, in the original naming or in diffusers', and
    the result keeps their order. If no key is original, all keys are returned, unknown ones included, because
    the mapping table checks them. Original keys in ``CONSTANTS`` are left out, and so are those of tensors
    that hold several of diffusers', one after the other (``fused_names``). Raises SourceError if only some
    keys are original.
    """
    keys = tuple(keys)
    constants = Templates((name, name) for name in CONSTANTS)
    renamed = {key: _originals().find(key) for key in keys}
    # Names that are the same in both do not identify the naming.
    if not any(new is not None and new != key for key, new in renamed.items()):
        return {key: key for key in keys}
    other = [key for key, new in renamed.items() if new is None]
    problems = []
    if theirs := [key for key in other if _diffusers().find(key)]:
        problems.append(f"has diffusers names among the original ones: {listed(theirs)}")
    explained = {*theirs, *fused_names(keys), *(key for key in other if constants.find(key))}
    if unknown := [key for key in other if key not in explained]:
        problems.append(f"has keys that are not a part of this model: {listed(unknown)}")
    if problems:
        raise SourceError(
            "wrong_kind",
            f"{where} is in the original Wan-Video naming and {'; '.join(problems)}",
            remedy="use the checkpoint as published, or the repository whose name ends in -Diffusers",
        )
    return {key: new for key, new in renamed.items() if new is not None}


def fused_names(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the diffusers names of the tensors that one original tensor holds, by its key.

    ``keys`` are every key of the checkpoint without prefixes. Each name stands for equally many of the
    tensor's rows, in their order.
    """
    found = {key: _fused().find(key) for key in keys}
    return {key: tuple(names.split()) for key, names in found.items() if names is not None}
