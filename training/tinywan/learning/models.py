"""The tiny models: diffusers' and transformers' own classes, with small sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from tokenizers import Tokenizer
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tinywan import vocabulary
from wanbuild.toy.toy_tokenizer import write_tokenizer

CHANNELS = 16
"""Of latents."""

TEXT_WIDTH = 64
IMAGE_WIDTH = 64


def words() -> str:
    """Every word of captions."""
    tables = [vocabulary.COLOURS, vocabulary.GROUNDS, vocabulary.TEXTURES, vocabulary.SIZES]
    phrases = [phrase for table in (vocabulary.SHAPES, vocabulary.MOTIONS) for phrase in table.values()]
    texts = [*(word for table in tables for word in table), *(word for some in phrases for word in some)]
    return " ".join([*texts, "a an the and while over on ground ,"])


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of captions: a piece for every word of theirs, and for every character."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, words=words())


def autoencoder() -> AutoencoderKLWan:
    """A VAE of Wan 2.1: 8x8 pixels and 4 frames to one latent of 16 channels.

    Its first weights treat every frame by itself and have no biases, and its first latents have little noise.
    With torch's own, whose biases are as large as what flows through, no video gets through for hundreds of
    steps.
    """
    model = AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 3 and "norm" not in name:
                _start(name, parameter)
        model.quant_conv.bias[CHANNELS:] = -6.0
    return model


def _start(name: str, weight: Tensor) -> None:
    """Fills a convolution's weight (out, in, [time,] height, width). Of its taps in time the last is now."""
    now = weight[:, :, -1] if weight.ndim == 5 else weight
    weight.zero_()
    if "time_conv" in name:
        now[:, :, 0, 0] = torch.eye(now.shape[1]).repeat(now.shape[0] // now.shape[1], 1)
        return
    torch.nn.init.normal_(now, std=weight[0].numel() ** -0.5)
    if "conv2.weight" in name or "proj.weight" in name:  # the last of a residual branch
        now *= 0.5


def text_encoder(tokenizer: Path) -> UMT5EncoderModel:
    """A UMT5 encoder.

    Args:
        tokenizer: the folder of the tokenizer whose vocabulary it embeds.
    """
    tokens = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=tokens,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def image_encoder() -> CLIPVisionModel:
    """A CLIP vision tower of 32x32 pixels in 16 patches."""
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=IMAGE_WIDTH,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            hidden_act="gelu",
        )
    )


def transformer(image: bool = False) -> WanTransformer3DModel:
    """A transformer of text to video, or of image to video.

    Args:
        image: whether a first frame is given: as latents with a mask, and embedded by ``image_encoder``.
    """
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=2 * CHANNELS + 4 if image else CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=256,
        ffn_dim=256,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        image_dim=IMAGE_WIDTH if image else None,
        added_kv_proj_dim=128 if image else None,
        rope_max_seq_len=1024,
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("attn1.to_out.0.weight", "attn2.to_out.0.weight", "ffn.net.2.weight")):
            with torch.no_grad():
                parameter.mul_(0.5)
    return model
