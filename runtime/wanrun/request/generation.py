"""One video to make: a request with everything that an artifact's manifest decides about it."""

from __future__ import annotations

__all__ = ["Generation", "deciding_facts", "influences_of"]

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wanrun import __version__
from wanrun.artifact.cost import Cost, cost_of
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import MediaOption
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import Counts
from wanrun.artifact.task import Input
from wanrun.denoising.blending import Blending
from wanrun.denoising.latents import latent_frames, latents_shape
from wanrun.denoising.noise import clip_seed
from wanrun.denoising.solvers import SolverTable
from wanrun.denoising.steps import ExpertRange, opening, schedule
from wanrun.errors import UsageError, wrong_type
from wanrun.files import sha256_of
from wanrun.media.inputs import Inputs, Media, is_given
from wanrun.media.windows import joined_frames, num_windows
from wanrun.opened.cancel import CancelToken
from wanrun.request.adapters import ChosenLora
from wanrun.request.options import clip_prompts


@dataclass(frozen=True, eq=False)
class Generation:
    """A resolved request: every default is filled in, and everything is checked that needs no file.

    Only ``wanrun.request.resolve`` makes it, from a request and a manifest.

    Attributes:
        manifest: the artifact's manifest.
        profile: the built profile that makes the video.
        options: the options by name, with all defaults, as the metadata has them.
        table: the solver's timesteps and coefficients.
        ranges: the steps of each expert, in order.
        fps: frames per second of the video file.
        media: images and videos to read before the first step; None if there are none to read.
        loras: the chosen LoRAs, in the order of the request.
        warnings: problems of the request that do not keep the video from being made, one line each.
    """

    manifest: Manifest = field(repr=False)
    profile: Profile
    options: Mapping[str, Any]
    table: SolverTable = field(repr=False)
    ranges: tuple[ExpertRange, ...]
    fps: float
    media: Media | None
    loras: tuple[ChosenLora, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt, those of later clips, and the negative one if a step has guidance, or NAG is on."""
        avoids = "nag_scale" in self.options or any(part.guided for part in self.ranges)
        negative = [self.options["negative_prompt"]] if avoids else []
        return self.options["prompt"], *clip_prompts(self.options), *negative

    def on_own_grid(self) -> Generation:
        """Returns the generation with the solver's own steps, as many; a distilled model has others."""
        explicit = ("timesteps", "coefficients")
        options = {name: value for name, value in self.options.items() if name not in explicit}
        table, ranges = schedule(options, self.manifest)
        return replace(self, options=options, table=table, ranges=ranges)

    def probe_media(self, *, cancel: CancelToken | None = None) -> None:
        """Checks the images and videos by their headers and first frames; ``read_media`` sees the rest.

        Args:
            cancel: ends the call, and the processes that decode.

        Raises:
            CancelledError: once the token is cancelled.
            UsageError: for an image or video that cannot be read or does not fit the profile.
        """
        if self.media is not None:
            from wanrun.media.prepare import probe_media  # imports Pillow

            probe_media(self.manifest, self.profile, self.media, cancel=cancel)

    def read_media(self, *, cancel: CancelToken | None = None) -> Inputs | None:
        """Returns the images and videos as arrays; None if there are none to read.

        Args:
            cancel: ends the call, and the processes that decode.

        Raises:
            CancelledError: once the token is cancelled.
            UsageError: for an image or video that cannot be read or does not fit the profile.
        """
        if self.media is None:
            return None
        from wanrun.media.prepare import load_media  # imports Pillow

        return load_media(self.manifest, self.profile, self.media, cancel=cancel)

    @property
    def clips(self) -> int:
        """The clips of the video, each with the profile's frames; the first of a later one is left out."""
        return int(self.options.get("clips", 1))

    @property
    def blending(self) -> Blending | None:
        """The windows of a video of more frames than the profile has, which are blended, or None."""
        if "window_frames" not in self.options:
            return None
        total, length = (
            latent_frames(self.manifest, self.options[name]) for name in ("num_frames", "window_frames")
        )
        return Blending(total, length, self.options["window_overlap"] // self.manifest.model.vae_temporal)

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the initial latents, with frames of reference images."""
        shape = latents_shape(self.manifest, self.profile, self.options["num_frames"])
        batch, channels, frames, height, width = shape
        return batch, channels, sum(self.chunks) or frames, height, width

    @property
    def chunks(self) -> tuple[int, ...]:
        """Latent frames of each chunk that the video is made in; none of a model that makes it at once."""
        manifest, chunks = self.manifest, self.manifest.model.chunks
        frames = (self.options["num_frames"], self.profile.num_frames)
        return () if chunks is None else chunks.lengths(*(latent_frames(manifest, one) for one in frames))

    @property
    def other_frames(self) -> int | None:
        """The frames of a video that is made in chunks, if they are not the profile's."""
        frames = int(self.options["num_frames"])
        return frames if self.chunks and frames != self.profile.num_frames else None

    @property
    def in_parts(self) -> bool:
        """Whether finished frames can be kept in a folder while later ones are made."""
        return self.clips > 1 or (self.blending is not None and self.profile.num_videos == 1)

    def metadata(self, inputs: Inputs | None, influences: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metadata of the videos, except each video's number.

        Args:
            inputs: the images and videos that were read, of which only the facts are used.
            influences: further facts that decide the result, such as the digest of given initial latents.
        """
        facts, counts = dict(influences), self.counts(inputs)
        if inputs is not None:
            # "video" in the metadata is the number of the result, so the option's file is "video_file".
            facts |= {"video_file" if name == "video" else name: fact for name, fact in inputs.facts.items()}
            if inputs.num_frames is not None:  # the profile's num_frames are those of a window
                facts |= {"num_frames": inputs.num_frames, "segment_frames": self.profile.num_frames}
        if self.clips > 1:
            seeds = [clip_seed(self.options["seed"], clip) for clip in range(self.clips)]
            facts |= {"num_frames": counts.frames, "clip_frames": self.profile.num_frames}
            facts |= {"clip_seeds": seeds}
        if self.other_frames is not None:
            facts |= {"profile_frames": self.profile.num_frames}
        if "latents_sha256" in facts and counts.rounds == 1:
            facts["seed"] = None  # the latents replace the noise of the first window, which is the only one
        return {
            **self.options,
            "content_digest": self.manifest.content_digest,
            "fps": self.fps,
            "num_videos": self.profile.num_videos,
            "wanrun": __version__,
            **({"merged_loras": [lora.facts for lora in self.manifest.loras]} if self.manifest.loras else {}),
            **facts,
        }

    def _conditioned(self, inputs: Inputs | None) -> bool:
        """Whether images or videos are given that steps take: any but those that they begin with."""
        task = self.manifest.model.task
        if "strength" not in self.options and not task.past:
            return inputs is not None or self.media is not None
        return self._first_given(task.conditions, inputs) is not None

    def _first_given(self, items: Mapping[MediaOption, Input], inputs: Inputs | None) -> Input | None:
        """Returns the first of some inputs that is given; None for none."""
        if inputs is not None:
            return next((item for item in items.values() if item.array in inputs.arrays), None)
        media = self.media or Media()
        return next((item for name, item in items.items() if is_given(media, name)), None)

    def _past(self, inputs: Inputs | None) -> int:
        """Returns the parts that are encoded of what the video goes on after; the most of an unread one."""
        model = self.manifest.model
        if (item := self._first_given(model.task.past, inputs)) is None or model.chunks is None:
            return 0
        if inputs is not None:
            chunks = len(inputs.arrays[item.array]) // model.chunk_frames
        else:
            chunks = -(-item.past // model.chunks.each) if item.kind == "video" else 1
        return 1 + max(chunks, 1)

    def _given_chunks(self, inputs: Inputs | None) -> int:
        """Returns how many chunks images and videos stand for; 0 for those of a video that was not read."""
        model, frames = self.manifest.model, 0
        if model.chunks is None or model.task.held is None:
            return 0
        for name, item in model.task.inputs.items():
            if item.count is not None and inputs is not None:
                frames = int(inputs.arrays.get(item.count, 0))
            elif item.kind == "image" and is_given(self.media or Media(), name):
                frames = 1
        return model.chunks.within(latent_frames(self.manifest, frames)) if frames else 0

    def counts(self, inputs: Inputs | None = None) -> Counts:
        """Returns how often each thing is done. Inputs that were read may decide frames and windows."""
        blending, length, chunks = self.blending, self.profile.num_frames, self.manifest.model.chunks
        if chunks is not None:
            length = self.options["num_frames"]
        windows, frames = self.clips, joined_frames(self.clips, length, 1)
        if blending is not None:
            windows, frames = len(blending.starts), self.options["num_frames"]
        elif inputs is not None and inputs.num_frames is not None:
            frames = inputs.num_frames
            windows = num_windows(frames, length, inputs.segment_overlap)
        first = opening(self.options, self.manifest)
        latents, given = sum(self.chunks) or latent_frames(self.manifest, length), self._given_chunks(inputs)
        decoded = 1 if chunks is None else chunks.videos(latents)
        return Counts(
            form=self.options["loop"],
            steps=len(self.table.timesteps),
            guided=sum(part.guided for part in self.ranges),
            skipping=sum(part.skipping for part in self.ranges),
            experts=len(self.ranges),
            windows=windows,
            longer=0 if first is None or given else len(first[0].timesteps) - len(self.table.timesteps),
            known=self.manifest.model.task.windows is None or inputs is not None,
            prompts=len(self.prompts),
            videos=self.profile.num_videos,
            # A later clip begins with the last frame of the one before.
            media=windows if self._conditioned(inputs) else self.clips - 1,
            starts="strength" in self.options,
            past=self._past(inputs),
            noise=bool(self.table.noise.any()),
            decoder=self.options.get("decoder", "full"),
            frames=frames,
            latents=latents // decoded,
            decoded=decoded,
            blended=0 if blending is None else blending.total,
            chunks=self.chunks[given:] if chunks is not None else (0,),
            given=given,
        )

    def cost(self, inputs: Inputs | None = None) -> Cost:
        """Returns the generation's cost; inputs as for ``counts``."""
        return cost_of(self.counts(inputs), self.manifest, self.profile)


def deciding_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata as read from a file, without wanrun's version and the artifact's address and LoRAs."""
    plain = json.loads(json.dumps(dict(metadata), default=str))
    for key in ("wanrun", "artifact", "merged_loras"):  # those are a part of the content digest
        plain.pop(key, None)
    return dict(plain)


def check_resolved(generation: object, manifest: Manifest) -> None:
    """Raises UsageError if it is not a generation, or one of another artifact."""
    if not isinstance(generation, Generation):
        raise wrong_type("generation", "wanrun's Generation", generation)
    if generation.manifest.content_digest != manifest.content_digest:
        raise UsageError(
            "changed",
            "the generation was resolved for another artifact",
            expected=manifest.content_digest,
            found=generation.manifest.content_digest,
            remedy="resolve it with this pipeline",
        )


def influences_of(latents: np.ndarray | None, name: str | None = None) -> dict[str, Any]:
    """Returns the facts that decide a video besides its prompt's own options, for its metadata.

    Args:
        latents: the given initial latents, float32 (B, C, T, h, w), or None.
        name: their file's name; None for latents in memory.
    """
    if latents is None:
        return {}
    return {"latents": name, "latents_sha256": sha256_of(latents.tobytes())}
