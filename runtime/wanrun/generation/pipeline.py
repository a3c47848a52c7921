"""The runtime: restore, load executables, and run them in order. It knows no model code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from msgspec import structs

from wanrun.artifact.manifest import Manifest, Profile, read_manifest
from wanrun.artifact.select import SelectedTarget, select_profile, select_target
from wanrun.denoising.expert_loop import Denoising, ExpertLoop
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.schedule import Segment, schedule, transformers
from wanrun.denoising.steps import LOOP_PROGRAMS, OnStep, velocity_table
from wanrun.errors import UsageError
from wanrun.generation.conditioning import Conditioning
from wanrun.generation.last_encoded import LastEncoded
from wanrun.generation.options import (
    check_latents,
    choose_profile,
    has_guidance,
    latents_shape,
    resolve_loop,
    resolve_options,
)
from wanrun.generation.request import Request, read_request
from wanrun.generation.result import Result
from wanrun.generation.sampler import Sampler
from wanrun.loading.buffers import DTYPES, Memory
from wanrun.loading.device import open_device
from wanrun.loading.executables import Executables, check_entries
from wanrun.loading.futures import unfinished, when_done
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.placement import choose_placement, device_memory_bytes, host_memory_bytes
from wanrun.loading.policy import LoadPolicy
from wanrun.loading.programs import Programs
from wanrun.loading.weights import WeightStore
from wanrun.media.types import Inputs, Media
from wanrun.text.backends import embedding_stores, text_backend
from wanrun.text.encoder import PromptEncoder
from wanrun.text.prompt import clean_prompt
from wanrun.text.tokenizer import ArtifactTokenizer
from wanrun.timing import Timings

Tell = Callable[[str], None]


def _silent(message: str) -> None:
    del message


class Pipeline:
    """One profile of an artifact on its device; made by ``load``."""

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        profile: Profile,
        selected: SelectedTarget,
        loading: LoadPolicy,
        timings: Timings,
        warn: Tell,
        report: Tell = _silent,
    ) -> None:
        self.artifact, self.manifest, self.profile = artifact, manifest, profile
        self.timings, self._loading = timings, loading
        if not loading.allow_compile:  # or what is missing is compiled
            check_entries(artifact, selected.target, profile.name)
        self._tokenizer = ArtifactTokenizer(artifact, manifest)
        self._width = manifest.configs["text_encoder"]["d_model"]
        self._dtype = DTYPES[profile.options["dtype"]]
        self._text_expected = True
        self._transformers = names = transformers(manifest)
        self._loop = resolve_loop(profile, loading.loop)
        self._first_expert = loading.first_expert or names[0]
        if self._first_expert not in names:
            raise UsageError(
                "first_expert is not a transformer of this artifact",
                expected=" or ".join(names),
                found=repr(self._first_expert),
            )
        ahead: dict[str, Memory] = {}
        if not (loading.lazy or loading.memory == "low"):  # the text encoder may come first
            ahead[self._first_expert] = Memory(manifest.components[self._first_expert])
            ahead[self._first_expert].touch_ahead()  # while jax is imported
        try:
            device = open_device(selected, loading.allow_compile, timings, warn)
            opened = OpenedArtifact(artifact, manifest, selected, device, loading, timings, warn, report)
            placement = self._placement(selected, device.device, report)
            bits = any(program.weight_bits for program in opened.programs(profile).values())
            self._executables, self._weights = Executables(opened), WeightStore(opened, bits, ahead)
            self._programs = Programs(profile, self._executables, self._weights)
        except BaseException:
            for memory in ahead.values():
                memory.stop()
            raise
        self._weights.keep_on_host(names if placement == "host" else ())
        self._expert_loop = ExpertLoop(self._programs, profile, names, placement)
        self._last = LastEncoded()
        low = loading.memory == "low"
        self._conditioning = Conditioning(self._programs, manifest, profile, self._last, low)
        self._sampler = Sampler(self._programs, manifest, profile, self._conditioning, self._expert_loop)
        self._backend = text_backend(opened, self._programs, profile.options["dtype"])
        self._prompts = PromptEncoder(
            self._tokenizer,
            self._backend,
            embedding_stores(artifact, manifest, self._backend, loading.embeddings, warn),
            length=self._tokenizer.max_length,
            width=self._width,
            dtype=self._dtype,
            warn=warn,
        )

    def _placement(self, selected: SelectedTarget, device: Any, report: Tell) -> str:
        """Where the experts are kept; a single transformer stays on the device."""
        if len(self._transformers) == 1:
            return "both"
        placement = choose_placement(
            self.manifest,
            self.profile,
            selected.target.statistics.get(self.profile.name, {}),
            device_memory_bytes(device),
            host_memory_bytes(),
            separate=device.platform != "cpu",
            memory=self._loading.memory,
            text_encoder=self._loading.text_encoder == "jax",
        )
        self.timings.placement = placement.kind
        report(placement.describe())
        return placement.kind

    def start(self, prompts: Sequence[str] | None, inputs: Inputs | None = None) -> None:
        """Loads until the first step could run; what comes after it is loaded behind the second step.

        Args:
            prompts: the prompts that are going to be used, which are encoded while the transformer is
                read; the text encoder is not read where all their embeddings are at hand. None: any
                prompt may come.
            inputs: the images and videos that are going to be used first, which are encoded meanwhile too.

        Raises:
            ArtifactError: if something that is needed is missing or damaged.
        """
        if self._loading.lazy:
            return
        waiting: list[Future[Any]] = []
        missing: list[str] = []
        if prompts is None:
            self._tokenizer.load()
            if self._loading.memory != "low":
                waiting += self._backend.request()
        elif missing := [clean_prompt(prompt) for prompt in self._prompts.missing(prompts)]:
            self._tokenizer.start(missing)
            waiting += self._backend.request(())
        else:
            self._text_expected = False
        if missing and self._loading.memory == "low":  # not both in memory
            self.encode_prompts(missing)
            missing, waiting = [], []
        conditioned = inputs is not None or self._conditioning.needed
        if conditioned:
            waiting += self._conditioning.request_weights()
        waiting += self._programs.request(components=[self._first_expert])
        if missing:
            waiting += self._backend.request(self._tokenizer(missing).lengths)
        if conditioned:  # after the text's, which is encoded first
            waiting += self._conditioning.request_programs()
        waiting += self._programs.request(programs=["prepare", LOOP_PROGRAMS[self._loop]])
        when_done(waiting, self.timings.mark_ready)
        if missing:
            with self.timings.phase("text"):
                self._prompts.fetch(missing)
                waiting = unfinished(waiting)  # or they hold the text encoder
                self._spare_text_encoder()
        if inputs is not None:
            self._conditioning(inputs, timings=self.timings)
            waiting = unfinished(waiting)
        for future in waiting:
            future.result()

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.profile.width, self.profile.height, self.profile.num_frames

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the latents."""
        return latents_shape(self.manifest, self.profile)

    def encode_prompts(self, prompts: Sequence[str]) -> np.ndarray:
        """Embeddings (P, 512, text_dim) of these prompts, in the compute dtype, zero past each length."""
        with self.timings.phase("text"):
            embeddings = self._prompts(prompts)
            self._spare_text_encoder()
            return embeddings

    def _spare_text_encoder(self) -> None:
        """Lets go of the text encoder where memory is low."""
        if self._loading.memory == "low":
            self._backend.release()

    def component_weights(self, name: str) -> Mapping[str, Any]:
        """A component's weights on the device, as nested dicts by path."""
        return self._weights.weights(name)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Normalised latents (B, C, T, h, w) to frames, uint8 (B, T, H, W, 3), one video at a time."""
        return self._sampler.decode(latents, self.timings)[0]

    def velocity(
        self,
        latents: np.ndarray,
        prompts: Sequence[str],
        timestep: float,
        guidance_scale: float,
        transformer: str = "transformer",
        inputs: Inputs | None = None,
    ) -> np.ndarray:
        """The model's guided output at these latents, for comparing it with another implementation.

        Args:
            latents: float32 (B, C, T, h, w).
            prompts: positive, and with guidance negative.
            timestep: in training timesteps, 0 to 1000.
            guidance_scale: unused without guidance.
            transformer: which expert.
            inputs: images and videos, for one window.

        Returns:
            float32 of latents' shape, as exact as the dtype that the profile keeps latents in. A frame that
            is held has no velocity.
        """
        segment, embeddings = Segment(transformer, 0, 1, guidance_scale), self.encode_prompts(prompts)
        table, conditions = velocity_table(timestep), self._conditioning(inputs, timings=Timings())
        run = Denoising(table, [segment], embeddings, self._loop, Timings())
        return latents - self._expert_loop(run, latents, conditions)

    def image_tokens(self, inputs: Inputs) -> np.ndarray:
        """What the image encoder makes of the images: (N, tokens, image_dim) in the compute dtype."""
        return np.asarray(self._conditioning(inputs, timings=Timings()).prepare["image_tokens"])

    def warmup(self) -> None:
        """Executes every program once, and with every expert, so that the first request pays for nothing new.

        Of the two forms of the loop, the one that ``load`` was given. The text encoder is left out where
        ``load`` was told the prompts and had all their embeddings.
        """
        with self.timings.phase("warmup"):
            if self._text_expected:
                self._backend.warm_up()
                self._spare_text_encoder()
            prompts = 2 if self.profile.guidance else 1
            embeddings = np.zeros((prompts, self._tokenizer.max_length, self._width), self._dtype)
            noise, table = initial_noise(0, self.latents_shape), velocity_table(500.0)
            conditions = self._conditioning.blank()
            # Each expert, not those that some boundary and shift choose; the one that is next to run is last.
            for expert in sorted(self._transformers, key=lambda name: name == self._first_expert):
                run = Denoising(table, [Segment(expert, 0, 1, 1.0)], embeddings, self._loop, Timings())
                latents = self._expert_loop(run, noise, conditions)
            self.decode(latents[:1])

    def generate(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        media: Media | None = None,
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        on_step: OnStep = lambda step, total: None,
        **options: Any,
    ) -> Result:
        """Generates the profile's number of videos for one prompt.

        Args:
            prompt: what to show.
            negative_prompt: what to avoid; the manifest's default where None. Unused without guidance.
            media: the images and videos that the model takes, as files or in memory.
            inputs: the same read already, by ``load_media``; given again as they are, they are not encoded
                again.
            latents: initial noise instead of the seed's, float32 (B, C, T, h, w).
            on_step: told after each call how many of how many steps are done.
            options: fields of ``Request`` by name, such as ``seed`` and ``num_steps``; None is the default.
                Media are files there.

        Raises:
            UsageError: for an option that is unknown, out of range, or without effect, latents of a wrong
                shape, or images and videos that are missing, not taken, or cannot be used.
            ArtifactError: if the profile is not built with this form of the loop.
            WanError: if the latents are not finite.
        """
        named = {"prompt": prompt, "negative_prompt": negative_prompt, "loop": self._loop, **options}
        request = read_request([item for item in named.items() if item[1] is not None], Request)
        segment_overlap = request.segment_overlap
        inputs = self._conditioning.read(media, inputs, segment_overlap, self.timings)
        if inputs is not None and self.manifest.model["task"] == "animate":
            request = structs.replace(request, segment_overlap=inputs.segment_overlap)
        if options.keys() & {"size", "num_frames", "num_videos"}:
            wanted = choose_profile(self.manifest, self.artifact, request)
            if (wanted.width, wanted.height, wanted.num_frames) != self._shape:
                raise UsageError(
                    "this pipeline has another profile", expected=self.profile.name, found=wanted.name
                )
        options = resolve_options(self.manifest, self.profile, request)
        table, segments = schedule(options, self.manifest)
        if latents is not None:
            check_latents(latents, self.latents_shape)
        prompts = [prompt, options["negative_prompt"]] if self.profile.guidance else [prompt]
        embeddings = self.encode_prompts(prompts)
        run = Denoising(
            table, segments, embeddings, options["loop"], self.timings, self._load_behind, on_step
        )
        frames, final = self._sampler(run, options, inputs, latents)
        facts = {**options, **(inputs.facts if inputs else {}), "num_frames": frames.shape[1]}
        if self.manifest.model["task"] == "animate":
            facts["segment_frames"] = self.profile.num_frames
        return Result(frames, final, {**facts, "content_digest": self.manifest.content_digest}, self.timings)

    def _load_behind(self) -> None:
        """Asks for what comes after the last step, and raises what has failed of it."""
        unfinished(self._programs.request(programs=["decode_video"], components=["vae"]))

    def close(self) -> None:
        """Lets go of weights and executables."""
        self._last.forget()
        self._backend.release()
        self._executables.close()
        self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    artifact: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    num_frames: int | None = None,
    num_videos: int = 1,
    guidance: bool | None = None,
    target: str | None = None,
    prompts: Sequence[str] | None = None,
    timings: Timings | None = None,
    warn: Tell = _silent,
    report: Tell = _silent,
    num_references: int = 0,
    inputs: Inputs | None = None,
    **loading: Any,
) -> Pipeline:
    """Loads one profile of an artifact until its first step could run; the VAE follows later.

    Args:
        artifact: the artifact's folder.
        size: (width, height) in pixels; the first built profile's where None.
        num_frames: frames; the first built profile's where None.
        num_videos: videos per prompt.
        guidance: whether classifier-free guidance is on; as the model is published where None.
        target: a target's name; the one that matches this machine where None.
        prompts: the prompts, negative ones too, that are going to be used: they are encoded meanwhile, and
            the text encoder is not read if all their embeddings are at hand. None: any may come.
        timings: where to record what it took.
        warn: told what does not stop the run but should be known.
        report: told what was decided: where two experts are kept.
        num_references: reference images of a VACE model.
        inputs: the images and videos that are going to be used first, which are encoded meanwhile.
        loading: fields of ``LoadPolicy``.

    Raises:
        ArtifactError: if the artifact is damaged, was built for another machine, or has no such profile.
        UsageError: for a choice that there is not, or a text encoder or weights that cannot be had.
    """
    folder, how = Path(artifact).resolve(), LoadPolicy(**loading)
    if timings is None:
        timings = Timings()
    with timings.phase("manifest"):
        manifest = read_manifest(folder)
        if guidance is None:
            guidance = has_guidance(manifest)
        profile = select_profile(manifest, folder, size, num_frames, num_videos, guidance, num_references)
        selected = select_target(manifest, profile, target, how.allow_compile)
    pipeline = Pipeline(folder, manifest, profile, selected, how, timings, warn, report)
    try:
        pipeline.start(prompts, inputs)
    except BaseException:
        pipeline.close()
        raise
    return pipeline
