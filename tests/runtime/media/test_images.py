"""Images: odd ones are read as the reference reads them or refused; arrays and addresses in their place."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import picture, pixels, same
from helpers.refusals import refuses
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, WanError
from wanrun.media import images
from wanrun.media.decoder import read_ppm
from wanrun.media.images import left_out, read_image
from wanrun.media.inputs import Media, url_error, without_arrays
from wanrun.media.pillow import FORMATS, STRIP_BYTES, mask, write_ppm
from wanrun.request.prompts_file import Line
from wanrun.request.reading import read_request

# --- images ---


def check_refused(source: Path | str | Image.Image, code: ErrorCode, **parts: object) -> WanError:
    """Checks why an image is not read; returns the error."""
    with refuses(code, **parts) as caught:
        read_image(source, "--image")
    assert "\n" not in str(caught.value) and caught.value.what.startswith("--image")
    assert isinstance(source, Image.Image) or str(source) in caught.value.what
    return caught.value


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)  # type: ignore[arg-type]
    return path


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read(format: str, tmp_path: Path) -> None:
    # 64 of 255: lossy formats keep a pattern, and no two patterns are alike.
    path = saved(picture(50, 34), tmp_path / "picture", format=format)
    difference = np.abs(np.asarray(read_image(path, "--image"), int) - pixels(50, 34))
    assert difference.mean() < 16
    assert (difference == 0).all() or format in ("JPEG", "WEBP", "GIF", "AVIF", "JPEG2000")


@pytest.mark.slow
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = read_image(saved(picture(20, 12), tmp_path / "turned.png", exif=exif.tobytes()), "--image")
    stored = pixels(20, 12)
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }[orientation]
    np.testing.assert_array_equal(np.asarray(image), upright)


def test_transparency_is_dropped_and_told_if_any_is_seen(tmp_path: Path) -> None:
    rgba, path = pixels(20, 12, channels=4), tmp_path / "a.png"
    opaque = np.concatenate([rgba[..., :3], np.full_like(rgba[..., :1], 255)], axis=-1)
    for array, count in ((rgba, 1), (opaque, 0)):
        image = Image.fromarray(array)
        for source in (saved(image, path), image):
            read = read_image(source, "--image")
            np.testing.assert_array_equal(np.asarray(read), rgba[..., :3])
            assert len(left_out(read)) == count
        assert images.NOTES not in image.info
    for transparency in (0, bytes(range(200))):  # Pillow warns of the second, and a warning is an error here
        read = read_image(saved(picture(20, 12).quantize(200), path, transparency=transparency), "--image")
        assert len(left_out(read)) == 1 and read.mode == "RGB"
        assert (read.info.get("transparency") is not None) == (transparency == 0)


HEIC = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"


def test_heic_is_named_or_read_by_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "photo.jpg"  # phones and messengers rename them
    path.write_bytes(HEIC)
    assert "HEIC" in check_refused(path, "wrong_kind", remedy="'.[heif]'").what
    (tmp_path / "pillow_heif.py").write_text(
        "from PIL import Image\n"
        "def register_heif_opener():\n"
        "    Image.register_open('HEIF', lambda file, name: Image.new('RGB', (20, 12), 'red'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert same(read_image(path, "--image"), Image.new("RGB", (20, 12), "red"))


@pytest.mark.slow
def test_greyscale_one_bit_palette_and_cmyk_become_rgb(tmp_path: Path) -> None:
    grey = Image.fromarray(pixels(20, 12, channels=1)[..., 0])
    read = np.asarray(read_image(saved(grey, tmp_path / "grey.png"), "--image"))
    np.testing.assert_array_equal(read, np.repeat(np.asarray(grey)[..., None], 3, 2))
    one_bit = picture(50, 34).convert("1")
    assert set(np.unique(one_bit)) == {0, 1}
    assert same(read_image(saved(one_bit, tmp_path / "one.png"), "--image"), one_bit.convert("RGB"))
    palette = picture(20, 12).quantize(200)
    assert same(read_image(saved(palette, tmp_path / "p.png"), "--image"), palette.convert("RGB"))
    cmyk = picture(20, 12).convert("CMYK")
    assert same(read_image(saved(cmyk, tmp_path / "c.tiff"), "--image"), cmyk.convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "webp", "gif", "tiff"])
@pytest.mark.parametrize("count", [0, 1])
def test_of_an_animation_the_first_frame_is_taken_and_it_is_told(
    suffix: str, count: int, tmp_path: Path
) -> None:
    first, second = (picture(20, 12, seed).quantize(64).convert("RGB") for seed in range(2))
    options = {"lossless": True} if suffix == "webp" else {}
    more = {"save_all": True, "append_images": [second], "duration": 80} if count else {}
    read = read_image(saved(first, tmp_path / f"animated.{suffix}", **more, **options), "--image")
    assert same(read, first) and len(left_out(read)) == count


def test_an_image_in_memory_is_treated_alike() -> None:
    image = picture(20, 12).convert("RGBA")
    image.getexif()[0x0112] = 6
    assert read_image(image, "image").size == (12, 20)
    assert image.size == (20, 12)


@pytest.mark.parametrize(
    ("suffix", "mode", "dtype"),
    [("png", "I;16", "uint16"), ("tiff", "I;16", "uint16"), ("tiff", "I", "int32"), ("tiff", "F", "float32")],
)
def test_deep_greyscale_is_refused(suffix: str, mode: str, dtype: str, tmp_path: Path) -> None:
    """Pillow clips it at 255: nearly all white."""
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (12, 20)).astype(dtype))
    for image in (saved(deep, tmp_path / f"deep.{suffix}"), deep):
        check_refused(image, "unsupported", found=f"({mode}", remedy="8 bits")


def test_colour_of_16_bits_keeps_the_upper_8(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (12, 20, 3), np.uint16)
    path = tmp_path / "deep.ppm"  # Pillow writes no such file
    path.write_bytes(b"P6 20 12 65535\n" + deep.astype(">u2").tobytes())
    found = np.asarray(read_image(path, "--image"), int)
    np.testing.assert_allclose(found, deep / 257, atol=0.51)


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def broken(data: bytes) -> bytes:
    """Without the header's fields, which are in the first bytes after the signature."""
    return data[:9] + bytes(24) + data[33:]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, broken])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_a_damaged_file_is_refused(format: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    data = io.BytesIO()
    picture(50, 34).save(data, format)
    path = tmp_path / "damaged"
    path.write_bytes(damage(data.getvalue()))
    with pytest.raises(UsageError) as caught:
        read_image(path, "--image")
    assert caught.value.code in ("damaged", "wrong_kind") and str(path) in caught.value.what


def test_a_damaged_image_in_memory_is_refused(tmp_path: Path) -> None:
    path = saved(picture(50, 34), tmp_path / "picture.png")
    path.write_bytes(cut(path.read_bytes()))
    with Image.open(path) as image:
        check_refused(image, "damaged")


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("not a picture\n")
    check_refused(tmp_path / "empty.png", "unreadable", found="empty")
    check_refused(tmp_path / "text.png", "wrong_kind")
    # Pillow hands PostScript to Ghostscript: no program is started.
    (tmp_path / "page.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 12\nshowpage\n")
    check_refused(tmp_path / "page.png", "wrong_kind")
    check_refused(tmp_path, "wrong_kind", found="a folder")
    check_refused(tmp_path / "missing.png", "missing_file")
    check_refused(str(tmp_path / "text.png" / "below.png"), "missing_file")
    check_refused(tmp_path / ("a" * 300), "unreadable", found=os.strerror(errno.ENAMETOOLONG))
    check_refused("/dev/null", "unreadable", found="neither")
    check_refused(Image.new("RGB", (0, 5)), "damaged", found="0x5")


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(picture(50, 34), tmp_path / "picture.png")
    for limit in (50 * 34 - 1, 50 * 34 // 2 - 1):  # Pillow warns of the first, and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        check_refused(path, "too_large", expected=f"{limit} pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50 * 34)
    read_image(path, "--image")


@pytest.mark.parametrize("size", [(1, 140_000), (140_000, 1)])
def test_a_very_long_image_is_refused(size: tuple[int, int], tmp_path: Path) -> None:
    """To scale it takes much time and memory, whatever its pixels."""
    for image in (saved(Image.new("1", size), tmp_path / "thin.png"), Image.new("L", size)):
        check_refused(image, "too_large", expected=131072, found=f"{size[0]}x{size[1]}", remedy="crop")


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(picture(50, 34), tmp_path / "picture.png")

    def denied(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(images, "open_regular", denied)
    check_refused(path, "unreadable", found="Permission denied")


def test_the_transparent_colour_of_an_image_in_memory_is_told_of() -> None:
    """Two images of the same pixels may make two videos."""
    told: list[bytes] = []
    for transparency in (None, (1, 2, 3), (1, 2, 4)):
        image, pieces = picture(20, 12), list[bytes]()
        if transparency is not None:
            image.info["transparency"] = transparency
        read_image(image, "image", pieces.append)
        told.append(b"".join(pieces))
    assert len(set(told)) == 3 and all(other.startswith(told[0]) for other in told)


# --- arrays ---


PIXELS = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)


class Tensor:
    """An array of another library."""

    ndim = 3

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return PIXELS


def test_arrays_become_images() -> None:
    media = Media(
        image=PIXELS,
        video=np.stack([PIXELS, PIXELS[::-1]]),
        mask=[PIXELS],
        reference_image=(PIXELS, "a.png"),  # type: ignore[arg-type]
    )
    made = without_arrays(media)
    image = Image.fromarray(PIXELS)
    assert (made.image, made.mask, made.reference_image) == (image, [image], (image, "a.png"))
    assert made.video == [image, Image.fromarray(PIXELS[::-1])]
    assert without_arrays(Media(image=Tensor())).image == image  # type: ignore[arg-type]
    assert image.size == (5, 6)


def test_media_without_arrays_are_the_same() -> None:
    media = Media(image="a.png", reference_image=(Image.new("RGB", (4, 4)),))
    assert without_arrays(media) is media


@pytest.mark.parametrize(
    "array", [PIXELS.astype(np.float32), PIXELS[..., :2], PIXELS[0], np.transpose(PIXELS, (2, 0, 1))]
)
def test_another_array_is_refused(array: np.ndarray) -> None:
    with pytest.raises(UsageError) as raised:
        without_arrays(Media(image=array))
    assert raised.value.fields == ("image",)
    assert raised.value.found == f"{array.dtype} {array.shape}"


# --- urls ---


@pytest.mark.parametrize("url", ["https://example.com/a.png", "s3://bucket/a.png", "data:image/png;base64,"])
def test_an_address_is_shown_as_it_is_given(url: str) -> None:
    error = url_error(url, "image")
    assert error is not None and url in error.what
    with pytest.raises(UsageError) as raised:
        read_request([("prompt", "a fox"), ("image", url)], Line)
    assert url in raised.value.what and raised.value.fields == ("image",)


@pytest.mark.parametrize("source", ["a.png", "C:/a.png", Path("https://x"), 5, "data:1.png", "http:.png"])
def test_what_is_no_address(source: object) -> None:
    assert url_error(source, "image") is None


# --- pillow ---


BLACK, WHITE, GREY = (0, 0, 0), (255, 255, 255), (90, 160, 90)


@pytest.mark.parametrize(
    ("drawn", "rest", "expected"),
    [
        ((*WHITE, 255), (*BLACK, 0), (255, 0)),  # painted in white on a transparent layer
        ((*WHITE, 0), (*BLACK, 255), (255, 0)),  # a black picture with a hole
        ((*BLACK, 0), (*GREY, 255), (255, 0)),  # a photo of which a part was erased
        ((*WHITE, 255), (*BLACK, 255), (255, 0)),  # no transparency: the colours count
        ((*BLACK, 0), (*WHITE, 0), (0, 0)),  # no paint on this frame's layer
    ],
)
def test_a_mask_that_is_drawn_as_transparency(
    drawn: tuple[int, ...], rest: tuple[int, ...], expected: tuple[int, int]
) -> None:
    image = Image.new("RGBA", (6, 4), rest)
    image.paste(drawn, (0, 0, 2, 2))
    found = mask(image, "--mask")
    assert found.mode == "RGB" and found.getpixel((0, 0)) == (expected[0],) * 3
    assert found.getpixel((5, 3)) == (expected[1],) * 3
    assert same(mask(image.convert("RGB"), "--mask"), image.convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize("colour", [None, (1, 2, 3), b"\x01\x00", 7])
def test_a_frame_is_passed_on(colour: object) -> None:
    image, stream = picture(1500, 1100), io.BytesIO()
    assert 3 * image.width * image.height > STRIP_BYTES
    if colour is not None:
        image.info["transparency"] = colour
    write_ppm(image, stream)
    stream.seek(0)
    assert stream.readline() == b"P6\n"
    read = read_ppm(stream, "--video")
    assert read is not None and same(read, image) and read.info.get("transparency") == colour
    assert stream.read() == b""
