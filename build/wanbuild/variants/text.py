"""T2V: video from text alone, Wan 2.1, with two experts Wan 2.2, and in any number of steps AnyFlow."""

from __future__ import annotations

from types import MappingProxyType

from wanbuild.variants.variant import TEXT_TO_VIDEO, TWO_EXPERTS, Variant


def _anyflow(name: str, pipeline_class: str, transformer: str) -> Variant:
    """Returns a row of AnyFlow: guidance is in the weights, and the steps are those of its own examples."""
    parts = {"scheduler": "FlowMapEulerDiscreteScheduler", "transformer": transformer}
    own = {part: (f"diffusers.{kind}",) for part, kind in parts.items()}
    return Variant(
        name=name,
        task="t2v",
        pipeline_class=pipeline_class,
        components=MappingProxyType({**TEXT_TO_VIDEO, **own}),
        flow_map=True,
        solver="flow-map",
        steps=4,
        guidance_scale=1.0,
    )


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
    _anyflow("anyflow-wan2.1", "AnyFlowPipeline", "AnyFlowTransformer3DModel"),
    _anyflow("anyflow-far-wan2.1", "AnyFlowFARPipeline", "AnyFlowFARTransformer3DModel"),
)
