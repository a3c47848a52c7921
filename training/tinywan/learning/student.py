"""``python -m tinywan.learning.student``: students of the tiny text to video, of four steps without guidance.

A student learns the way of its teacher's own videos: from each of its levels it is to go straight to where
the teacher, with guidance and six steps, has come at the next one. It is the teacher's transformer with a
LoRA, as distilled models are published. ``wanbuild convert --lora FILE --sampling lightning-4`` makes an
artifact of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.functional import mse_loss
from tqdm import tqdm
from transformers import UMT5EncoderModel

import wanrun
from tinywan.captions import caption
from tinywan.checkpoint import FOLDER
from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.learning.adapter import Adapter
from tinywan.learning.course import Course, Plan
from tinywan.learning.text import Captions, shorten
from tinywan.scenes import random_scene
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.published.samplings import SAMPLINGS
from wanrun.denoising.noise import initial_noise

LEVELS = tuple(timestep / 1000 for timestep in SAMPLINGS["lightning-4"]["timesteps"])
"""Sigmas at which a student is asked."""

WITHIN = 6
"""The teacher's steps between two of them."""

SHIFT = SAMPLINGS["lightning-4"]["flow_shift"]
RANK = 16
BATCH = 32


@dataclass(frozen=True)
class Student:
    """A transformer that learns.

    Args:
        variant: the teacher's.
        component: the transformer.
        places: which of the four steps it takes.
    """

    variant: str
    component: str
    places: tuple[int, ...]


STUDENTS: Mapping[str, Student] = MappingProxyType(
    {
        "wan2.1-t2v": Student("wan2.1-t2v", "transformer", (0, 1, 2, 3)),
        "wan2.2-t2v-high-noise": Student("wan2.2-t2v", "transformer", (0, 1)),
        "wan2.2-t2v-low-noise": Student("wan2.2-t2v", "transformer_2", (2, 3)),
    }
)
"""By the name of the LoRA's file."""


@dataclass(frozen=True)
class Ways:
    """The ways of a teacher's videos.

    Args:
        texts: the captions.
        points: float32 (N, 5, 16, T, H, W), the latents at ``LEVELS`` and the clean ones.
    """

    texts: Sequence[str]
    points: Tensor


def ways(variant: str, count: int, seed: int) -> Ways:
    """Makes a teacher's videos, with the model's own guidance."""
    rng = np.random.default_rng(seed)
    texts = [caption(random_scene(rng), rng) for _ in range(count)]
    even = np.linspace(1, 0, WITHIN * len(LEVELS) + 1)[:-1]
    timesteps = [float(t) for t in 1000 * SHIFT * even / (1 + (SHIFT - 1) * even)]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = _float32(variant, Path(folder) / "artifact")
        with wanrun.load(artifact, embeddings="none", loop="step") as pipeline:
            for number, text in enumerate(tqdm(texts, desc=f"{variant} teaches", mininterval=10)):
                points.append(_way(pipeline, text, seed + number, timesteps))
    return Ways(texts, torch.from_numpy(np.stack(points)))


def _way(pipeline: wanrun.Pipeline, text: str, seed: int, timesteps: Sequence[float]) -> np.ndarray:
    reached = [initial_noise(seed, pipeline.latents_shape)]

    def on_step(done: int, total: int, step: wanrun.Step) -> None:
        if done % WITHIN == 0:
            reached.append(step.latents)

    pipeline.generate(text, seed=seed, timesteps=timesteps, on_step=on_step)
    return np.concatenate(reached)


def _float32(variant: str, artifact: Path) -> Path:
    parts = ("transformer", "transformer_2", "text_encoder", "vae")
    convert(ConvertRequest(FOLDER / variant, artifact, dict.fromkeys(parts, "float32")))
    options = BuildOptions(dtype="float32", vae_dtype="float32", scheduler_dtype="float32")
    compile_artifact(
        CompileRequest(artifact, ["cpu"], [(WIDTH, HEIGHT)], [FRAMES], [True], options=options),
        lambda _: None,
    )
    return artifact


def learn(
    name: str, taught: Ways, target: Path, seed: int, steps: int, rank: int = RANK, compiled: bool = True
) -> None:
    """Trains a LoRA by a teacher's ways, and writes it.

    Args:
        name: one of ``STUDENTS``.
        taught: the ways of its teacher's videos.
        target: the folder of the file.
        seed: of what is drawn.
        steps: of training.
        rank: of the LoRA.
        compiled: whether torch compiles the transformer, which needs a C++ compiler.
    """
    torch.manual_seed(seed)
    student = STUDENTS[name]
    source, places = FOLDER / student.variant, student.places
    model = WanTransformer3DModel.from_pretrained(source / student.component, torch_dtype=torch.float32)
    encoder = UMT5EncoderModel.from_pretrained(source / "text_encoder", torch_dtype=torch.float32)
    captions = Captions(source / "tokenizer", encoder.requires_grad_(False))
    shorten(model)
    adapter = Adapter(model, rank)
    rng = np.random.default_rng(seed)
    plan = Plan(f"student-{name}", steps, rate=1e-3, memory=0.98)
    course = Course(adapter.parts, plan, target / "log.jsonl", rng)
    velocity = torch.compile(model, dynamic=False) if compiled else model
    sigmas = torch.tensor([*LEVELS, 0.0])
    with torch.no_grad():
        embedded = torch.cat([captions([text]) for text in taught.texts])
    for step in course.steps():
        chosen = rng.integers(0, len(taught.texts), BATCH)
        place = torch.from_numpy(rng.permutation(np.resize(places, BATCH)))
        given, reached = taught.points[chosen, place], taught.points[chosen, place + 1]
        expected = (reached - given) / (sigmas[place + 1] - sigmas[place]).view(-1, 1, 1, 1, 1)
        predicted = velocity(given, 1000 * sigmas[place], embedded[chosen], return_dict=False)[0]
        course.learn(step, mse_loss(predicted, expected))
    adapter.save(course.average(), target / f"{name}.safetensors")
    course.end()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--student", "names", type=click.Choice(list(STUDENTS)), multiple=True, help="Default: all.")
@click.option("--videos", default=800, show_default=True, help="Of the teacher.")
@click.option("--steps", default=1100, show_default=True, help="Of training.")
@click.option("--rank", default=RANK, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, names: tuple[str, ...], videos: int, steps: int, rank: int, seed: int) -> None:
    """Trains students, and writes their LoRAs into FOLDER, which takes two cores about ten minutes."""
    torch.set_num_threads(2)
    folder.mkdir(parents=True, exist_ok=True)
    taught = dict[str, Ways]()
    for name in names or STUDENTS:
        variant = STUDENTS[name].variant
        if variant not in taught:
            taught[variant] = ways(variant, videos, seed + 10_000)
        learn(name, taught[variant], folder, seed, steps, rank)


if __name__ == "__main__":
    main()
