"""``wanbuild compile``: its options are passed on, and what is not given is the model's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.generations import toy_manifest
from helpers.manifests import with_model
from helpers.terminal import Terminal, until
from wanbuild import build
from wanbuild import cli as commands
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.programs.compile import shapes
from wanbuild.progress_line import ProgressLine
from wanbuild.recipe import read_recipe
from wanbuild.variants.table import variants
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.rows import record_of
from wanrun.terminal import status


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """What ``wanbuild compile`` asks for, in place of compiling it."""
    requests: list[CompileRequest] = []
    monkeypatch.setattr(build, "compile_artifact", lambda request, report: requests.append(request))
    return requests


@pytest.mark.thorough
@pytest.mark.parametrize("variant", variants())
def test_the_default_profile_is_the_variant_s(
    tmp_path: Path, compiled: list[CompileRequest], variant: str
) -> None:
    """Size and frames, each of them alone too, on the command line and in a recipe."""
    row, artifact = variants()[variant], tmp_path / "artifact"
    artifact.mkdir()
    toy_manifest(variant).write(artifact)
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
    read = read_recipe(path).compile
    commands._compile(record_of(CompileRequest, {"artifact": toy_artifact, **read}))
    assert (compiled[-1].num_references, compiled[-1].options.vae_encode_chunk) == (3, 2)


@pytest.mark.parametrize(
    ("command", "option", "value", "parts"),
    [
        ("compile", "--reference-images", "-1", ["-1 is not in the range"]),
        ("compile", "--scheduler-dtype", "float16", ["'bfloat16', 'float32'"]),
        ("compile", "--loop", "scans", ["'both', 'step', 'scan'"]),
        ("compile", "--max-steps", "0", ["0 is not in the range"]),
        ("compile", "--max-steps", "100000", ["out of range"]),
        ("toy", "--variant", "wan2.1", [f"'{variant}'" for variant in variants()]),
    ],
)
def test_values_that_options_do_not_take(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    value: str,
    parts: list[str],
) -> None:
    assert run(commands.wanbuild, [command, str(tmp_path / "a"), option, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and option in line and all(part in line for part in parts)
    assert list(tmp_path.iterdir()) == []


# How much of a loop is done; the line itself is tested with the runtime's status.


def test_progress_counts_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BLINK_SECONDS", 0.01)
    stream = Terminal()
    with ProgressLine(800, "convert", "tensor", stream=stream) as progress:

        def work() -> None:
            for _ in range(100):
                progress.advance()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: "converting (800 of 800 tensors), 0 s" in stream.getvalue())
