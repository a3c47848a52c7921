"""Compares an artifact with diffusers on the checkpoint that it was made from, component by component.

The artifact runs its own executables, as ``wanrun`` does. Only the VAE encoder runs from the model
definition, unless the profile's videos may begin with a video: a text-to-video artifact otherwise holds its
weights but no program of it. The reference runs in float32 on the CPU. Needs the test extra (torch,
diffusers, transformers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wanbuild.check.embed import open_profile
from wanbuild.check.findings import Findings, Videos
from wanbuild.check.given_configs import readable_source, with_given_configs
from wanbuild.check.intermediates import image_tokens, mean_latents, start_latents, velocity
from wanbuild.check.reference_pipeline import Made, ModelCall, Reference
from wanbuild.source.scheduler import SchedulerDefaults, read_scheduler
from wanbuild.variants.table import variant_named
from wanbuild.variants.variant import Variant
from wanrun import relative_error
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_profile
from wanrun.denoising.boundary import boundary_between
from wanrun.denoising.latents import leading_latents
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.steps import ExpertRange, schedule, transformers
from wanrun.errors import UsageError, VerificationError
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Inputs, Media
from wanrun.media.prepare import load_media
from wanrun.replay.samples import sample_media
from wanrun.text.tokenizer import clean_prompt

PROMPT = "A red fox runs through fresh snow at dawn, 4K &amp; slow motion"
NEGATIVE_PROMPT = "blurry, static"
SEED = 7
GUIDANCE_SCALE, GUIDANCE_SCALE_2 = 5.0, 3.0
"""They differ, so that a swap of the experts' scales is noticed."""

ENCODERS = ("text_encoder", "image_encoder")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One row of the table: a compared component or result, with more figures in ``note``.

    Attributes:
        error: relative error ‖a−b‖/‖b‖; for frames in float32 the share of uint8 values off by more than
            one level, and in bfloat16 the root mean square error over the range of 255.
        limit: the largest error that passes.
    """

    name: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.limit)


LIMITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # float32 sums in another order change a component by 1e-6. On the final latents 1e-5 is the aim, and
        # 2e-4 means another computation. Frames may differ where a value lies between two levels.
        "float32": {"component": 1e-4, "latents": 1e-5, "frames": 1e-3},
        # bfloat16 has 8 bits: an error of 4e-3 per rounding, about 1e-2 after a transformer, 2e-2 with
        # guidance. Another computation is off by 1e-1 or more. Frames have a limit of their RMS error
        # (5e-2 is 26 dB).
        "bfloat16": {"component": 5e-2, "latents": 1e-1, "frames": 5e-2},
    }
)


def frames_check(name: str, frames: np.ndarray, reference: np.ndarray, dtype: str = "float32") -> Check:
    """Compares frames, uint8, with the reference's, float32 in [0, 1] of the same shape.

    ``dtype`` is that of the programs that made the frames.
    """
    difference = np.abs(frames.astype(np.float64) - np.round(reference * 255))
    mean_square = float(np.mean(np.square(difference)))
    psnr = 10 * np.log10(255**2 / mean_square) if mean_square else float("inf")
    error = float(np.mean(difference > 1)) if dtype == "float32" else np.sqrt(mean_square) / 255
    note = f"PSNR {psnr:.1f} dB, largest difference {difference.max():.0f}"
    return Check(name, float(error), LIMITS[dtype]["frames"], note)


@dataclass(frozen=True)
class Sample:
    """The media of one whole video, for the reference and as the artifact takes them; None for text only.

    ``name`` is for the table; it is empty for the only sample.
    """

    name: str
    media: Media | None
    inputs: Inputs | None


def _variant(manifest: Manifest) -> Variant:
    return variant_named(manifest.model.variant, Path("the artifact"))


def reference_samples(manifest: Manifest, profile: Profile) -> list[Sample]:
    """Returns a sample for each use of a model: in each mode, without and with the optional media.

    The last sample has all of the media.
    """
    made = []
    start = manifest.model.task.start
    for name, options in _variant(manifest).usages:
        given = {**options, "without": (*options.get("without", ()), start)}
        media = sample_media(manifest, profile, **given, seed=SEED)
        inputs = None if media is None else load_media(manifest, profile, media)
        made.append(Sample(name, media, inputs))
    return made


def _guided(outputs: Sequence[ModelCall]) -> np.ndarray:
    """Returns the velocity with guidance of the calls of a step, the positive prompt's first."""
    if len(outputs) == 1:
        return outputs[0].output
    return outputs[1].output + GUIDANCE_SCALE * (outputs[0].output - outputs[1].output)


class _Comparison:
    """Compares one profile of an artifact with one pipeline of the reference."""

    def __init__(self, pipeline: Pipeline, reference: Reference) -> None:
        self._ours, self._reference, self._pipe = pipeline, reference, reference.pipe
        self._samples = reference_samples(pipeline.manifest, pipeline.profile)
        self._profile = pipeline.profile
        self._transformers = transformers(pipeline.manifest)
        self._text_dtype = self._coarser(["dtype"], ["text_encoder"])
        encoders = [name for name in ENCODERS if name in pipeline.manifest.components]
        self._dtype = self._coarser(["dtype", "scheduler_dtype"], [*encoders, *self._transformers])
        self._vae_dtype = self._coarser(["vae_dtype"], ["vae"])
        self._video_dtype = "float32" if self._dtype == self._vae_dtype == "float32" else "bfloat16"
        self._limits, self._vae_limits = LIMITS[self._dtype], LIMITS[self._vae_dtype]
        self._prompts = [PROMPT, NEGATIVE_PROMPT] if self._profile.guidance else [PROMPT]
        self.made: Videos = []

    def _coarser(self, options: Sequence[str], components: Sequence[str]) -> str:
        """Returns bfloat16 if a component is stored in it or a build option names it, else float32."""
        stored = [self._ours.manifest.dtypes[name].weights for name in components]
        chosen = [getattr(self._profile.options, name) for name in options]
        return "bfloat16" if "bfloat16" in [*stored, *chosen] else "float32"

    def text(self) -> Check:
        """Compares the embeddings of the prompts."""
        import torch

        with torch.no_grad():
            prompts = [clean_prompt(prompt) for prompt in self._prompts]
            reference = self._pipe._get_t5_prompt_embeds(prompts, max_sequence_length=512)
        if isinstance(reference, tuple):  # Helios' has the mask too
            reference = reference[0]
        error = relative_error(self._ours.encode_prompts(self._prompts), reference.numpy())
        return Check("text_encoder", error, LIMITS[self._text_dtype]["component"])

    def image(self) -> list[Check]:
        """Compares the image tokens, for a model with an image encoder."""
        import torch

        media, inputs = self._samples[-1].media, self._samples[-1].inputs
        if "image_encoder" not in self._ours.manifest.components or media is None or inputs is None:
            return []
        images = [image for image in (media.image, media.last_image) if image is not None]
        with torch.no_grad():
            reference = self._pipe.encode_image(images, "cpu").numpy()
        error = relative_error(image_tokens(self._ours, inputs), reference)
        limits = LIMITS[self._coarser(["dtype"], ["image_encoder"])]
        return [Check("image_encoder", error, limits["component"])]

    def experts(self) -> list[Check]:
        """Compares every expert's velocity at the second of two steps of the reference, with guidance."""
        return [self._transformer(name) for name in self._transformers]

    def _transformer(self, name: str) -> Check:
        if self._ours.manifest.model.chunks is not None:
            return self._first_chunk(name, self._ours.manifest.model.chunks)
        sample, single = self._samples[-1], len(self._transformers) == 1
        # The wanted expert runs all steps: no timestep is below boundary 0, and all are below boundary 2.
        boundary = None if single else 2.0 * (name != self._transformers[0])
        calls = self._run(sample, 2, {} if boundary is None else {"boundary": boundary}).calls
        outputs = [call for call in calls if call.transformer == name][len(calls) // 2 :]
        guided = _guided(outputs)
        latents = outputs[0].latents[:, : self._ours.latents_shape[1]]
        timestep = float(outputs[0].timestep.max())  # a held frame's timestep is zero
        steps = ExpertRange.alike(name, 0, 1, GUIDANCE_SCALE)
        own = velocity(self._ours, latents, self._prompts, timestep, steps, sample.inputs)
        held = int(self._ours.manifest.model.expand_timesteps and sample.media is not None)
        error = relative_error(own[:, :, held:], guided[:, :, held:])
        return Check(name, error, self._limits["component"])

    def _first_chunk(self, name: str, chunks: Chunking) -> Check:
        """Compares the velocity of the first chunk from text, which has none before it, at its last size."""
        T, sample = next(iter(chunks.lengths(self._ours.latents_shape[2]))), self._samples[0]  # latent frames
        cells, prompts = self._ours.latents_shape[3:], len(self._prompts)
        calls = [one for one in self._run(sample, 2, {}).calls if one.latents.shape[2:] == (T, *cells)]
        outputs = calls[prompts : 2 * prompts]
        latents = np.zeros(self._ours.latents_shape, np.float32)
        latents[:, :, :T] = outputs[0].latents
        steps = ExpertRange.alike(name, 0, 1, GUIDANCE_SCALE)
        timestep = float(outputs[0].timestep.max())
        own = velocity(self._ours, latents, self._prompts, timestep, steps, sample.inputs)
        return Check(name, relative_error(own[:, :, :T], _guided(outputs)), self._limits["component"])

    def _latents_to_vae(self, latents: np.ndarray) -> Any:
        import torch

        config = self._pipe.vae.config
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
        std = 1.0 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
        return torch.from_numpy(latents) / std + mean

    def decode(self) -> Check:
        """Compares the uint8 frames of random latents."""
        import torch

        latents = initial_noise(SEED + 1, self._ours.latents_shape)
        leading = leading_latents(self._ours.manifest, self._profile)
        with torch.no_grad():
            own = self._latents_to_vae(latents[:, :, leading:])
            video = self._pipe.vae.decode(own, return_dict=False)[0]
        frames = self._pipe.video_processor.postprocess_video(video, output_type="np")
        return frames_check("vae decode", self._ours.decode(latents), frames, self._vae_dtype)

    def encode(self) -> Check:
        """Compares the latents of a random video: from the start's program, or from the definition."""
        import torch

        begins, (C, F) = self._profile.options.video_to_video, (3, self._profile.num_frames)
        shape = (1, C, F if begins else min(F, 9), self._profile.height, self._profile.width)
        levels = np.rint(127.5 + 127.5 * np.tanh(initial_noise(SEED + 2, shape))).astype(np.uint8)
        video = levels.astype(np.float32) / 127.5 - 1
        with torch.no_grad():
            reference = self._pipe.vae.encode(torch.from_numpy(video)).latent_dist.mode().numpy()
        if begins:
            start = start_latents(self._ours, np.moveaxis(levels[0], 0, -1))
            mean = self._latents_to_vae(start).numpy()
        else:
            mean = mean_latents(self._ours, video)
        return Check("vae encode", relative_error(mean, reference), self._vae_limits["component"])

    def videos(self, steps: int) -> list[Check]:
        """Compares the whole path from prompt to frames, from the same seed, for every sample."""
        return [check for sample in self._samples for check in self._video(sample, steps)]

    def _video(self, sample: Sample, steps: int) -> list[Check]:
        options, note = self._expert_options(steps)
        guidance = GUIDANCE_SCALE if self._profile.guidance else 1.0
        made = self._run(sample, steps, options)
        scheduler = self._scheduler  # as in the reference: the checkpoint's, not the artifact's defaults
        generation = self._ours.resolve(
            PROMPT,
            NEGATIVE_PROMPT,
            seed=SEED,
            num_steps=steps,
            guidance_scale=guidance,
            flow_shift=scheduler.flow_shift,
            solver=scheduler.solver,
            inputs=sample.inputs,
            **options,
        )
        ours = self._ours.run(generation.on_own_grid(), inputs=sample.inputs)
        suffix = f" ({sample.name})" if sample.name else ""
        error = relative_error(ours.all_latents, made.latents)
        self.made += [(f"The artifact{suffix}", ours.frames[0]), (f"diffusers{suffix}", made.levels[0])]
        return [
            Check(f"final latents{suffix}", error, self._limits["latents"], note),
            frames_check(f"video{suffix}", ours.frames, made.frames, self._video_dtype),
        ]

    @property
    def _scheduler(self) -> SchedulerDefaults:
        """The defaults of the checkpoint's scheduler_config.json."""
        return read_scheduler(self._ours.manifest.configs["scheduler"])

    def _run(self, sample: Sample, steps: int, options: Mapping[str, Any]) -> Made:
        """Runs a sample with the reference; options as for ``Pipeline.generate``."""

        def prompts(text: str) -> str | list[str]:
            """Returns one prompt per video, as the reference needs with image tokens; VACE takes no list."""
            count = self._profile.num_videos
            return text if count == 1 else [text] * count

        return self._reference.run(
            sample.media,
            seed=SEED,
            prompt=prompts(PROMPT),
            negative_prompt=prompts(NEGATIVE_PROMPT),
            height=self._profile.height,
            width=self._profile.width,
            num_frames=self._profile.num_frames,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE if self._profile.guidance else 1.0,
            **options,
        )

    def _expert_options(self, steps: int) -> tuple[dict[str, Any], str]:
        """Returns options with which every expert runs if the steps suffice, and a note for the table."""
        manifest, scheduler = self._ours.manifest, self._scheduler
        grid = {"solver": scheduler.solver, "flow_shift": scheduler.flow_shift}
        if (boundary := boundary_between(manifest, steps, **grid)) is None:
            return {}, f"{steps} steps"
        options = {
            "boundary": boundary,
            "guidance_scale_2": GUIDANCE_SCALE_2 if self._profile.guidance else 1.0,
        }
        defaults = {**manifest.model.default_options(), "timesteps": None}
        _, parts = schedule({**defaults, **grid, "num_steps": steps, **options}, manifest)
        counts = [f"{part.last - part.first} of {part.transformer}" for part in parts]
        return options, f"{steps} steps, {' and '.join(counts)}, boundary {boundary:g}"


def compare_with_reference(
    folder: Path, source: str, steps: int, report: Report, findings: Findings | None = None
) -> dict[str, Any]:
    """Compares the first built profile with diffusers, reports a table of errors, and returns it as dicts.

    ``source`` is the checkpoint's folder or hub id, ``steps`` are those of the whole video. ``findings`` gets
    the checks and both videos. Raises SourceError if the source is not a checkpoint; UsageError if the
    reference is not installed, cannot load it, or makes no such videos; VerificationError with the checks
    that failed.
    """
    artifact = open_artifact(folder)
    manifest = artifact.manifest
    profile = min(manifest.profiles.values(), key=lambda p: p.index, default=None)
    if profile is None:
        select_profile(artifact)  # raises ArtifactError with the remedy
    assert profile is not None
    variant = _variant(manifest)
    most = variant.reference_videos
    if most is not None and profile.num_videos > most:
        raise UsageError(
            "unsupported",
            f"the reference makes {most} video(s) of {variant.name} at a time",
            found=f"{profile.name}, of {profile.num_videos}",
            remedy="compare an artifact that is compiled with --num-videos 1 first",
        )
    with with_given_configs(readable_source(manifest, source), manifest) as checkpoint:
        reference = Reference(checkpoint, variant.name)
    with open_profile(artifact, profile) as pipeline:
        comparison = _Comparison(pipeline, reference)
        report(f"{profile.name}, {profile.options.dtype} against diffusers in float32")
        report(f"{'component':<27} {'error':>10} {'limit':>10}")
        checks = [comparison.text(), *comparison.image(), *comparison.experts()]
        checks += [comparison.encode(), comparison.decode(), *comparison.videos(steps)]
    if findings is not None:
        findings.compared(checks, source, comparison.made)
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        report(f"{check.name:<27} {check.error:>10.2e} {check.limit:>10.0e}  {verdict:<6} {check.note}")
    failed = [check for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            "other_results",
            "the artifact differs from the reference: "
            + ", ".join(f"{check.name} {check.error:.1e} (limit {check.limit:.0e})" for check in failed),
            remedy="check that --source is the checkpoint the artifact was made from",
        )
    return {check.name: asdict(check) for check in checks}
