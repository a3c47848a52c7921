"""The state after a step, for ``on_step``: the latents, and a small preview of the video."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.denoising.latents import leading_latents
from wanrun.denoising.state import State
from wanrun.errors import UsageError

SHRUNK = 4
"""How many times smaller a decoded preview is than the frame."""


@dataclass(frozen=True)
class TinyDecoder:
    """The tiny decoder of a video that is made with it.

    ``decode`` takes latents (1, C, T, h, w) to frames, uint8 (1, F, H, W, 3). ``steps`` is its work, by the
    compiler's count, in steps.
    """

    decode: Callable[[np.ndarray], np.ndarray]
    steps: float


@dataclass(frozen=True, repr=False)
class Step:
    """The state after a step. It can only be looked at inside ``on_step``: the next step overwrites it.

    Attributes:
        tiny: what ``decoded`` needs; None for a video that another decoder makes.
    """

    state: State
    manifest: Manifest
    profile: Profile
    tiny: TinyDecoder | None = None

    @property
    def latents(self) -> np.ndarray:
        """The video's latents, with the noise that is left: float32 (B, C, T, h, w), a copy."""
        return self.all_latents[:, :, self._leading :]

    @property
    def clean(self) -> np.ndarray:
        """The final latents that the model expects: float32 (B, C, T, h, w), a copy."""
        return self.all_clean[:, :, self._leading :]

    @property
    def all_latents(self) -> np.ndarray:
        """``latents`` with the latent frames in front, such as those of reference images, a copy."""
        return self._copy(self.state["latents"])

    @property
    def all_clean(self) -> np.ndarray:
        """``clean`` with the latent frames in front, a copy."""
        return self._copy(self.state["history"]["m1"])

    @property
    def _leading(self) -> int:
        return leading_latents(self.manifest, self.profile)

    def preview(self, video: int = 0) -> np.ndarray:
        """Returns a small picture of each latent frame, uint8 (T, h, w, 3).

        It is a linear map of ``clean``, fitted to the artifact's VAE by ``wanbuild compile``.

        Args:
            video: number of the video, of those of one prompt.

        Raises:
            UsageError: if the artifact has no such map.
        """
        if not self.manifest.colours:
            raise UsageError(
                "unsupported",
                "there is no preview of this model",
                expected="a map from latents to colours in the manifest",
                remedy="run wanbuild compile again, where its weights are",
            )
        *colours, grey = np.array(self.manifest.colours, np.float32)
        picture = np.tensordot(self.clean[video], np.array(colours), (0, 0)) + grey
        return np.rint(picture).clip(0, 255).astype(np.uint8)

    def decoded(self, video: int = 0) -> np.ndarray:
        """Returns a smaller frame of each latent frame by the tiny decoder, uint8 (T, H / 4, W / 4, 3).

        The device decodes the whole video for it.

        Args:
            video: number of the video, of those of one prompt.

        Raises:
            UsageError: if the video is not made by the tiny decoder.
        """
        if self.tiny is None:
            raise UsageError(
                "unsupported",
                "there is no decoded preview",
                expected="a video of the tiny decoder",
                remedy="make it with decoder tiny, or call preview",
            )
        (frames,) = self.tiny.decode(self.clean[video : video + 1])
        chosen = frames[:: self.manifest.model.vae_temporal]
        count, height, width, _ = chosen.shape
        cells = chosen.reshape(count, height // SHRUNK, SHRUNK, width // SHRUNK, SHRUNK, 3)
        return np.rint(cells.mean((2, 4))).astype(np.uint8)

    def _copy(self, array: Any) -> np.ndarray:
        try:
            return np.array(array, np.float32)  # a CPU array would share the memory of the device's
        except RuntimeError as error:
            raise UsageError(
                "closed",
                "the latents of this step are gone",
                found=error,
                remedy="look at them inside on_step",
            ) from None


OnStep = Callable[[int, int], None] | Callable[[int, int, Step], None]
"""Gets the number of steps done, the total, and the ``Step`` if it has a third parameter without default."""


def telling(
    on_step: OnStep,
    manifest: Manifest,
    profile: Profile,
    tiny: TinyDecoder | None,
    check: Callable[[], object],
) -> Callable[[int, int, State], None]:
    """Returns a function of a state that calls ``on_step`` with what it takes, and then ``check``.

    Raises UsageError if it takes neither two arguments nor three.
    """
    if (needed := _needed(on_step)) == 3:
        whole = cast(Callable[[int, int, Step], None], on_step)

        def with_step(done: int, total: int, state: State) -> None:
            whole(done, total, Step(state, manifest, profile, tiny))
            check()

        return with_step
    if needed > 3:
        raise UsageError(
            "wrong_type",
            "on_step takes too many or too few arguments",
            expected="a function of (done, total) or of (done, total, step)",
        )
    counts = cast(Callable[[int, int], None], on_step)

    def without_step(done: int, total: int, state: State) -> None:
        counts(done, total)
        check()

    return without_step


def _needed(function: Callable[..., None]) -> int:
    """Returns with how many arguments a function is called: two, unless it needs a third one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python does not know it
        return 2
    for count in (2, 3):
        with suppress(TypeError):
            signature.bind(*range(count))
            return count
    return 4
