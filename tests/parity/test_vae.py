"""Both Wan VAEs against diffusers' AutoencoderKLWan on the CPU, in float32 unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tiers import thorough_but
from helpers.vae_reference import (
    ALL,
    TOLERANCE,
    Pair,
    decoded,
    encoded,
    pair,
    relative_error,
    tiled,
)
from wanbuild.models import vae_residual
from wanbuild.models.params import bind

_RANDOM = np.random.default_rng(48).uniform(0.5, 1.5, (2, 48))

# Channels change between levels, so that shortcuts are there; 16 and up, so that winograd is used.
PLAIN: dict[str, Any] = {"base_dim": 16, "dim_mult": (1, 2, 2, 4), "num_res_blocks": 1}
# That of Wan 2.2, as published, in small, with other channels in the decoder.
RESIDUAL: dict[str, Any] = {
    "base_dim": 16,
    "decoder_base_dim": 20,
    "z_dim": 48,
    "num_res_blocks": 1,
    "dim_mult": (1, 2, 4, 4),
    "temperal_downsample": (False, True, True),
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "latents_mean": tuple(map(float, _RANDOM[0] - 1)),
    "latents_std": tuple(map(float, _RANDOM[1])),
}
FORMS = {"plain": PLAIN, "residual": RESIDUAL}
SIZE, WIDE, TALL = (3, 5), (2, 3), (3, 2)

# Levels whose shortcuts average eight values, average two, and repeat what differs from frame to frame.
OTHER = {"dim_mult": (1, 1, 4, 4), "temperal_downsample": (True, True, False), "num_res_blocks": 2}
NARROW = {"base_dim": 3, "dim_mult": (1, 1, 1, 1)}
SMALL = {"base_dim": 4, "z_dim": 16, "dim_mult": (1, 2, 4, 4)}

Size = tuple[int, int]


def vae(form: str = "plain", **changes: Any) -> Pair:
    """A pair of this form with some fields changed."""
    return pair(**FORMS[form] | changes)


@pytest.mark.parametrize(
    ("form", "frames", "chunk", "size", "changes"),
    thorough_but(
        1,
        [
            ("plain", 1, 2, SIZE, {}),
            ("plain", 4, 1, SIZE, {}),
            ("plain", 4, 2, SIZE, {"num_res_blocks": 2}),
            ("residual", 1, 1, WIDE, {}),
            ("residual", 5, 3, WIDE, {}),  # a last piece that is filled up
            ("residual", 5, ALL, WIDE, {}),
            ("residual", 3, 1, WIDE, OTHER),
        ],
    ),
)
def test_decoding(form: str, frames: int, chunk: int, size: Size, changes: dict[str, Any]) -> None:
    model = vae(form, **changes)
    latents = model.draw_latents(frames, size)
    expected, side = decoded(model.reference, latents), model.config.spatial
    assert expected.shape == (1, 4 * frames - 3, side * size[0], side * size[1], 3)
    # A judge that is mostly clipped, or constant, would see nothing.
    assert expected.std() > 0.05
    assert np.mean(np.abs(expected) == 1) < 0.05
    assert relative_error(model.decode(latents, chunk), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("form", "frames", "chunk", "size", "changes"),
    thorough_but(
        1,
        [
            ("plain", 1, 2, SIZE, {}),
            ("plain", 4, 2, SIZE, {"num_res_blocks": 2}),
            ("plain", 4, ALL, SIZE, {}),
            ("residual", 1, 1, TALL, {}),
            ("residual", 5, 3, TALL, {}),
            ("residual", 5, ALL, TALL, {}),
            ("residual", 3, 1, WIDE, OTHER),
        ],
    ),
)
def test_encoding(form: str, frames: int, chunk: int, size: Size, changes: dict[str, Any]) -> None:
    model = vae(form, **changes)
    video = model.draw_video(frames, size)
    for found, expected in zip(model.encode(video, chunk), encoded(model.reference, video), strict=True):
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("form", "size", "batch", "chunk", "changes"),
    thorough_but(
        1,
        [
            # The smallest configuration in use, with one channel where levels meet.
            ("plain", SIZE, 1, 2, NARROW),
            # The first level sees odd sizes, one frame per piece.
            ("plain", SIZE, 2, 1, {"decoder_base_dim": 32}),
            ("residual", WIDE, 2, 1, {}),
        ],
    ),
)
def test_winograd(form: str, size: Size, batch: int, chunk: int, changes: dict[str, Any]) -> None:
    """The CPU's form, also of two videos at once."""
    model = vae(form, **changes)
    latents = model.draw_latents(3, size, batch=batch)
    found = model.decode(latents, chunk, algorithm="winograd")
    assert relative_error(found, decoded(model.reference, latents)) < TOLERANCE
    if form == "residual":
        video = model.draw_video(2, TALL)
        moments = model.encode(video, 1, algorithm="winograd")
        for moment, expected in zip(moments, encoded(model.reference, video), strict=True):
            assert relative_error(moment, expected) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "side", "size", "alike"),
    [
        # Tiles of 4 cells, 3 apart: the last ones have 2 rows and 1 column; with one row of tiles alone.
        ("plain", 32, (5, 7), False),
        ("plain", 32, (3, 8), True),
        ("residual", 64, (4, 5), False),
    ],
)
def test_tiles_of_what_is_decoded(form: str, side: int, size: Size, alike: bool) -> None:
    """Those of diffusers' ``enable_tiling``."""
    model = vae(form, **SMALL if form == "plain" else {})
    latents = model.draw_latents(2, size)
    whole = decoded(model.reference, latents)
    with tiled(model, side):
        expected = decoded(model.reference, latents)
    found = model.decode(latents, 1, tile=side, alike=alike)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(whole, expected) > 100 * TOLERANCE  # tiles are not the whole


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "side", "size"), [("plain", 32, (5, 7)), ("residual", 32, (5, 4))])
def test_tiles_of_what_is_encoded(form: str, side: int, size: Size) -> None:
    """diffusers' tiles of the form with patches are of patches: twice the pixels."""
    model = vae(form, **SMALL if form == "plain" else {})
    video = model.draw_video(2, size)
    whole, _ = encoded(model.reference, video)
    with tiled(model, side):
        expected = encoded(model.reference, video)
    for mine, judge in zip(model.encode(video, 1, tile=side), expected, strict=True):
        assert relative_error(mine, judge) < TOLERANCE
    assert relative_error(whole, expected[0]) > 100 * TOLERANCE


def test_a_video_that_fits_into_a_tile_is_whole() -> None:
    model = vae(**SMALL)
    latents = model.draw_latents(2, (3, 4))
    assert np.array_equal(model.decode(latents, 1, tile=32), model.decode(latents, 1))


def test_pieces_make_the_whole() -> None:
    """However a video is cut: sums in another order are all that differs."""
    model = vae("residual")
    latents, video = model.draw_latents(5, WIDE), model.draw_video(5, TALL)
    whole = np.asarray(model.decode(latents, ALL))
    assert relative_error(model.decode(latents, 3), whole) < TOLERANCE / 2
    for found, expected in zip(model.encode(video, 3), model.encode(video, ALL), strict=True):
        assert relative_error(found, np.asarray(expected)) < TOLERANCE / 2


@pytest.mark.thorough
def test_pieces_are_converted_one_by_one() -> None:
    model = vae()
    latents = model.draw_latents(4)
    frames = np.random.default_rng(0).integers(0, 256, (1, 13, 24, 40, 3), np.uint8)

    def to_uint8(video: jax.Array) -> jax.Array:
        return jnp.round((video + 1) * 127.5).astype(jnp.uint8)

    def from_uint8(video: jax.Array) -> jax.Array:
        return video.astype(jnp.float32) / 127.5 - 1

    found = model.decode(latents, 2, finish=to_uint8)
    assert found.dtype == jnp.uint8
    expected = np.asarray(to_uint8(jnp.asarray(decoded(model.reference, latents))), np.int32)
    # Float32 noise may carry a value across the middle between two integers, in about one of 1e4 values.
    assert np.abs(np.asarray(found) - expected).max() <= 1
    assert np.mean(np.asarray(found) != expected) < 1e-3
    mean = model.encode(frames, 2, start=from_uint8)[0]
    expected = encoded(model.reference, np.array(from_uint8(jnp.asarray(frames))))[0]
    assert relative_error(mean, expected) < TOLERANCE


def test_pieces_are_seen_as_pictures() -> None:
    """``finish`` and ``start`` work on colours, not on patches."""
    model = vae("residual")
    seen = []

    def see(video: jax.Array) -> jax.Array:
        seen.append(video.shape)
        return video

    def both(params: dict[str, Any], latents: jax.Array) -> Any:
        module = bind(model.module, params)
        return module.encode(module.decode(latents, 1, finish=see), 1, start=see)

    mean, _ = jax.eval_shape(both, model.params, model.draw_latents(2, TALL))
    assert mean.shape == (1, 48, 2, *TALL)
    pieces = [(1, 1, 48, 32, 3), (1, 4, 48, 32, 3)]
    assert seen == [*pieces, (1, 5, 48, 32, 3), *pieces]  # in between, ``encode`` asks for the shape


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_close_to_float32(form: str) -> None:
    """8 bits per activation: 61 dB of the range of 2 and more was measured; noise would give 8 and 14 dB."""
    model = vae(form)
    latents = model.draw_latents(2, WIDE if form == "residual" else SIZE)
    found = model.decode(latents, 1, dtype=jnp.bfloat16)
    assert found.dtype == jnp.float32
    error = np.mean(np.square(np.asarray(found) - decoded(model.reference, latents)))
    assert 10 * np.log10(4 / error) > 50


@pytest.mark.parametrize(("form", "cells"), [("plain", 8), ("residual", 4)])
def test_memory_does_not_grow_with_frames(form: str, cells: int) -> None:
    model, (few, many) = vae(form), (9, 25)
    z = model.config.z_dim
    temporary = [model.temporary_bytes("decode", (1, z, frames, cells, cells)) for frames in (few, many)]
    # Per pixel and channel, what is returned (one byte) may be there twice, while it is joined; one frame's
    # activations alone are 16 and 20 channels of four bytes.
    output_bytes = 4 * (many - few) * 64 * 64 * 3
    latent_bytes = 4 * (many - few) * z * cells * cells
    assert temporary[1] - temporary[0] <= 2 * (output_bytes + latent_bytes)


@pytest.mark.parametrize("left_out", ["mid_block/attentions/0/proj", "up_blocks/1/upsampler/time_conv"])
def test_a_layer_left_out_is_noticed(left_out: str) -> None:
    model = vae()
    damaged = replace(model, params=jax.tree.map(np.copy, model.params))
    node = damaged.params["decoder"]
    for name in left_out.split("/"):
        node = node[name]
    node["weight"][...] = 0
    latents = model.draw_latents(4)
    assert relative_error(damaged.decode(latents, 1), decoded(model.reference, latents)) > 100 * TOLERANCE


def test_history_reaches_the_next_piece() -> None:
    """What a piece shows depends on the pieces before it, and never on those after it."""
    model = vae()
    latents = model.draw_latents(4)
    video = np.asarray(model.decode(latents, 1))
    changed = latents.copy()
    changed[:, :, 1] += 1
    other = np.asarray(model.decode(changed, 1))
    np.testing.assert_array_equal(video[:, :1], other[:, :1])
    assert np.abs(video[:, 5:] - other[:, 5:]).max() > 0.01


@pytest.mark.parametrize("left_out", ["average_down", "duplicate_up"])
def test_a_shortcut_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    function = getattr(vae_residual, left_out)
    monkeypatch.setattr(vae_residual, left_out, lambda *arguments: jnp.zeros_like(function(*arguments)))
    model, chunk = vae("residual"), 7  # a program of its own
    if left_out == "average_down":
        video = model.draw_video(1, WIDE)
        found, expected = model.encode(video, chunk)[0], encoded(model.reference, video)[0]
    else:
        latents = model.draw_latents(1, WIDE)
        found, expected = model.decode(latents, chunk), decoded(model.reference, latents)
    assert relative_error(found, expected) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("form", "shape", "found"),
    [
        ("plain", (4, 16, 16), r"4n\+1 frames"),
        ("plain", (5, 12, 16), r"4n\+1 frames"),
        ("residual", (5, 24, 32), r"\(5, 24, 32\)"),
    ],
)
def test_encode_refuses_shapes_that_do_not_fit(form: str, shape: tuple[int, int, int], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        vae(form).encode(np.zeros((1, *shape, 3), np.float32), 1)
