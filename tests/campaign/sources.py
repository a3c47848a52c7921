"""What a campaign damages: toys, and small artifacts made of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaign.fault import Call
from wanbuild.cli import wanbuild
from wancli.console import run

STEPS = ("--steps", "2", "--guidance-scale", "5", "--flow-shift", "3", "--solver", "unipc", "--seed", "7")
"""Every number is given, so that no default of a manifest decides."""

STORED = ("--weights-dtype", "float32", "--text-weights-dtype", "float32")
"""As ``build_artifact`` stores weights."""


@dataclass
class Sample:
    """One artifact and what it was made of.

    Attributes:
        checkpoint: a toy.
        artifact: made of it, with one profile.
        media: options that a generation needs besides the prompt.
        other: the same toy with other weights.
        video: bytes of the video that the artifact gives.
        other_video: bytes of the video with the other weights.
    """

    checkpoint: Path
    artifact: Path
    media: Sequence[str] = ()
    other: Path | None = None
    video: bytes = b""
    other_video: bytes = b""

    def generation(self, artifact: Path, output: Path, *options: str) -> list[str]:
        """Arguments of ``wanrun`` for the one video."""
        prompts = ("--prompt", "a fox in the snow", "--negative-prompt", "blurred")
        return ["--artifact", str(artifact), *prompts, *self.media, *STEPS, "--output", str(output), *options]

    def run(self, artifact: Path, output: Path, *options: str, codes: Sequence[int] = (0,)) -> Call:
        """The call of ``generation``."""
        checked = output if output.suffix == ".npy" else None
        return Call("wanrun", self.generation(artifact, output, *options), frozenset(codes), checked)

    def convert(
        self, artifact: Path, *options: str, codes: Sequence[int] = (0,), other: bool = False
    ) -> Call:
        """Converts the toy, or the one with other weights, such that programs stay valid."""
        source = self.other if other and self.other is not None else self.checkpoint
        arguments = ["convert", str(source), "--artifact", str(artifact), *STORED, *options]
        return Call("wanbuild", arguments, frozenset(codes))


@dataclass
class Sources:
    """All that is copied and damaged.

    Attributes:
        samples: artifacts.
        checkpoints: toys of more variants, which are converted alone.
        small: a folder on a small file system, where one could be mounted.
    """

    samples: Sequence[Sample]
    checkpoints: Sequence[Path] = field(default_factory=tuple)
    small: Path | None = None


def make_samples(folder: Path, variants: Sequence[str]) -> list[Sample]:
    """Makes toys and their artifacts, small enough to be copied for each fault, where they are missing."""
    from helpers.artifacts import build_artifact

    samples = []
    for variant in variants:
        checkpoint, artifact = toy(folder, variant), folder / f"artifact-{variant}"
        if not artifact.exists():
            with contextlib.redirect_stdout(sys.stderr):
                build_artifact(checkpoint, artifact, size=(64, 32), num_frames=5)
        samples.append(Sample(checkpoint, artifact, media_of(variant, checkpoint), toy(folder, variant, 1)))
    return samples


def toy(folder: Path, variant: str, seed: int = 0) -> Path:
    """A toy of a variant with its media, made where it is missing."""
    checkpoint = folder / f"checkpoint-{variant}-{seed}"
    if not checkpoint.exists():
        arguments = ["toy", str(checkpoint), "--variant", variant, "--seed", str(seed)]
        with contextlib.redirect_stdout(sys.stderr):
            assert run(wanbuild, arguments) == 0
    return checkpoint


def media_of(variant: str, checkpoint: Path) -> tuple[str, ...]:
    """The options that give a variant the toy's media."""
    media = checkpoint / "media"
    image, last = ("--image", str(media / "image.png")), ("--last-image", str(media / "last_image.png"))
    return {
        "wan2.1-i2v": image,
        "wan2.2-i2v": image,
        "wan2.2-ti2v": image,
        "wan2.1-flf2v": (*image, *last),
        "wan2.1-vace": ("--video", str(media / "video"), "--mask", str(media / "mask")),
        "wan2.2-animate": (
            *(*image, "--pose-video", str(media / "pose_video")),
            *("--face-video", str(media / "face_video")),
        ),
    }.get(variant, ())
