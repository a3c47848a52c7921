"""The programs of a profile by what they do in the making of a video."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wanrun.artifact.model import Chunking, Model
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import RoleName
from wanrun.denoising.state import State
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.generation.decoding import Clips, LatentDecoder, Take
from wanrun.generation.streamed import StreamedStep
from wanrun.timing.timings import Timings
from wanrun.weights.bound_programs import Programs


class ProfilePrograms:
    """A profile's programs by what they do: functions that make steps, and decoders."""

    def __init__(self, programs: Programs, profile: Profile, model: Model) -> None:
        self.programs, self.profile, self.model = programs, profile, model

    def maker(self, role: RoleName, shape: Sequence[int] = ()) -> str:
        """Returns the program of a role that makes steps: of several, that of latents of this shape."""
        names = self.programs.with_role(role)
        shapes = {name: self.programs[name].array("latents")[1] for name in names if len(names) > 1}
        return next((name for name, own in shapes.items() if tuple(own) == tuple(shape)), names[0])

    def makers(
        self, run: Denoising, steps: ExpertRange, state: State, constant: Mapping[str, Any]
    ) -> dict[RoleName, Callable[..., State]]:
        """Returns the functions that make an expert's steps from a state, by role.

        ``constant`` is what every step takes; where layers pass through the device, the functions have it.
        """
        makers: dict[RoleName, Callable[..., State]] = {}
        for role in dict.fromkeys(map(run.maker_of, range(steps.first, steps.last))):
            if run.form.streams:
                makers[role] = StreamedStep(self.programs, steps.transformer, constant, run.loras)
            else:
                name = self.maker(role, state["latents"].shape)
                makers[role] = self.programs.of_expert(name, steps.transformer, run.loras)
        if run.blending is None:
            return makers
        return {role: run.blending.blended(maker, tuple(state)) for role, maker in makers.items()}

    @property
    def chunks(self) -> Chunking:
        """How the model cuts a video into chunks."""
        assert self.model.chunks is not None
        return self.model.chunks

    @property
    def alone(self) -> bool:
        """Whether chunks are decoded one by one, as if each were a video."""
        return self.model.chunks is not None and self.model.chunks.alone

    @property
    def of_any_length(self) -> bool:
        """Whether the programs make and decode videos of any length."""
        return self.model.chunks is not None and not self.alone

    def decode(
        self, latents: np.ndarray, timings: Timings, decoder: str | None = None
    ) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Decodes latents to frames, uint8 (B, F, H, W, 3); for arguments and outputs see ``decode_to``."""
        made = self.decode_to(clips := Clips(), latents, timings, decoder)
        return clips.joined(latents, self.profile), made

    def decode_to(
        self, take: Take, latents: np.ndarray, timings: Timings, decoder: str | None = None
    ) -> Mapping[str, Any]:
        """Decodes latents, one video at a time; ``take`` gets frames while later ones are decoded.

        ``latents`` are normalised, float32 (B, C, T, h, w), without the leading latent frames. T is the
        profile's; or any, where the decoder makes a video piece by piece. What ``take`` raises ends the
        decoding. Returns all outputs of the last call of a program, on the device.
        """
        decode, times = LatentDecoder(self.programs, decoder), latents.shape[2]
        count = 1 if self.model.chunks is None else self.model.chunks.videos(times)
        each = count + (times - count) * self.model.vae_temporal  # each of them begins with one frame
        with timings.phase("decode", f"{len(latents) * each} frames"):
            for video, one in enumerate(latents):
                for part in np.split(one, count, axis=1):
                    for frames in decode(part):
                        take(video, frames)
        return decode.made
