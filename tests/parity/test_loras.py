"""LoRAs of a request against diffusers' ``load_lora_weights`` and ``set_adapters``, in float32, two at once.

Every layer of each expert changes, small parameters too, which diffusers' files cannot have: they are added
to the reference's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file

import wanrun
from helpers.loras import PUBLISHED, lora
from helpers.reference_models import relative_error
from wanbuild.check.reference_pipeline import Made, Reference
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.manifest import TRANSFORMERS, Manifest, read_manifest
from wanrun.replay.samples import sample_media

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

LATENTS = 1e-5
RUN: dict[str, Any] = {"prompt": "a cat in the snow", "negative_prompt": "blurry", "seed": 5}
TWO_EXPERTS = {"boundary": 0.9, "guidance_scale_2": 2.0}
NOISE = dict(zip(TRANSFORMERS, ("high", "low"), strict=True))

STRENGTHS: dict[str, dict[str, float]] = {
    "first": {"transformer": 0.25, "transformer_2": 0.125},
    "second": {"transformer": -0.125, "transformer_2": 0.25},
}
"""By adapter and expert: strong enough to change the video, and no stronger."""

Artifact = Callable[[str], tuple[Path, Path]]


class Adapter:
    """A LoRA of every expert with random values: as diffusers loads it, and as ``wanbuild lora`` makes it."""

    def __init__(self, name: str, manifest: Manifest, artifact: Path, folder: Path) -> None:
        self.name, self.file = name, folder / f"{name}-adapter.safetensors"
        experts = [expert for expert in TRANSFORMERS if expert in manifest.components]
        self.strengths = {expert: STRENGTHS[name][expert] for expert in experts}
        self.pairs, self.small, options = dict[str, Path](), dict[str, Any](), list[str]()
        for number, expert in enumerate(experts):
            tensors = lora(PUBLISHED["diffusers"], manifest, seed=10 * number + len(name))
            # PEFT refuses Animate's motion encoder, whose layers are of a class of its own.
            tensors = {key: one for key, one in tensors.items() if "motion_encoder" not in key}
            whole = folder / f"{name}-{expert}.safetensors"
            save_file(tensors, whole)
            options += [f"--lora-{NOISE[expert]}", str(whole)] if len(experts) > 1 else [str(whole)]
            pairs = {key: tensor for key, tensor in tensors.items() if ".lora_" in key}
            self.pairs[expert] = folder / f"{name}-{expert}-pairs.safetensors"
            save_file(pairs, self.pairs[expert])
            self.small[expert] = {key: tensor for key, tensor in tensors.items() if key not in pairs}
        assert run(wanbuild, ["lora", *options, "--artifact", str(artifact), "-o", str(self.file)]) == 0

    def choice(self) -> dict[str, Any]:
        """The request's."""
        if len(self.strengths) == 1:
            return {"name": str(self.file), "strength": self.strengths["transformer"]}
        strengths = {NOISE[expert]: value for expert, value in self.strengths.items()}
        return {"name": str(self.file), **strengths}

    def put_into(self, pipe: Any) -> None:
        """Loads it into the reference."""
        for expert, file in self.pairs.items():
            to_second = {"load_into_transformer_2": True} if expert == TRANSFORMERS[1] else {}
            pipe.load_lora_weights(str(file), adapter_name=f"{self.name}_{expert}", **to_second)
            model = getattr(pipe, expert)
            parameters = dict(model.named_parameters())
            with torch.no_grad():
                for key, values in self.small[expert].items():
                    parameter = parameters[_own_name(key, parameters)]
                    parameter += self.strengths[expert] * torch.from_numpy(values)


def _own_name(key: str, parameters: Any) -> str:
    """The parameter that a tensor of a LoRA's file changes; PEFT has moved those of layers with pairs."""
    name = key.removeprefix("transformer.")
    name = name.removesuffix(".diff_b") + ".bias" if name.endswith(".diff_b") else name.removesuffix(".diff")
    module, _, leaf = name.rpartition(".")
    spelled = (name, f"{name}.weight", f"{module}.base_layer.{leaf}")
    return next(one for one in spelled if one in parameters)


@pytest.mark.parametrize(
    ("variant", "memories"),
    [
        ("wan2.2-vace", ["auto", "stream"]),
        ("wan2.2-animate", ["auto"]),
    ],
)
def test_two_loras_with_strengths(
    slots_toy: Artifact, variant: str, memories: list[Any], tmp_path: Path, record_property: Any
) -> None:
    """Two experts, and one; image keys, control blocks and face adapters; layers that stream too.

    A generation without LoRAs before and after is that of the model as it is.
    """
    checkpoint, folder = slots_toy(variant)
    manifest, reference = read_manifest(folder), Reference(checkpoint, variant)
    profile = next(iter(manifest.profiles.values()))
    media = sample_media(manifest, profile)
    options: dict[str, Any] = TWO_EXPERTS if "boundary" in manifest.model.options else {}
    adapters = [Adapter(name, manifest, folder, tmp_path) for name in STRENGTHS]

    def theirs() -> Made:
        return reference.run(
            media,
            **RUN,
            **options,
            height=profile.height,
            width=profile.width,
            num_frames=profile.num_frames,
            num_inference_steps=4,
            guidance_scale=3.0,
        )

    plain = theirs().latents
    for one in adapters:
        one.put_into(reference.pipe)
    for expert in adapters[0].strengths:
        names = [f"{one.name}_{expert}" for one in adapters]
        getattr(reference.pipe, expert).set_adapters(names, [one.strengths[expert] for one in adapters])
    expected = theirs().latents
    for memory in memories:
        with wanrun.load(folder, profile=profile.name, memory=memory, embeddings="none") as pipeline:

            def ours(loras: Any) -> Any:
                made = pipeline.generate(
                    **RUN, **options, num_steps=4, guidance_scale=3.0, media=media, lora=loras
                )
                return made.all_latents

            found = [ours(loras) for loras in ((), [one.choice() for one in adapters], ())]
        errors = [
            relative_error(one, other) for one, other in zip(found, (plain, expected, plain), strict=True)
        ]
        moved = relative_error(expected, plain)
        record_property(f"latents_relative_error_{memory}", errors[1])
        print(f"{variant}, {memory}: {errors}; moved by {moved:.2f}", flush=True)
        assert max(errors) < LATENTS < 1e-1 < moved
