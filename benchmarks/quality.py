"""Measures what each choice costs in quality, on a tiny checkpoint that has learned to draw moving shapes.

Every choice makes the same videos: of fixed captions, more than half of which combine words as no training
video did, each from several seeds. Printed are

- ``score``: the share of a caption's facts that a judge finds in the video (``tinywan.judge``), of all
  captions and of those held out;
- PSNR, SSIM and GMSD (a perceptual distance without weights, Xue et al. 2014) of the frames against those of
  the float32 run with UniPC and 30 steps. PSNR is of all frames together; the others are means.

    PYTHONPATH=training python benchmarks/quality.py [--variant wan2.1-t2v] [--captions 64] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tinywan.judge import judge
from tinywan.yardstick import captions, first_frame, gmsd, psnr, ssim

import wanrun
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.programs.compile import CompileRequest, compile_artifact
from wanbuild.programs.options import BuildOptions

TINY = Path(__file__).parents[1] / "artifacts" / "tiny"
SIZE, FRAMES, STEPS = (96, 64), 17, 30
BF16, F32 = "bfloat16", "float32"
PARTS = ("transformer", "text_encoder", "vae")
DTYPES = ("dtype", "vae_dtype", "scheduler_dtype")


@dataclass(frozen=True)
class Built:
    """How an artifact is made.

    Args:
        weights: the components stored in bfloat16; others are float32.
        dtypes: the options of ``wanbuild compile`` that are bfloat16; others are float32.
    """

    weights: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """How a video is made.

    Args:
        built: the artifact.
        options: of ``Pipeline.generate``, beside caption, seed and 30 steps.
        load: of ``wanrun.load``.
    """

    built: Built = Built()
    options: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)


DEFAULT = Built(("transformer", "text_encoder"), ("dtype",))
CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "float32": Choice(),
        "--weights-dtype bfloat16": Choice(Built(("transformer",))),
        "--text-weights-dtype bfloat16": Choice(Built(("text_encoder",))),
        "--vae-weights-dtype bfloat16": Choice(Built(("vae",))),
        "--dtype bfloat16": Choice(Built((), ("dtype",))),
        "--vae-dtype bfloat16": Choice(Built((), ("vae_dtype",))),
        "--scheduler-dtype bfloat16": Choice(Built((), ("scheduler_dtype",))),
        "default dtypes": Choice(DEFAULT),
        "everything bfloat16": Choice(Built(PARTS, DTYPES)),
        "default, --loop scan": Choice(DEFAULT, load={"loop": "scan"}),
        "default, torch text encoder": Choice(DEFAULT, load={"text_encoder": "torch"}),
        **{
            f"float32, {solver}, {steps} steps": Choice(options={"solver": solver, "num_steps": steps})
            for solver in ("unipc", "dpm++", "euler")
            for steps in (4, 10, 20, 30, 50)
            if (solver, steps) != ("unipc", STEPS)
        },
        **{
            f"default, guidance {scale:g}": Choice(DEFAULT, {"guidance_scale": scale})
            for scale in (1.0, 2.0, 3.0, 7.0)
        },
    }
)
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Figures:
    """What is measured of a choice; the distances are None for the first."""

    score: float
    held_out: float
    psnr_db: float | None
    ssim: float | None
    gmsd: float | None
    seconds: float


def build(variant: str, built: Built, folder: Path) -> Path:
    """Makes an artifact if it is not there; returns its folder."""
    artifact = folder / "-".join([variant, *built.weights, *built.dtypes])
    if not artifact.exists():
        weights = {part: BF16 if part in built.weights else F32 for part in PARTS}
        convert(ConvertRequest(TINY / variant, artifact, weights))
        options = BuildOptions(**{name: BF16 if name in built.dtypes else F32 for name in DTYPES})
        compile_artifact(CompileRequest(artifact, ["cpu"], [SIZE], [FRAMES], options=options), lambda _: None)
    return artifact


def videos(
    artifact: Path, choice: Choice, texts: Sequence[str], seeds: int, image: bool
) -> Iterator[np.ndarray]:
    """Yields uint8 (T, H, W, 3) of every caption and seed."""
    settings = {"num_steps": STEPS, **choice.options}
    guided = settings.get("guidance_scale", 2.0) > 1
    load = {"loop": "step", "embeddings": "none", "guidance": guided, **choice.load}
    with wanrun.load(artifact, size=SIZE, num_frames=FRAMES, **load) as pipeline:
        for seed, text in ((seed, text) for text in texts for seed in range(seeds)):
            media = wanrun.Media(image=first_frame(text, seed)) if image else None
            yield pipeline.generate(text, seed=seed, media=media, **settings).frames[0]


def figures(
    made: np.ndarray,
    expected: np.ndarray | None,
    texts: Sequence[tuple[str, bool]],
    seeds: int,
    seconds: float,
) -> Figures:
    """Judges and compares the videos of a choice."""
    every = [text for text in texts for _ in range(seeds)]
    scores = np.array([judge(video, text).score for video, (text, _) in zip(made, every, strict=True)])
    new = np.array([held_out for _, held_out in every])
    pairs = [] if expected is None else list(zip(made, expected, strict=True))
    return Figures(
        float(scores.mean()),
        float(scores[new].mean()),
        None if expected is None else psnr(made, expected),
        float(np.mean([ssim(*pair) for pair in pairs])) if pairs else None,
        float(np.mean([gmsd(*pair) for pair in pairs])) if pairs else None,
        seconds,
    )


def row(name: str, found: Figures) -> str:
    """Returns a line of the table."""
    distances = ("", "", "")
    if found.psnr_db is not None:
        distances = (f"{found.psnr_db:.1f}", f"{found.ssim:.4f}", f"{found.gmsd:.4f}")
    return f"| {name} | {found.score:.3f} | {found.held_out:.3f} | {' | '.join(distances)} |"


def measure(variant: str, folder: Path, options: argparse.Namespace) -> dict[str, Figures]:
    """Prints the table of a variant, line by line."""
    texts = captions()[: options.captions]
    print(f"\n{variant}: {len(texts)} captions, {options.seeds} seeds\n")
    print("| | score | held out | PSNR dB | SSIM | GMSD |\n|---|---|---|---|---|---|")
    expected, found = None, {}
    for name, choice in CHOICES.items():
        if options.choice and name not in options.choice and expected is not None:
            continue
        begun = time.monotonic()
        artifact = build(variant, choice.built, folder)
        made = np.stack(
            list(videos(artifact, choice, [text for text, _ in texts], options.seeds, "i2v" in variant))
        )
        found[name] = figures(made, expected, texts, options.seeds, time.monotonic() - begun)
        expected = made if expected is None else expected
        print(row(name, found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(path.name for path in TINY.glob("wan*"))
    parser.add_argument("--variant", choices=known, action="append", help="all of them by default")
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--choice", choices=list(CHOICES), action="append", help="all of them by default")
    parser.add_argument("--folder", type=Path, help="of artifacts, kept and used again")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = {variant: measure(variant, folder, options) for variant in options.variant or known}
    print(
        json.dumps({name: {row: asdict(made) for row, made in rows.items()} for name, rows in found.items()})
    )


if __name__ == "__main__":
    main()
