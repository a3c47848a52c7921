"""The forms of the attention by name: a new form is one row."""

from __future__ import annotations

from wanbuild.models.attention import MOSAIC_HEAD_DIM, Attention, blocked_attention
from wanrun.artifact.programs import Kernels


def attention_form(kernels: Kernels) -> Attention:
    """Returns the form of the attention that a target's kernels name; raises ValueError for an unknown name.

    A module of Pallas, Mosaic or cuDNN is imported here: programs for a CPU do without.
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
        case "wgmma":
            from wanbuild.models.mosaic_wgmma import WgmmaAttention

            queries, keys, stages = kernels.attention_blocks
            return WgmmaAttention(queries, keys, stages)
        case "tcgen05":
            from wanbuild.models.mosaic_tcgen05 import Tcgen05Attention

            queries, keys, stages = kernels.attention_blocks
            return Tcgen05Attention(queries, keys, stages)
        case other:
            raise ValueError(f"there is no attention {other!r}")


def has_kernel(kernels: Kernels, head_dim: int) -> bool:
    """Returns whether attention of this head dimension has a kernel in Mosaic GPU, where kernels name one."""
    return kernels.attention not in ("wgmma", "tcgen05") or head_dim == MOSAIC_HEAD_DIM
