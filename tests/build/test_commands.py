"""``wanbuild inspect`` and recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from helpers.manifests import plain_manifest, plain_parameter, plain_target, program_set, with_model
from wanbuild import build as build_module
from wanbuild import cli as commands
from wanbuild import recipe
from wanbuild.build import convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.inspect import summary, table
from wanbuild.conversion.convert_request import ConvertRequest, convert_request
from wanbuild.hub.repository import is_hub_id
from wanbuild.programs.compile import shapes
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.table import variants
from wancli.console import run
from wanrun.artifact.manifest import NEEDED, Component, read_manifest
from wanrun.errors import UsageError
from wanrun.rows import record_of

REPOSITORY = Path(__file__).parents[2]
TO_DEFAULTS = 'source = "s"\nartifact = "a"\n[convert.defaults]\n'


def test_inspect(toy_artifact: Path) -> None:
    runner = CliRunner()
    text = runner.invoke(commands.wanbuild, ["inspect", "--artifact", str(toy_artifact)])
    assert text.exit_code == 0
    for part in ("wan2.1-t2v", "96x64x9-b1-cfg", "transformer", "text_encoder", "vae", "denoise_step"):
        assert part in text.output
    data = json.loads(
        runner.invoke(commands.wanbuild, ["inspect", "--artifact", str(toy_artifact), "--json"]).output
    )
    manifest = read_manifest(toy_artifact)
    assert data["content_digest"] == manifest.content_digest
    assert data["components"]["transformer"]["bytes"] == manifest.components["transformer"].nbytes
    path = "blocks/attn1/to_q/weight"
    assert data["components"]["transformer"]["shapes"][path] == ["float32", [3, 40, 40]]
    assert data["components"]["transformer"]["axes"][path] == ["layers", "rotary_heads", "embed"]


def test_inspect_shows_a_mesh() -> None:
    """Its axes in the order of the devices, what they cut, and what one device holds of each component."""
    parameter = msgspec.structs.replace(plain_parameter((8, 6), "float32"), axes=("heads", "embed"))
    components = dict.fromkeys(NEEDED, Component("weights/c", {"w": parameter}))
    rules = {"heads": ("tensor",), "embed": ("fsdp",)}
    lines = []
    for mesh in ({}, {"context": 2, "data": 2}, {"data": 2, "tensor": 4}):
        programs = msgspec.structs.replace(program_set({}), mesh=mesh, rules=rules if mesh else {})
        target = plain_target(program_set=programs.key)
        manifest = plain_manifest(
            components=components,
            program_sets={programs.key: programs},
            targets={"cpu": target},
            source={"repository": "r", "files": {}},
        )
        said = summary(manifest)["targets"]["cpu"]
        nbytes = 192 // mesh.get("tensor", 1)
        expected = {"mesh": mesh, "rules": {k: list(v) for k, v in rules.items()}} if mesh else {}
        assert {key: said[key] for key in ("mesh", "rules") if key in said} == expected
        assert said.get("bytes_per_device") == (dict.fromkeys(NEEDED, nbytes) if mesh else None)
        lines.append([line for line in table(manifest) if line.startswith("  ")])
    assert lines[0] == [] and [re.findall(r"[a-z_]+[= ]\d+|: \d+", " ".join(one)) for one in lines[1:]] == [
        [
            "data=2",
            axis,
            f": {devices}",
            *(f"{name} {nbytes}" for name in ("text_encoder", "transformer", "vae")),
        ]
        for axis, devices, nbytes in (("context=2", 4, 192), ("tensor=4", 8, 48))
    ]
    assert "heads" not in " ".join(lines[1]) and "heads over tensor" in " ".join(lines[2])


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "artifacts").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_recipes_are_read(path: Path) -> None:
    plan = recipe.read_recipe(path)
    assert plan.source == str(path.parent / "checkpoint") or is_hub_id(plan.source)
    (row,) = [row for name, row in variants().items() if path.stem.startswith(f"{name}-")]
    assert set(plan.compile["sizes"]) <= set(row.sizes)
    assert plan.compile["frames"] == [row.num_frames]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('artifact = "a"', "source is missing"),
        ('source = "a"', "missing required field `artifact`"),
        ('source = "s"\nartifact = "a"\n[convert]\nspeed = 1', "unknown field `speed` - at `$.convert`"),
        (
            'source = "s"\nartifact = "a"\n[compile]\nframes = 81',
            "got `int` - at `$.compile.frames`",
        ),
        ('source = "s"\nartifact = "a"\n[compile]\nguidance = [1]', "`$.compile.guidance[0]`"),
        ('source = "s"\nartifact = "a"\n[compile]\nsizes = ["big"]', "compile.sizes"),
        (
            'source = "s"\nartifact = "a"\n[convert]\nweights_dtype = "int3"',
            "weights_dtype cannot be",
        ),
        (
            'source = "s"\nartifact = "a"\n[compile]\nscheduler_dtype = "float16"',
            "compile.scheduler_dtype cannot be",
        ),
        (
            'source = "s"\nartifact = "a"\n[compile]\nloop = "scans"',
            "expected both or step or scan",
        ),
        ('source = "s"\nartifact = "a"\n[compile]\nloop = ["scan"]', "`$.compile.loop`"),
        ('source = "s"\nartifact = "a"\n[compile]\nmax_steps = 0', "`int` >= 1 - at `$.compile.max_steps`"),
        ('source = "s"\nartifact = "a"\ncompile = 3', "`$.compile`"),
        (TO_DEFAULTS + "speed = 1", "unknown field `speed` - at `$.convert.defaults`"),
        (TO_DEFAULTS + "steps = 4.0", "`int | null`, got `float` - at `$.convert.defaults.steps`"),
        (TO_DEFAULTS + "steps = true", "`$.convert.defaults.steps`"),
        (TO_DEFAULTS + 'fps = "16"', "`$.convert.defaults.fps`"),
        (TO_DEFAULTS + "timesteps = 1000", "`$.convert.defaults.timesteps`"),
        (TO_DEFAULTS + "timesteps = [1, false]", "`$.convert.defaults.timesteps[1]`"),
        (TO_DEFAULTS + "timesteps = []", "length >= 1 - at `$.convert.defaults.timesteps`"),
        ('source = "s"\nartifact = "a"\n[convert]\ndefaults = 3', "`$.convert.defaults`"),
        ("source = ", "cannot be read"),
    ],
)
def test_a_recipe_that_is_not_understood(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recipe.read_recipe(path)
    assert part in str(caught.value)


def test_build_passes_a_recipe_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanbuild.check import verify

    calls: list[object] = []
    monkeypatch.setattr(build_module, "convert_aloud", lambda request, *_: calls.append(("convert", request)))
    monkeypatch.setattr(build_module, "compile_artifact", lambda *a: calls.append(("compile", *a[:1])))
    monkeypatch.setattr(verify, "record", lambda artifact, report: calls.append(("record", artifact)))
    monkeypatch.setattr(build_module, "mark_built", lambda artifact, digest: None)
    path = tmp_path / "recipe.toml"
    path.write_text('source = "s"\nartifact = "a"\n[compile]\nframes = [81, 5]\nsizes = ["64*32"]\n')
    assert CliRunner().invoke(commands.wanbuild, ["build", str(path)]).exit_code == 0
    artifact = tmp_path / "a"
    assert calls == [
        ("convert", convert_request(str(tmp_path / "s"), artifact, {"force": False})),
        ("compile", CompileRequest(artifact, frames=[81, 5], sizes=[(64, 32)])),
        ("record", artifact),
    ]
    path.write_text('source = "s"\nartifact = "a"\n[compile]\ntargets = ["h100", "v6e-8-w8a8"]\n')
    assert CliRunner().invoke(commands.wanbuild, ["build", str(path)]).exit_code == 0
    request = CompileRequest(artifact, ["h100", "v6e-8-w8a8"])
    assert calls[-1] == ("compile", request)  # nothing runs here


@pytest.mark.slow
def test_a_recipe_is_built_again_if_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wanbuild.check import verify

    recorded: list[Path] = []
    monkeypatch.setattr(build_module, "compile_artifact", lambda request, report: None)
    monkeypatch.setattr(verify, "record", lambda artifact, report: recorded.append(artifact))
    write_toy(tmp_path / "toy")
    path = tmp_path / "recipe.toml"
    path.write_text('source = "toy"\nartifact = "a"\n')
    build = ["build", str(path), "--if-changed"]

    def built() -> bool:
        before = len(recorded)
        assert run(commands.wanbuild, build) == 0
        return len(recorded) > before

    assert built() and not built()
    assert capsys.readouterr().out.endswith(f"a is built as {path} says, and nothing has changed\n")
    config = tmp_path / "toy" / "transformer" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert built() and not built()
    path.write_text('source = "toy"\nartifact = "a"\n[convert]\nweights_dtype = "float32"\n')
    assert built() and not built()
    assert read_manifest(tmp_path / "a").dtypes["transformer"].weights == "float32"
    monkeypatch.setattr(recipe, "__version__", "0.0.0")
    assert built() and not built()
    assert run(commands.wanbuild, ["build", str(path)]) == 2  # it exists, as without the option


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """What ``wanbuild compile`` asks for, in place of compiling it."""
    requests: list[CompileRequest] = []
    monkeypatch.setattr(build_module, "compile_artifact", lambda request, report: requests.append(request))
    return requests


@pytest.mark.thorough
@pytest.mark.parametrize("variant", variants())
def test_the_default_profile_is_the_variant_s(
    tmp_path: Path, compiled: list[CompileRequest], variant: str
) -> None:
    """Size and frames, each of them alone too, on the command line and in a recipe."""
    row, artifact = variants()[variant], tmp_path / "artifact"
    write_toy(tmp_path / "toy", variant)
    convert(ConvertRequest(tmp_path / "toy", artifact))
    for options in ([], ["--size", "96x64"], ["--frames", "9", "--frames", "5"]):
        arguments = ["compile", "--artifact", str(artifact), *options]
        assert CliRunner().invoke(commands.wanbuild, arguments).exit_code == 0
    commands._compile(CompileRequest(artifact, ["cpu"], frames=[13]))
    size, frames = row.sizes[0], row.num_frames
    manifest = read_manifest(artifact)
    built = [[(s.width, s.height, s.num_frames) for s in shapes(request, manifest)] for request in compiled]
    assert built == [[(*size, frames)], [(96, 64, frames)], [(*size, 9), (*size, 5)], [(*size, 13)]]
    assert all(request.options == BuildOptions() for request in compiled)
    assert [shape.guidance for shape in shapes(compiled[0], manifest)] == [row.guidance_scale > 1]


def test_an_artifact_of_a_later_variant_has_no_default_profile(artifact_copy: Path) -> None:
    manifest = read_manifest(artifact_copy)
    with_model(manifest, variant="wan3-t2v").write(artifact_copy)
    before = (artifact_copy / "manifest.json").read_bytes()
    assert run(commands.wanbuild, ["compile", "--artifact", str(artifact_copy)]) == 3
    assert (artifact_copy / "manifest.json").read_bytes() == before


def test_build_options_are_passed_on(toy_artifact: Path, compiled: list[CompileRequest]) -> None:
    given = {
        "dtype": "float32",
        "vae_dtype": "bfloat16",
        "vae_precision": "highest",
        "scheduler_dtype": "bfloat16",
        "vae_decode_chunk": 2,
        "vae_encode_chunk": 3,
        "vae_tile": 64,
        "loop": "scan",
        "max_steps": 7,
        "lora_rank": 32,
        "guiders": ("cfg-zero",),
        "video_to_video": True,
        "nag": True,
    }
    assert given.keys() == {*BuildOptions.__struct_fields__}
    flags = {
        "guiders": ("--guider", "cfg-zero"),
        "video_to_video": ("--video-to-video",),
        "nag": ("--nag",),
    }
    options = [
        text
        for name, value in given.items()
        for text in flags.get(name, (f"--{name.replace('_', '-')}", str(value)))
    ]
    arguments = ["compile", "--artifact", str(toy_artifact), *options]
    assert CliRunner().invoke(commands.wanbuild, arguments).exit_code == 0
    assert [request.options for request in compiled] == [BuildOptions(**given)]


def test_guidance_and_reference_images_are_passed_on(
    toy_artifact: Path, tmp_path: Path, compiled: list[CompileRequest]
) -> None:
    """Without a word on guidance the model's default scale decides: the request has none."""
    arguments = ["compile", "--artifact", str(toy_artifact)]
    for options in ([], ["--guidance"], ["--no-guidance", "--reference-images", "2"]):
        assert CliRunner().invoke(commands.wanbuild, [*arguments, *options]).exit_code == 0
    found = [(request.guidance, request.num_references) for request in compiled]
    assert found == [((), 0), ((True,), 0), ((False,), 2)]
    manifest = read_manifest(toy_artifact)
    for scale in (0.0, 1.0, 1.5, 5.0):
        changed = with_model(manifest, {"guidance_scale": scale})
        for request, expected in zip(compiled, (scale > 1, True, False), strict=True):
            assert [shape.guidance for shape in shapes(request, changed)] == [expected]
    assert [shape.num_references for shape in shapes(compiled[2], manifest)] == [2]

    path = tmp_path / "recipe.toml"
    path.write_text('source = "s"\nartifact = "a"\n[compile]\nnum_references = 3\nvae_encode_chunk = 2\n')
    read = recipe.read_recipe(path).compile
    commands._compile(record_of(CompileRequest, {"artifact": toy_artifact, **read}))
    assert (compiled[-1].num_references, compiled[-1].options.vae_encode_chunk) == (3, 2)


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--vae-encode-chunk", "0", "0 is not in the range"),
        ("--reference-images", "-1", "-1 is not in the range"),
        ("--scheduler-dtype", "float16", "'bfloat16', 'float32'"),
        ("--loop", "scans", "'both', 'step', 'scan'"),
        ("--max-steps", "0", "0 is not in the range"),
        ("--max-steps", "100000", "out of range"),
    ],
)
def test_build_options_that_do_not_exist(
    toy_artifact: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, part: str
) -> None:
    assert run(commands.wanbuild, ["compile", "--artifact", str(toy_artifact), option, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and option in line and part in line


def test_a_toy_of_an_unknown_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(commands.wanbuild, ["toy", str(tmp_path / "toy"), "--variant", "wan2.1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(f"'{variant}'" in line for variant in variants()) and "wan2.1" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_inspect_shows_both_guidance_scales(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.2-t2v")
    convert(ConvertRequest(tmp_path / "toy", tmp_path / "artifact"))
    text = CliRunner().invoke(commands.wanbuild, ["inspect", "--artifact", str(tmp_path / "artifact")]).output
    (line,) = (line for line in text.splitlines() if "0.875" in line)
    assert "guidance 4 " in line and " 3 below" in line and "transformer_2" in text
