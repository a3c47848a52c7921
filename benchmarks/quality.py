"""Measures what each choice costs in quality, on a tiny checkpoint that has learned to draw moving shapes.

Every choice makes the same videos: of fixed captions, more than half of which combine words as no training
video did, each from several seeds. Printed are

- ``score``: the share of a caption's facts that a judge finds in the video (``tinywan.judge``), of all
  captions and of those held out; ``motions``: the share of its motions;
- for image to video the PSNR of the first frames against those that were given;
- PSNR, SSIM and GMSD (a perceptual distance without weights, Xue et al. 2014) of the frames against those of
  the float32 run with UniPC and 30 steps. PSNR is of all frames together; the others are means.

The row ``diffusers`` needs the test extra. ``--random`` makes the videos with random weights and transformers
and VAE of the same sizes. They draw noise; so the row is left out, and only the distances mean something.

    PYTHONPATH=training python benchmarks/quality.py [--variant wan2.1-t2v] [--captions 64] [--seeds 2]

``--report FILE.html`` writes the tables as a page too, in which they can be sorted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from tinywan import checkpoint
from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.judge import judge
from tinywan.yardstick import captions, gmsd, psnr, ssim

import wanrun
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.conversion.chosen import parse_quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.models import convolution, vae_blocks
from wanbuild.targets import target
from wanbuild.toy.toy_checkpoint import write_toy
from wanreport.page import now, write_report
from wanreport.report import Cell, Column, Fact, Facts, Note, Report, Section, Table
from wanrun.artifact.manifest import TINY_VAE
from wanrun.claims import REPORT, Claims
from wanrun.errors import UsageError

STEPS = 30
BF16, F32 = "bfloat16", "float32"
PARTS = ("transformer", "text_encoder", "image_encoder", "vae")
ALIKE: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "transformer": (
            "num_layers",
            "num_attention_heads",
            "attention_head_dim",
            "ffn_dim",
            "added_kv_proj_dim",
        ),
        "vae": ("base_dim", "dim_mult", "num_res_blocks"),
    }
)
"""The sizes that random weights share with the trained ones."""
DTYPES = ("dtype", "vae_dtype", "scheduler_dtype")


@dataclass(frozen=True)
class Built:
    """How an artifact is made.

    Args:
        weights: the components stored in bfloat16; others are float32.
        dtypes: the options of ``wanbuild compile`` that are bfloat16; others are float32.
        quantise: ``--quantise``, and then the patterns of ``--keep``.
        target: of ``wanbuild compile``.
        tf32: whether the VAE multiplies as a GPU does in TF32: see ``vae_in_tf32``.
        tiny: whether there is a tiny decoder besides the VAE, ``checkpoint.TINY_VAE``.
    """

    weights: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    quantise: tuple[str, ...] = ()
    target: str = "cpu"
    tf32: bool = False
    tiny: bool = False


@dataclass(frozen=True)
class Choice:
    """How a video is made.

    Args:
        built: the artifact.
        options: of ``Pipeline.generate``, besides caption, seed and 30 steps.
        load: of ``wanrun.load``.
        reference: diffusers makes it, in float32, and the rest is not used.
    """

    built: Built = Built()
    options: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    reference: bool = False


DEFAULT = Built(("transformer", "text_encoder", "image_encoder"), ("dtype",))
CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "float32": Choice(),
        "diffusers": Choice(reference=True),
        "--weights-dtype bfloat16": Choice(Built(("transformer",))),
        "--text-weights-dtype bfloat16": Choice(Built(("text_encoder",))),
        "--vae-weights-dtype bfloat16": Choice(Built(("vae",))),
        "--dtype bfloat16": Choice(Built((), ("dtype",))),
        "--vae-dtype bfloat16": Choice(Built((), ("vae_dtype",))),
        "--vae-precision high on a GPU": Choice(Built(tf32=True)),
        "--scheduler-dtype bfloat16": Choice(Built((), ("scheduler_dtype",))),
        "--decoder tiny": Choice(Built(tiny=True), {"decoder": "tiny"}),
        "default dtypes": Choice(DEFAULT),
        "everything bfloat16": Choice(Built(PARTS, DTYPES)),
        "default, --loop scan": Choice(DEFAULT, load={"loop": "scan"}),
        **{
            f"default, --quantise {form}{''.join(f' --keep {pattern}' for pattern in keep)}": Choice(
                replace(DEFAULT, quantise=(form, *keep))
            )
            for form in ("int8", "float8")
            for keep in ((), ("text_encoder/*",), ("transformer/*",), ("*/attn?/*",))
        },
        **{
            f"default, --quantise {form} --target cpu-w8a8": Choice(
                replace(DEFAULT, quantise=(form,), target="cpu-w8a8")
            )
            for form in ("int8", "float8")
        },
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
    """What is measured of a choice; the distances are None for the first choice.

    Args:
        score: the mean share of a caption's facts that hold.
        held_out: likewise, of captions that are held out.
        motion: the mean share of a caption's motions that hold.
        first_frame_db: the PSNR of all first frames; None if none was given.
        psnr_db: of all frames.
        ssim: mean.
        gmsd: mean.
        seconds: that the videos took, with loading and without compiling.
    """

    score: float
    held_out: float
    motion: float
    first_frame_db: float | None
    psnr_db: float | None
    ssim: float | None
    gmsd: float | None
    seconds: float


def untrained(variant: str, folder: Path) -> Path:
    """Writes a checkpoint with random weights if it is not there; returns its folder."""
    target = folder / f"{variant}-untrained"
    if not target.exists():
        write_toy(target, variant, configs={part: _sizes(variant, part) for part in ALIKE})
    return target


def _sizes(variant: str, part: str) -> dict[str, Any]:
    trained = json.loads((checkpoint.FOLDER / variant / part / "config.json").read_text())
    return {name: trained[name] for name in ALIKE[part]}


def build(source: Path, built: Built, folder: Path) -> Path:
    """Makes an artifact of a checkpoint if it is not there; returns its folder."""
    quantised = [pattern.replace("/", "_").replace("*", "x") for pattern in built.quantise]
    names = ["artifact", source.name, built.target, *built.weights, *built.dtypes, *quantised]
    names += ["tf32"] * built.tf32 + ["tiny"] * built.tiny
    artifact = folder / "-".join(names)
    if not artifact.exists():
        weights = {part: BF16 if part in built.weights else F32 for part in PARTS}
        quantise = parse_quantise(*built.quantise[:1], built.quantise[1:]) if built.quantise else None
        files = {TINY_VAE: checkpoint.TINY_VAE} if built.tiny else {}
        convert(ConvertRequest(source, artifact, weights, files=files, quantise=quantise))
        options = BuildOptions(**{name: BF16 if name in built.dtypes else F32 for name in DTYPES})
        request = CompileRequest(
            artifact, [built.target], [(WIDTH, HEIGHT)], [FRAMES], [True, False], options=options
        )
        with vae_in_tf32() if built.tf32 else contextlib.nullcontext():
            compile_artifact(request, lambda _: None)
    return artifact


@contextlib.contextmanager
def vae_in_tf32() -> Iterator[None]:
    """Cuts the operands of a VAE's products to TF32's 10 bits of mantissa, in direct convolutions."""

    def cut(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32) if x.dtype == jnp.float32 else x

    class Cutting:
        def __getattr__(self, name: str) -> Any:
            own = getattr(jax.lax, name)
            if name not in ("conv_general_dilated", "dot_general"):
                return own
            return lambda a, b, *arguments, **options: own(cut(a), cut(b), *arguments, **options)

    with contextlib.ExitStack() as stack:
        for module in (convolution, vae_blocks):
            stack.enter_context(mock.patch.object(module, "lax", Cutting()))
        for name in ("CPU", "PLAIN_CPU"):
            direct = msgspec.structs.replace(getattr(target, name), convolution="direct")
            stack.enter_context(mock.patch.object(target, name, direct))
        yield


@dataclass(frozen=True)
class Exam:
    """The videos that every choice of a variant makes.

    Args:
        variant: its name.
        source: its checkpoint.
        captions: each with its seed, and whether it is held out.
        media: what is given with each of them.
    """

    variant: str
    source: Path
    captions: Sequence[tuple[str, int, bool]]
    media: Sequence[wanrun.Media | None]

    def figures(self, made: np.ndarray, expected: np.ndarray | None, seconds: float) -> Figures:
        """Judges and compares the videos of a choice.

        Args:
            made: uint8 (N, T, H, W, 3).
            expected: likewise, of the first choice; None for itself.
            seconds: that they took.
        """
        verdicts = [judge(video, text) for video, (text, _, _) in zip(made, self.captions, strict=True)]
        new = [
            verdict.score for verdict, (*_, held_out) in zip(verdicts, self.captions, strict=True) if held_out
        ]
        pairs = [] if expected is None else list(zip(made, expected, strict=True))
        return Figures(
            float(np.mean([verdict.score for verdict in verdicts])),
            float(np.mean(new)),
            float(np.mean([verdict.motion for verdict in verdicts])),
            self._first_frame_db(made),
            None if expected is None else psnr(made, expected),
            float(np.mean([ssim(*pair) for pair in pairs])) if pairs else None,
            float(np.mean([gmsd(*pair) for pair in pairs])) if pairs else None,
            seconds,
        )

    def _first_frame_db(self, made: np.ndarray) -> float | None:
        images = [np.asarray(media.image) for media in self.media if media is not None]
        return psnr(made[:, 0], np.stack(images)) if images else None


def videos(exam: Exam, choice: Choice, artifact: Path | None) -> Iterator[np.ndarray]:
    """Yields uint8 (T, H, W, 3) of every caption; its seed is the first frame's too if one is given.

    Args:
        exam: the captions.
        choice: how they are made.
        artifact: with what; None if the reference makes them.
    """
    if artifact is None:
        reference = checkpoint.Reference(exam.variant)
        for text, seed, _ in exam.captions:
            yield reference.generate(text, STEPS, image_seed=seed, seed=seed).levels[0]
        return
    settings = {"num_steps": STEPS, **choice.options}
    guided = settings.get("guidance_scale", 2.0) > 1
    load = {"loop": "step", "embeddings": "none", "guidance": guided, **choice.load}
    with wanrun.load(artifact, size=(WIDTH, HEIGHT), num_frames=FRAMES, **load) as pipeline:
        for (text, seed, _), media in zip(exam.captions, exam.media, strict=True):
            yield pipeline.generate(text, seed=seed, media=media, **settings).frames[0]


HEADER = """
| | score | held out | motions | first frame dB | PSNR dB | SSIM | GMSD | seconds |
|---|---|---|---|---|---|---|---|---|"""


def row(name: str, found: Figures) -> str:
    """Returns a line of the table."""
    return f"| {name} | {' | '.join(cells(found))} |"


def cells(found: Figures) -> list[str]:
    """Returns the figures as texts, empty for those that there are not."""
    digits = (3, 3, 3, 1, 1, 4, 4, 0)
    pairs = zip(asdict(found).values(), digits, strict=True)
    return ["" if value is None else f"{value:.{places}f}" for value, places in pairs]


COMPARED = (
    "Score, held out and motions: the share of facts that a judge finds in the videos, of all captions, of "
    "those that no training video had, and of motions. PSNR, SSIM and GMSD: against the frames of "
    f"{next(iter(CHOICES))}, which is the float32 run with UniPC and {STEPS} steps. First frame: against the "
    "image that was given."
)


def page(found: Mapping[str, Mapping[str, Figures]], options: argparse.Namespace) -> Report:
    """Returns the tables of all variants as a report."""
    names = [name.strip() for name in HEADER.split("\n")[1].split("|")[2:-1]]
    columns = (Column("Choice"), *(Column(name[:1].upper() + name[1:], numeric=True) for name in names))
    sections = []
    for variant, rows in found.items():
        lines = [(name, asdict(made).values(), cells(made)) for name, made in rows.items()]
        caption = f"{variant}: each row makes the same videos in another way"
        table = Table(
            caption,
            columns,
            tuple((Cell(name), *map(Cell, texts, values)) for name, values, texts in lines),
        )
        sections.append(Section(variant, (table,)))
    facts = (
        Fact("Captions", str(options.captions)),
        Fact("Seeds", str(options.seeds)),
        Fact("Weights", "random" if options.random else "trained"),
        Fact("Steps", str(STEPS)),
    )
    sections.append(Section("What is compared", (Note(COMPARED), Facts(facts))))
    verdict = f"{sum(map(len, found.values()))} choices measured"
    title = "What each choice costs in quality"
    return Report("Report of a benchmark", title, verdict, True, now(), sections=tuple(sections))


def asked_for(options: argparse.Namespace) -> dict[str, Choice]:
    """Returns the choices to measure: the first always, others where what they need is there and trained."""
    names = {next(iter(CHOICES)), *(options.choice or CHOICES)}
    return {
        name: choice
        for name, choice in CHOICES.items()
        if name in names
        and not (choice.reference and options.random)
        and (checkpoint.TINY_VAE.exists() or not choice.built.tiny)
    }


def measure(variant: str, folder: Path, options: argparse.Namespace) -> dict[str, Figures]:
    """Prints the table of a variant, line by line."""
    texts = captions()[: options.captions]
    asked = [(text, seed, new) for text, new in texts for seed in range(options.seeds)]
    source = untrained(variant, folder) if options.random else checkpoint.FOLDER / variant
    exam = Exam(variant, source, asked, [checkpoint.media(variant, text, seed) for text, seed, _ in asked])
    print(f"\n{source.name}: {len(texts)} captions, {options.seeds} seeds\n{HEADER}")
    expected, found = None, {}
    for name, choice in asked_for(options).items():
        artifact = None if choice.reference else build(exam.source, choice.built, folder)
        begun = time.monotonic()
        made = np.stack(list(videos(exam, choice, artifact)))
        found[name] = exam.figures(made, expected, time.monotonic() - begun)
        expected = made if expected is None else expected
        print(row(name, found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = checkpoint.names()
    parser.add_argument("--variant", choices=known, action="append", help="all of them by default")
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--choice", choices=list(CHOICES), action="append", help="all of them by default")
    parser.add_argument("--random", action="store_true", help="random weights in the place of trained ones")
    parser.add_argument("--folder", type=Path, help="of artifacts, kept and used again")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the tables as a page too")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is no report")
    options = parser.parse_args()
    if options.report is not None:
        try:
            Claims().write_to(REPORT, str(options.report), "--report", options.overwrite)
        except UsageError as error:
            parser.error(str(error))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = {variant: measure(variant, folder, options) for variant in options.variant or known}
    if options.report is not None:
        write_report(options.report, page(found, options))
    print(
        json.dumps({name: {row: asdict(made) for row, made in rows.items()} for name, rows in found.items()})
    )


if __name__ == "__main__":
    main()
