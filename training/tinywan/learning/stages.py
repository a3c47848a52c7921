"""The transformers, one after the other: those after the first begin with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from torch import Tensor
from transformers import UMT5EncoderModel

from tinywan.learning import export, models
from tinywan.learning.course import Plan
from tinywan.learning.flow import Images, Lesson, Noise, train
from tinywan.learning.latents import Bank, conditions
from tinywan.learning.text import Captions

SHIFT, EXPERTS_SHIFT = 3.0, 12.0
"""As published: Wan 2.1 at 480p, Wan 2.2 T2V."""

BOUNDARY = 0.875
"""Sigma at which the expert of low noise takes over from that of high noise."""

OVERLAP = 0.03
"""Sigmas beyond the boundary that an expert learns too: a step's sigma is not exactly the boundary's."""

DRAFT = Lesson(
    Plan("draft", steps=10000, rate=2e-3), Noise(SHIFT), saved=("draft", "draft_text_encoder"), batch=16
)
TEXT = Lesson(Plan("text", steps=7000, rate=1.5e-3, decay=0.1), Noise(SHIFT), saved=("text", "text_encoder"))
HIGH = Lesson(
    Plan("high", steps=1000, rate=7e-4, decay=0.1),
    Noise(EXPERTS_SHIFT, lowest=BOUNDARY - OVERLAP),
    saved=("high",),
)
LOW = Lesson(
    Plan("low", steps=1400, rate=7e-4, decay=0.1),
    Noise(EXPERTS_SHIFT, highest=BOUNDARY + OVERLAP),
    saved=("low",),
)
IMAGE = Lesson(
    Plan("image", steps=2200, rate=1e-3, decay=0.1), Noise(SHIFT), saved=("image", "image_encoder")
)


def train_draft(folder: Path, seed: int) -> None:
    """Trains a first transformer of text to video, and the text encoder with it."""
    torch.manual_seed(seed)
    models.save_tokenizer(folder / "tokenizer")
    model, encoder = models.transformer(), models.text_encoder(folder / "tokenizer")
    train(model, Captions(folder / "tokenizer", encoder), Bank.load(folder / "bank"), DRAFT, folder, seed)


def train_text(folder: Path, seed: int) -> None:
    """Goes on with both, in larger batches: Wan 2.1's text to video."""
    model = _read(WanTransformer3DModel, folder / "draft")
    encoder = _read(UMT5EncoderModel, folder / "draft_text_encoder")
    train(model, Captions(folder / "tokenizer", encoder), Bank.load(folder / "bank"), TEXT, folder, seed)


def train_experts(folder: Path, seed: int) -> None:
    """Trains Wan 2.2's two experts, each on its range of noise."""
    captions, bank = _captions(folder), Bank.load(folder / "bank")
    for lesson in (HIGH, LOW):
        model = _read(WanTransformer3DModel, folder / "text")
        train(model, captions, bank, lesson, folder, seed)


def train_image(folder: Path, seed: int) -> None:
    """Trains Wan 2.1's image to video, and the image encoder with it."""
    torch.manual_seed(seed)
    model = models.transformer(image=True)
    with torch.no_grad():
        learned = _read(WanTransformer3DModel, folder / "text").state_dict()
        narrow = learned.pop("patch_embedding.weight")
        model.load_state_dict(learned, strict=False)
        model.patch_embedding.weight.zero_()
        model.patch_embedding.weight[:, : narrow.shape[1]] = narrow
    encoder = models.image_encoder()
    bank = Bank.load(folder / "bank")
    images = Images(encoder, prepared(bank.first_frames), conditions(folder, bank.first_frames))
    train(model, _captions(folder), bank, IMAGE, folder, seed, images)


def prepared(frames: np.ndarray) -> Tensor:
    """Returns frames, uint8 (N, H, W, 3), as the image encoder gets them, float32 (N, 3, 32, 32)."""
    processor = export.image_processor()
    return processor([Image.fromarray(frame) for frame in frames], return_tensors="pt").pixel_values


def _captions(folder: Path) -> Captions:
    encoder = _read(UMT5EncoderModel, folder / "text_encoder")
    return Captions(folder / "tokenizer", encoder.requires_grad_(False))


def _read(kind: Any, folder: Path) -> Any:
    """Reads a trained model, in float32 whatever its file has."""
    return kind.from_pretrained(folder, torch_dtype=torch.float32)
