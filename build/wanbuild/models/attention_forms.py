"""The forms of the attention by name: a new form is one row."""

from __future__ import annotations

from wanbuild.models.attention import Attention, blocked_attention
from wanrun.artifact.programs import Kernels


def attention_form(kernels: Kernels) -> Attention:
    """Returns the form of the attention that a target's kernels name.

    A module of Pallas, Mosaic or cuDNN is imported here: programs for a CPU do without.

    Raises:
        ValueError: for an unknown name.
    """
    match kernels.attention:
        case "cpu":
            return blocked_attention
        case "flash":
            from wanbuild.models.flash import FlashAttention

            queries, tile_queries, tile_keys = kernels.attention_blocks
            return FlashAttention(queries, tile_queries, tile_keys)
        case "cudnn":
            from wanbuild.models.cudnn import CudnnAttention

            return CudnnAttention()
        case "mosaic":
            from wanbuild.models.mosaic import MosaicAttention

            queries, keys, stages = kernels.attention_blocks
            return MosaicAttention(queries, keys, stages)
        case other:
            raise ValueError(f"there is no attention {other!r}")
