"""Reads a checkpoint's image_processor folder, which describes the image encoder's preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from wanbuild.config import Divisor, Number, Size, parse_config, read_json, shown
from wanrun.artifact.model import ImageProcessor
from wanrun.errors import SourceError

FILE = "preprocessor_config.json"

BICUBIC = 3
"""Pillow's number for the bicubic filter."""

_TYPES = frozenset(
    {"CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", "CLIPFeatureExtractor"}
)


@dataclass(frozen=True)
class ImageProcessorConfig:
    """Config of transformers' CLIPImageProcessor; names and defaults are those of preprocessor_config.json.

    Attributes:
        size: pixels of the shorter side after resizing, which keeps the aspect ratio.
        crop_size: pixels of the side of the square centre crop.
        image_mean: subtracted from each channel, red first, when the largest value is 255 rescale_factor.
        image_std: the divisor of each channel after that.
        rescale_factor: factor of the uint8 values.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ()
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "do_resize": True,
            "do_center_crop": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": BICUBIC,
            "default_to_square": False,
        }
    )
    # Layout and dtype of the result, and the class that reads the file.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys"),
            *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
        }
    )

    size: Size = 224
    crop_size: Size = 224
    image_mean: tuple[Number, Number, Number] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[Divisor, Divisor, Divisor] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: Divisor = 1 / 255

    @property
    def record(self) -> ImageProcessor:
        """The manifest's record."""
        return ImageProcessor(
            shortest_edge=self.size,
            crop=self.crop_size,
            resample=BICUBIC,
            rescale_factor=self.rescale_factor,
            mean=self.image_mean,
            std=self.image_std,
        )


def open_image_processor(folder: Path) -> ImageProcessorConfig:
    """Reads the folder's preprocessor_config.json.

    Raises SourceError if the file is missing or not JSON, or describes anything but this: the shorter side is
    resized with the bicubic filter, a square centre crop, values scaled and normalised per channel.
    """
    file = folder / FILE
    data = read_json(file)
    for field in ("image_processor_type", "feature_extractor_type"):
        if (kind := data.get(field)) is not None and kind not in _TYPES:
            raise SourceError(
                "unsupported",
                f"{field} in {file} is not supported",
                expected=" or ".join(sorted(_TYPES)),
                found=shown(kind),
                remedy="use the published checkpoint's image_processor folder",
            )
    # Newer releases also write the fields of steps that are off.
    absent = {name for name in ("do_pad", "pad_size") if data.get(name) in (None, False)}
    data = {name: value for name, value in data.items() if name not in absent}
    if "size" in data:
        data["size"] = _edge(data["size"], ("shortest_edge",), f"size in {file}")
    if "crop_size" in data:
        data["crop_size"] = _edge(data["crop_size"], ("height", "width"), f"crop_size in {file}")
    config = parse_config(ImageProcessorConfig, data, str(file))
    if config.crop_size > config.size:
        raise SourceError(
            "unreadable",
            f"{file} is not understood",
            expected=f"a crop_size of at most size, {config.size}",
            found=config.crop_size,
            remedy="use the published checkpoint's image_processor folder",
        )
    return config


def _edge(value: Any, names: tuple[str, ...], where: str) -> Any:
    """Returns the one length of a size, which older files give as a number and newer ones by name."""
    if not isinstance(value, dict):
        return value  # its type is checked with the other fields
    # Some releases write every possible name.
    given = {name: length for name, length in value.items() if length is not None}
    if given.keys() != set(names) or any(length != given[names[0]] for length in given.values()):
        alike = ", the same twice" if len(names) > 1 else ""
        raise SourceError(
            "unsupported",
            f"{where} is not supported",
            expected=f"{' and '.join(names)}{alike}",
            found=shown(value),
            remedy="use the published checkpoint's image_processor folder",
        )
    return given[names[0]]
