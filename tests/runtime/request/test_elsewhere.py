"""Names of other tools for what is no option of a generation: what to do, in every way to write a request."""

from __future__ import annotations

import pytest

import wanrun
from wanrun.errors import UsageError
from wanrun.request.elsewhere import ELSEWHERE, OF_PYTHON, by_name, nearest
from wanrun.request.prompts_file import Line
from wanrun.request.reading import read_request
from wanrun.request.resolve import request_of


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("height", ("size",)),
        ("hieght", ("size",)),
        ("generator", ("seed",)),
        ("guidance_scale_high", ("guidance_scale", "guidance_scale_2")),
        ("infer_step", ("num_steps",)),
        ("nag", ("nag_scale",)),
        ("window", ("window_frames",)),
        ("clip", ("clips",)),
        ("torch_dtype", ()),
    ],
)
def test_a_request_names_what_to_use(name: str, fields: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as raised:
        read_request([("prompt", "a fox"), (name, 1)], Line)
    assert raised.value.fields == fields
    assert raised.value.remedy is not None


@pytest.mark.parametrize("name", [*OF_PYTHON, "memory", "target"])
def test_a_keyword_of_python_names_what_to_use(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        request_of({"prompt": "a fox", name: 1})
    assert raised.value.remedy is not None and raised.value.expected is None


@pytest.mark.parametrize(
    ("there", "name"),
    [
        (wanrun, "WanPipeline"),
        (object.__new__(wanrun.Pipeline), "to"),
        (object.__new__(wanrun.Pipeline), "load_lora_weights"),
        (object.__new__(wanrun.Pipeline), "enable_model_cpu_offload"),
        (object.__new__(wanrun.Result), "videos"),
    ],
)
def test_an_attribute_of_diffusers_names_what_to_use(there: object, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'; "):
        getattr(there, name)
    assert not hasattr(there, "some_other")
    with pytest.raises(TypeError, match="generate"):
        object.__new__(wanrun.Pipeline)("a fox")  # type: ignore[operator]


def test_a_name_that_is_like_none_has_no_remedy() -> None:
    with pytest.raises(UsageError) as raised:
        read_request([("prompt", "a fox"), ("tint", 1)], Line)
    assert raised.value.remedy is None
    assert nearest("denoise", ["video", "noise_seed"]) is None
    assert nearest("negative_promt", ["negative_prompt", "prompt"]) == "negative_prompt"


def test_a_name_has_one_row() -> None:
    assert by_name({"pass --a": "b c"}) == {"b": "pass --a", "c": "pass --a"}
    with pytest.raises(ValueError, match="b"):
        by_name({"pass --a": "b c", "pass --d": "b"})
    assert all(name.isidentifier() for name in ELSEWHERE)
