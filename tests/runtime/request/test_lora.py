"""LoRAs of a request: as they are written, which there are and fit, and the defaults that they bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import built_with, plain_adapter, plain_manifest, with_model, write_adapter
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanrun.artifact.adapter import SamplingDefaults
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.parameters import Component
from wanrun.artifact.programs import Profile
from wanrun.errors import AdapterError, ArtifactError, UsageError, WanError
from wanrun.files import file_sha256
from wanrun.job.job import Job
from wanrun.job.outcome import from_wire, to_wire
from wanrun.job.packed import PackedJob, pack
from wanrun.request.adapters import ChosenLora, applied_loras, placed, read_adapter
from wanrun.request.generation import Generation
from wanrun.request.lora import LoraChoice, parse_lora
from wanrun.request.prompts_file import Line, read_entries
from wanrun.request.resolve import request_of, resolve_request

PLAIN = LoraChoice(name="a", strength=0.5)
OF_EXPERTS = LoraChoice(name="a", high=0.9, low=-0.6)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("a", LoraChoice(name="a")),
        ("a:0.5", PLAIN),
        ("a:0", LoraChoice(name="a", strength=0.0)),
        ("a:-1e-1", LoraChoice(name="a", strength=-0.1)),
        ("a:high=0.9,low=-0.6", OF_EXPERTS),
        ("a: low = -0.6, high = 0.9", OF_EXPERTS),
        ("a:high=1", LoraChoice(name="a", high=1.0)),
        ("c:d.safetensors:2", LoraChoice(name="c:d.safetensors", strength=2.0)),
        ("dir/a.safetensors", LoraChoice(name="dir/a.safetensors")),
    ],
)
def test_a_text(text: str, choice: LoraChoice) -> None:
    assert parse_lora(text) == choice
    again = parse_lora(str(choice))
    assert again.of_experts == choice.of_experts
    assert again.strength == (1.0 if text == choice.name else choice.strength)


@pytest.mark.parametrize(
    "behind",
    ["", "x", "nan", "inf", "1e39", "1:x", "1,2", "high=1,high=2", "mid=1", "high", "high=", "high=1,2"],
)
def test_what_is_no_strength(behind: str) -> None:
    for text in (f"a:{behind}", f":{behind or 1}"):
        with refuses("unreadable", what=f"LoRA '{text}'"):
            parse_lora(text)


def test_a_file_with_a_colon_wins(tmp_path: Path) -> None:
    (tmp_path / "e:2").touch()
    assert parse_lora(f"{tmp_path}/e:2") == LoraChoice(name=f"{tmp_path}/e:2")
    assert parse_lora(f"{tmp_path}/e:2:3") == LoraChoice(name=f"{tmp_path}/e:2", strength=3.0)
    assert parse_lora(f"{tmp_path}/e:2", files=False) == LoraChoice(name=f"{tmp_path}/e", strength=2.0)
    assert parse_lora("a\0:2").name == "a\0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:0.5", (PLAIN,)),
        (["a:0.5"], (PLAIN,)),
        ({"name": "a", "strength": 0.5}, (PLAIN,)),
        (({"name": "a", "strength": np.float32(0.5)},), (PLAIN,)),
        (PLAIN, (PLAIN,)),
        ([PLAIN], (PLAIN,)),
        (Path("a.safetensors"), (LoraChoice(name="a.safetensors"),)),
        ([{"name": Path("a"), "high": 0.9, "low": -0.6}, "b"], (OF_EXPERTS, LoraChoice(name="b"))),
        (None, ()),
        ([], ()),
    ],
)
def test_each_way_to_write_it(given: Any, expected: tuple[LoraChoice, ...]) -> None:
    for name in ("lora", "loras"):
        assert request_of({"prompt": "p", name: given}).lora == expected


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"nam": "a"},
        {"name": 3},
        {"name": "a", "strength": "1"},
        {"name": "a", "strength": True},
        {"name": "a", "strength": float("nan")},
        {"name": "a", "strength": float("inf")},
        {"name": "a", "strength": 1, "high": 2},
        {"name": "a", "strengths": {}},
        "",
        "a:x",
        ["a", 3],
        [["a"]],
        3,
    ],
    ids=str,
)
def test_what_is_refused(given: Any) -> None:
    with pytest.raises(UsageError) as raised:
        request_of({"prompt": "p", "lora": given})
    assert "\n" not in str(raised.value) and raised.value.expected is not None


def test_the_lines_of_a_prompts_file(tmp_path: Path) -> None:
    """A line's own replace those of the command line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "p"}\n'
        '{"prompt": "p", "lora": "a:0.5"}\n'
        '{"prompt": "p", "loras": [{"name": "a", "high": 0.9, "low": -0.6}, "b"]}\n'
        '{"prompt": "p", "lora": []}\n'
        '{"prompt": "p", "lora": {"name": "a", "strength": "much"}}\n'
    )
    entries, failures = read_entries(file, Line(prompt="", lora=(PLAIN, LoraChoice(name="c"))))
    names = [[one.name for one in entry.line.lora] for entry in entries]
    assert names == [["a", "c"], ["a"], ["a", "b"], []] and entries[2].line.lora[0] == OF_EXPERTS
    assert list(failures) == [5]


# Which there are, and what they bring.


FAST = SamplingDefaults(
    num_steps=4, guidance_scale=1, flow_shift=5, solver="euler", timesteps=(1000.0, 937.5, 833.3, 625.0)
)
ADAPTERS = {
    "style": plain_adapter("style", rank=16),
    "fast": plain_adapter("fast", rank=8, options=FAST),
    "other": plain_adapter("other", rank=4, options=SamplingDefaults(num_steps=8, guidance_scale=1)),
    "biases": plain_adapter("biases", rank=0),
}


def shape(rank: int, index: int = 0, **fields: Any) -> Profile:
    return structs.replace(PROFILE, index=index, options=built_with(lora_rank=rank), **fields)


def of_profiles(*profiles: Profile) -> dict[str, Any]:
    return {"profiles": {one.name: one for one in profiles}, "adapters": ADAPTERS}


ONE = plain_manifest(**of_profiles(shape(16), shape(32, 1, guidance=False), shape(0, 2, num_frames=17)))
BOTH = ("transformer", "transformer_2")
TWO = with_model(ONE, options={"guidance_scale_2": 3.0, "boundary": 0.875}).changed(
    components={name: Component(name, {}) for name in (*ONE.components, "transformer_2")},
    adapters={
        "pair": plain_adapter("pair", rank=8, experts=BOTH),
        "high": plain_adapter("high", rank=12),
        "low": plain_adapter("low", rank=12, experts=("transformer_2",)),
        "fast": plain_adapter("fast", experts=BOTH, options=SamplingDefaults(guidance_scale=2, boundary=0.9)),
    },
)
ARTIFACT, EXPERTS = Artifact(ONE, Path("artifact")), Artifact(TWO, Path("artifact"))


def made(artifact: Artifact = ARTIFACT, /, **options: Any) -> Generation:
    return resolve_request(request_of({"prompt": "a fox", **options}), artifact)


def chosen(artifact: Artifact = ARTIFACT, /, **options: Any) -> list[dict[str, Any]]:
    found = made(artifact, **options)
    assert [one.facts for one in found.loras] == found.options["lora"]
    return list(found.options["lora"])


def refusal(error: type[WanError], artifact: Artifact = ARTIFACT, /, **options: Any) -> WanError:
    with pytest.raises(error) as raised:
        made(artifact, **options)
    return raised.value


def test_what_is_recorded() -> None:
    assert chosen(lora="style") == [{"name": "style", "sha256": "0", "strengths": {"transformer": 1.0}}]
    two = chosen(lora=["style:-0.5", {"name": "biases", "strength": 0}])
    assert [(one["name"], one["strengths"]["transformer"]) for one in two] == [
        ("style", -0.5),
        ("biases", 0.0),
    ]
    plain = made()
    assert plain.loras == () and "lora" not in plain.options  # as videos were that are there already
    metadata = made(lora="style:0.5").metadata(None, {})
    assert metadata["lora"][0]["strengths"] == {"transformer": 0.5} and "lora" not in plain.metadata(None, {})


def test_strengths_of_experts() -> None:
    assert chosen(EXPERTS, lora="pair:0.5")[0]["strengths"] == dict.fromkeys(BOTH, 0.5)
    of_each = {"transformer": 0.9, "transformer_2": -0.6}
    assert chosen(EXPERTS, lora="pair:high=0.9,low=-0.6")[0]["strengths"] == of_each
    assert chosen(EXPERTS, lora="high:0.9")[0]["strengths"] == {"transformer": 0.9}
    assert chosen(EXPERTS, lora="high:high=0.9,low=0")[0]["strengths"] == {"transformer": 0.9}
    assert "low=0" in (refusal(UsageError, EXPERTS, lora="pair:high=0.9").remedy or "")
    assert "leave low=" in (refusal(UsageError, EXPERTS, lora="high:high=0.9,low=1").remedy or "")
    assert "style:0.9" in (refusal(UsageError, lora="style:high=0.9,low=0.6").remedy or "")


def test_an_expert_alone_is_warned_of() -> None:
    (warning,) = made(EXPERTS, lora="high").warnings
    assert "high-noise" in warning
    assert any("low-noise" in one for one in made(EXPERTS, lora="pair:high=0,low=1").warnings)
    for both in ("pair", ["high", "low"], "high:0"):
        assert made(EXPERTS, lora=both).warnings == ()
    assert made(lora="style").warnings == ()


def test_one_that_there_is_not(tmp_path: Path) -> None:
    error = refusal(UsageError, lora="stile")
    assert "style, fast" in str(error.expected) and "wanbuild lora" in str(error.remedy)
    error = refusal(
        UsageError, Artifact(plain_manifest(**of_profiles(shape(8))).changed(adapters={}), tmp_path), lora="x"
    )
    assert "no LoRAs" in str(error.found)
    assert "twice" in refusal(UsageError, lora=["style:1", "style:0.5"]).what
    assert "cannot be read" in refusal(UsageError, lora=str(tmp_path / "x.safetensors")).what


def test_a_file(tmp_path: Path) -> None:
    """By its name without the suffix; one of another digest is another LoRA, whatever its name."""
    file = write_adapter(tmp_path / "style.safetensors", {}, rank=4)
    digest = file_sha256(file)
    found = made(lora=f"{file}:0.5")
    assert found.options["lora"] == [{"name": "style", "sha256": digest, "strengths": {"transformer": 0.5}}]
    assert found.loras[0].file == str(file) and made(lora="style").loras[0].file is None
    assert str(tmp_path) not in str(found.metadata(None, {}))  # a record says nothing of the machine
    assert "twice" in refusal(UsageError, lora=["style", str(file)]).what
    other = write_adapter(tmp_path / "other.safetensors", {}, variant="wan2.2-ti2v")
    assert "another model" in refusal(UsageError, lora=str(other)).what


def test_a_file_is_read_once(tmp_path: Path) -> None:
    """Until it is another one: each line of a prompts file may name it."""
    file = write_adapter(tmp_path / "a:1.safetensors", {}, rank=4)
    assert read_adapter(file) is read_adapter(file)
    write_adapter(file, {}, rank=16)
    assert read_adapter(file).content.rank == 16
    assert chosen(lora=str(file))[0]["name"] == "a:1"  # which is no name of one in an artifact
    for none in ("nothing", "a\0b"):
        with pytest.raises(UsageError):
            read_adapter(tmp_path / none)


def test_those_beside_an_artifact(tmp_path: Path) -> None:
    """As a server has them: by name, with their files."""
    lora = placed(read_adapter(write_adapter(tmp_path / "more.safetensors", {}, rank=4)))
    found = made(replace(ARTIFACT, beside={"more": lora}), lora=["more", "style:0"])
    assert [one.file for one in found.loras] == [str(lora.path), None]


def test_ranks() -> None:
    for loras in (["style"], ["style:0.5", "fast:0"], ["biases"]):
        assert made(lora=loras).profile.options.lora_rank == 16
    error = refusal(ArtifactError, lora=["style", "other:0.1"], num_steps=3, guidance_scale=3)
    assert "16" in str(error.expected) and error.found == "rank 20"
    assert f"{PROFILE.name.replace('cfg', 'nocfg')} (rank 32)" in str(error.remedy)
    assert made(lora=["style", "other:0.1"], profile="96x64x9-b1-nocfg").profile.options.lora_rank == 32
    just = Artifact(plain_manifest(**of_profiles(shape(16), shape(20, 1, guidance=False))), Path("artifact"))
    assert "(rank 20)" in str(refusal(ArtifactError, just, lora=["style", "other"], guidance_scale=3).remedy)
    error = refusal(ArtifactError, lora=["style"], num_frames=17)
    assert "no slots" in error.what and "--lora-rank 16" in str(error.remedy) and "lora" in error.fields
    assert "--lora-rank 16" in str(refusal(ArtifactError, lora="biases", num_frames=17).remedy)
    assert made(lora=["style:0"], num_frames=17).options["lora"]  # which changes nothing
    # Each expert has slots of its own.
    assert made(EXPERTS, lora=["high", "low"]).loras
    assert refusal(ArtifactError, EXPERTS, lora=["pair", "low"]).found == "rank 20"


def test_the_defaults_that_one_brings() -> None:
    found = made(lora="fast")
    assert not found.profile.guidance and found.options["guidance_scale"] == 1.0
    assert found.options.items() >= {"num_steps": 4, "solver": "euler", "flow_shift": 5.0}.items()
    assert found.options["timesteps"] == list(FAST.timesteps or ()) and found.warnings == ()
    assert found.manifest is ONE  # the artifact is the same
    assert made(lora=["style", "fast:0.5"], profile="96x64x9-b1-nocfg").options["num_steps"] == 4
    assert made(lora="fast:0").options["num_steps"] == 40


def test_guidance_is_turned_off_in_a_profile_that_has_it() -> None:
    """One artifact makes a video of 40 guided steps, and one of 4 without."""
    one = Artifact(plain_manifest(**of_profiles(shape(16))), Path("artifact"))
    plain, fast = made(one), made(one, lora="fast")
    assert plain.profile == fast.profile and fast.profile.guidance
    assert [len(each.prompts) for each in (plain, fast)] == [2, 1]
    assert [sum(part.guided for part in each.ranges) for each in (plain, fast)] == [40, 0]
    assert made(one, lora="fast", guidance_scale=3).options["guidance_scale"] == 3.0
    assert "guidance is off" in refusal(UsageError, one, lora="fast", guidance_end=0.5).what


def test_what_a_request_gives_wins() -> None:
    found = made(lora="fast", num_steps=6, solver="unipc", guidance_scale=3)
    assert found.profile.guidance and found.options.items() >= {"num_steps": 6, "solver": "unipc"}.items()
    assert "timesteps" not in found.options and found.options["flow_shift"] == 5.0


def test_those_of_the_model_are_for_other_steps() -> None:
    own = with_model(ONE, {"num_steps": 2, "timesteps": (900, 500)}).changed(adapters=ADAPTERS)
    artifact = Artifact(own, Path("artifact"))
    assert made(artifact).options["timesteps"] == [900.0, 500.0]
    found = made(artifact, lora="other")
    assert found.options["num_steps"] == 8 and "timesteps" not in found.options


def test_two_that_contradict_each_other() -> None:
    both: dict[str, Any] = {"lora": ["fast", "other"], "profile": "96x64x9-b1-nocfg"}
    error = refusal(UsageError, **both)
    assert error.fields == ("lora", "num_steps") and error.found == "4 and 8"
    assert made(**both, num_steps=8).options["num_steps"] == 8
    assert made(**both, timesteps=[900, 500]).options["timesteps"] == [900.0, 500.0]
    assert made(lora=["fast", "other:0"]).options["num_steps"] == 4
    same = {"again": structs.replace(ADAPTERS["fast"], sha256="1"), **ADAPTERS}
    again = Artifact(ONE.changed(adapters=same), Path("artifact"))
    assert made(again, lora=["fast", "again"]).options["num_steps"] == 4
    # With other timesteps, and as many steps: those of neither.
    more = SamplingDefaults(num_steps=4, timesteps=(900.0, 800.0, 700.0, 600.0))
    moved = Artifact(
        ONE.changed(adapters={**ADAPTERS, "more": plain_adapter("more", options=more)}), Path("a")
    )
    assert refusal(UsageError, moved, lora=["fast", "more"]).fields == ("lora", "timesteps")
    assert "timesteps" not in made(moved, lora=["fast", "more"], num_steps=4).options


def test_defaults_of_two_experts() -> None:
    found = made(EXPERTS, lora="fast").options
    assert (found["guidance_scale"], found["guidance_scale_2"], found["boundary"]) == (2.0, 2.0, 0.9)


def test_a_job_takes_them_to_another_process(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "more.safetensors", {}, rank=4)
    job = Job("1", made(lora=["style:0", f"{file}:0.5"]), ())
    there = from_wire(to_wire(pack(job)), PackedJob).unpack(ONE).generation
    assert there.loras == job.generation.loras and there.options == job.generation.options


# Their files, when a generation is made.


SHAPES = {"transformer/blocks/norm2/bias": (3, 8)}


def lora_of(path: Path, strength: float, file: bool) -> ChosenLora:
    return ChosenLora(
        name=path.stem,
        sha256=file_sha256(path),
        strengths={"transformer": strength},
        file=str(path) if file else None,
    )


def test_of_the_artifact_and_of_a_file(tmp_path: Path) -> None:
    manifest = plain_manifest(adapters={"style": plain_adapter("style")})
    (tmp_path / "adapters").mkdir()
    own = write_adapter(tmp_path / "adapters" / "style.safetensors", SHAPES)
    other = write_adapter(tmp_path / "other.safetensors", SHAPES, rank=3)
    loras = lora_of(own, 0.5, file=False), lora_of(other, -1.0, file=True)
    artifact = Artifact(manifest, tmp_path)
    applied = applied_loras(loras, artifact)
    assert [(one.file.path, one.strengths["transformer"]) for one in applied] == [(own, 0.5), (other, -1.0)]
    again = applied_loras(loras, artifact)
    assert all(one.file is two.file for one, two in zip(applied, again, strict=True))
    assert applied_loras((), artifact) == ()


def test_another_file_than_was_chosen(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "style.safetensors", SHAPES)
    lora, unread = lora_of(path, 1.0, file=True), cast(Any, None)
    write_adapter(path, SHAPES, rank=5)
    with pytest.raises(AdapterError) as caught:
        applied_loras([lora], unread)
    assert (caught.value.expected, caught.value.found) == (lora.sha256, file_sha256(path))


def test_one_that_the_artifact_has_no_more(tmp_path: Path) -> None:
    """As where a server opens a model again whose adapters were removed."""
    path = write_adapter(tmp_path / "style.safetensors", SHAPES)
    with pytest.raises(AdapterError, match="style"):
        applied_loras([lora_of(path, 1.0, file=False)], Artifact(plain_manifest(), tmp_path))
