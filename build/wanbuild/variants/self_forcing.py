"""Self-Forcing: video from text in few steps, which is made chunk by chunk and has no guidance."""

from __future__ import annotations

from types import MappingProxyType

from wanbuild.variants.variant import TEXT_TO_VIDEO, Variant

ROWS = (
    Variant(
        name="self-forcing-wan2.1",
        task="t2v",
        pipeline_class="WanCausalDMDPipeline",
        components=MappingProxyType(
            {
                **TEXT_TO_VIDEO,
                "scheduler": ("diffusers.SelfForcingFlowMatchScheduler",),
                "transformer": ("diffusers.CausalWanTransformer3DModel",),
            }
        ),
        solver="self-forcing",
        steps=4,
        guidance_scale=1.0,
        sizes=((832, 480),),
    ),
)
