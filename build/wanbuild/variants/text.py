"""T2V, video from text only: Wan 2.1, Wan 2.2 with two experts, and Self-Forcing.

Self-Forcing makes a video in few steps, chunk by chunk and without guidance.
"""

from __future__ import annotations

from types import MappingProxyType

from wanbuild.variants.variant import TEXT_TO_VIDEO, TWO_EXPERTS, Variant

ROWS = (
    Variant(
        name="wan2.1-t2v",
        task="t2v",
        pipeline_class="WanPipeline",
        components=TEXT_TO_VIDEO,
        from_video=True,
    ),
    Variant(
        name="wan2.2-t2v",
        task="t2v",
        pipeline_class="WanPipeline",
        components=TWO_EXPERTS,
        from_video=True,
        steps=40,
        guidance_scale=4.0,
        options=MappingProxyType({"guidance_scale_2": 3.0}),
        flow_shift=12.0,
        sizes=((1280, 720), (832, 480)),
    ),
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
