"""The names of fields: those of other servers, what each means here, and what has no meaning here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import wanrun
from wanrun.request.elsewhere import OF_CLIENTS, by_name
from wanrun.rows import Row

MERGED = ("extra_body", "extra_params", "extra_json", "extra_args", "diffusers_kwargs", "nvext")
"""Objects whose entries count as fields."""

_ALSO: Mapping[str, str] = MappingProxyType(
    {
        "n": "num_videos",
        "preset": "schedule",
    }
)
"""Names of options besides those that ``wanrun`` understands too."""

MEDIA: Mapping[str, str] = MappingProxyType(
    {"input_reference": "", "image_reference": "image", "video_reference": "video", "reference_url": "image"}
)
"""Fields with an image or a video besides the options themselves; without an option the content decides."""

ROLES: Mapping[str, str] = MappingProxyType(
    {"first_frame": "image", "last_frame": "last_image", "reference": "reference_image"}
)
"""Options by the role of an image in a list of references."""

LORA: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("lora_name", "lora_nickname"), "name"),
        **dict.fromkeys(("lora_strength", "lora_scale", "lora_weight"), "strength"),
    }
)
"""Fields that describe a single LoRA, with what each says of it; also as fields of its object."""

OF_LORA: Mapping[str, str] = MappingProxyType(
    {**LORA, "adapter": "name", "scale": "strength", "weight": "strength", "int_id": "", "lora_int_id": ""}
)
"""Fields of a LoRA's object by other servers' names; empty for one that changes nothing."""

LORA_PATHS = ("local_path", "lora_local_path", "lora_path", "path")
"""Fields of a LoRA's object that name a file."""

NO_EFFECT: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "user": (),
        "max_sequence_length": (512, "512"),
        "response_format": ("file", "url", "binary", "mp4"),
        "stream": (False, "false"),
    }
)
"""Fields that change nothing, with the values that they may have; any value if there is none."""

USELESS: Mapping[str, str] = MappingProxyType(
    {
        "response_format": "fetch the video at v1/videos/ID/content",
        "stream": "follow the job at v1/videos/ID/events",
    }
)
"""By such a field, what to do for another value of it."""

NO_LORA_PATH = "no path of the server is read; name one of the LoRAs that v1/loras lists"
_NO_PATH = "no path of the server is read or written; send the file itself, and fetch the content"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **{name: remedy for name, remedy in OF_CLIENTS.items() if name not in LORA},
        **by_name(
            {
                _NO_PATH: "image_path last_frame_path output_path save_result_path video_path",
                NO_LORA_PATH: "lora_local_path lora_path",
                "nothing is sent elsewhere; fetch the content": "presigned_url",
                "there are no stored characters; send images": "characters",
            }
        ),
    }
)
"""Fields of other servers and tools that have no meaning here, with what to do instead."""


def page_text(row: Row, kinds: Iterable[str], choices: Iterable[Any]) -> str:
    """Returns the page's text about an option of one model, with names of other options as ``code``.

    ``kinds`` is what the model is, in the words of the rows' ``models``; ``choices`` are the values of the
    option that it has.
    """
    said = next((row.page[kind] for kind in kinds if kind in row.page), row.page.get("", row.help))
    return _with_names(" ".join([said, *(row.page[one] for one in choices if one in row.page)]))


def api_text(row: Row) -> str:
    """Returns OpenAPI's text about an option: of all models, with those that have it, and its default."""
    text = row.help if len(row.page) > 1 else row.page.get("", row.help)
    text = f"{text.rstrip('.')}{f' ({row.models})' if row.models else ''}."
    return _with_names(text + (f" Default: {row.default}." if row.default else ""))


def _with_names(text: str) -> str:
    """Returns a text with the fields of the API in place of the command's options."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda match: f"`{_name(match[1].replace('-', '_'))}`", text)


def _name(key: str) -> str:
    return options_by_name().get(key, key)


@lru_cache
def files() -> frozenset[str]:
    """Returns the Python names of the options that are images or videos."""
    return frozenset(row.name for row in wanrun.options() if row.value in ("FILE", "DIR|FILE"))


@lru_cache
def options_by_name() -> Mapping[str, str]:
    """Returns the Python name of an option by every name that is understood."""
    names = {name: row.name for row in wanrun.options() for name in (row.name, row.key, *row.also)}
    own = {name: option for name, option in names.items() if name not in INSTEAD}
    return MappingProxyType({**own, **_ALSO})
