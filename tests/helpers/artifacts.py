"""Toy checkpoints and artifacts that the tests of a run share: each is made once, by any worker."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from wanbuild.build_options import CompileRequest

MEDIA_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "wan2.1-i2v": {},
    "wan2.1-flf2v": {},
    "wan2.2-i2v": {"loop": "all", "guiders": ("cfg-zero", "skip-layer")},
    "wan2.1-vace": {"references": (0, 2)},
    "wan2.2-vace": {"references": (2,), "loop": "all", "shipping": True},
    "wan2.2-animate": {  # frames enough to share five
        "guidance": (False, True),
        "num_frames": 13,
        "loop": {False: "all", True: "step"},
        "shipping": ("encode_image", "encode_video", "decode_video"),
    },
}
"""The profiles of ``media_toy``, of 96x64 and 9 frames: 72 latent tokens and more, see ``ti2v_artifact``.

Every kind of program, but for face adapters, is in one that is compiled with the options that ship, or in
``toy_artifact``. What a transformer is given is in one that has all forms of the loop; others have steps.
"""

_STREAMED = ("context", "enter", "keys_blocks", "blocks", "keys_vace_blocks", "vace_blocks")
OWN_PROGRAMS = (
    *("encode_image", "encode_video", "encode_start", "prepare", "denoise_step", "denoise_loop"),
    *(f"stream_{name}" for name in (*_STREAMED, "keys_face_adapter", "face_adapter", "leave")),
)
"""What differs between the variants' toys. The others, of one size, are those of ``toy_artifact``."""


LONG_TEXTS = ("encode_text_128", "encode_text_256", "encode_text")
"""The programs of prompts that are longer than captions are."""

_ENCODERS = ("encode_text_64", "encode_image", "encode_video", "encode_start", "encode_past")
CODERS = frozenset({*LONG_TEXTS, *_ENCODERS, "decode_first", "decode_video", "decode_tiny"})
"""The programs beside the steps."""


def build_artifact(
    checkpoint: Path,
    folder: Path,
    size: tuple[int, int] = (96, 64),
    num_frames: int = 9,
    guidance: tuple[bool, ...] = (True,),
    references: Sequence[int] = (0,),
    mesh: str = "",
    loop: str | Mapping[bool, str] = "both",
    shipping: bool | Sequence[str] = False,
    rank: int = 0,
    quantise: str | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
    guiders: Sequence[str] = (),
    video_to_video: bool = False,
    nag: bool = False,
    variant: str | None = None,
    configs: Mapping[str, Path] = MappingProxyType({}),
    dtype: str = "float32",
) -> None:
    """Makes an artifact, float32 throughout, with a profile for every choice of guidance and references.

    Args:
        checkpoint: the checkpoint.
        folder: the artifact.
        size: width and height in pixels.
        num_frames: the frames.
        guidance: with guidance, without, or both.
        references: numbers of reference images.
        mesh: as ``--mesh`` takes it.
        loop: the forms of the loop, of all profiles, or of those with guidance and of those without.
        shipping: compile with the options that ship, all or these programs; others as ``compile_fast`` does,
            but for those of ``toy_artifact``: they are compiled already, and run five times as fast.
        rank: of the slots.
        quantise: as ``--quantise`` takes it.
        files: weight files by component, as of ``ConvertRequest``.
        guiders: those beside ``cfg``.
        video_to_video: whether steps can begin with a video.
        nag: whether its steps can take a negative prompt without guidance.
        variant: as ``--variant`` takes it.
        configs: config files by part, as of ``ConvertRequest``.
        dtype: another one of the transformer and the text encoder.
    """
    from wanbuild.build import compile_artifact, convert
    from wanbuild.build_options import BuildOptions, CompileRequest
    from wanbuild.conversion.chosen import parse_quantise
    from wanbuild.conversion.convert_request import ConvertRequest
    from wanbuild.targets.parsing import parse_mesh

    stored = dict.fromkeys(("transformer", "text_encoder", "image_encoder"), dtype)
    own = {"files": files, "quantise": parse_quantise(quantise, ()), "variant": variant, "configs": configs}
    convert(ConvertRequest(checkpoint, folder, stored, **own))
    forms = {guidance: loop} if isinstance(loop, str) else {(one,): loop[one] for one in guidance}
    for (guided, form), count in itertools.product(forms.items(), references):
        request = CompileRequest(
            folder,
            ["cpu"],
            [size],
            [num_frames],
            guided,
            num_references=count,
            options=BuildOptions(
                dtype=dtype,
                loop=form,
                lora_rank=rank,
                guiders=guiders,
                video_to_video=video_to_video,
                nag=nag,
            ),
            mesh=parse_mesh(mesh),
        )
        if shipping is True:
            compile_artifact(request, print)
            continue
        others: tuple[str, ...] = ("decode_tiny",)
        if (size, num_frames) != ((96, 64), 9):
            others += ("decode_first", "decode_video")
        fast = [name for name in (*OWN_PROGRAMS, *others) if name not in (shipping or ())]
        compile_fast(request, None if mesh else fast)


def compile_fast(request: CompileRequest, programs: Sequence[str] | None = None) -> None:
    """Does what ``compile_artifact`` does, but compiles some programs, or all, with ``ARTIFACT_COMPILE``.

    Those that encode and decode with ``FAST_COMPILE``. There what is computed is the subject.
    """
    from helpers.compiling import ARTIFACT_COMPILE, FAST_COMPILE
    from wanbuild import build as build_module
    from wanbuild.programs import compile as compiling
    from wanbuild.targets.target import TargetSpec, resolve_target

    def resolve(name: str, mesh: Mapping[str, int]) -> TargetSpec:
        own, fast = resolve_target(name, mesh), dict(ARTIFACT_COMPILE)
        if programs is None:
            own = replace(own, options=fast)
        chosen = CODERS if programs is None else programs
        options = {each: dict(FAST_COMPILE) if each in CODERS else fast for each in chosen}
        return replace(own, program_options=options)

    with mock.patch.object(compiling, "resolve_target", resolve):
        build_module.compile_artifact(request, print)


def build_on_mesh(store: str, checkpoint: str, folder: str, mesh: str) -> None:
    """Builds an artifact for a mesh, in a process that has as many devices: see ``helpers.devices``.

    Args:
        store: where ``compiled_once`` keeps what is compiled.
        checkpoint: the checkpoint.
        folder: the artifact.
        mesh: as ``--mesh`` takes it.
    """
    from helpers.compiling import compiled_once

    with compiled_once(Path(store)):
        build_artifact(Path(checkpoint), Path(folder), num_frames=5, mesh=mesh, loop="step")


def _base(factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of the test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def compiled_store(factory: pytest.TempPathFactory) -> Path:
    """Where ``compiled_once`` keeps what the tests of this run compile; of all runs, in WAN_TEST_CACHE."""
    return Path(os.environ.get("WAN_TEST_CACHE", _base(factory))) / "compiled"


def same_profile(artifact: Path, targets: Sequence[str]) -> CompileRequest:
    """Returns the request that compiles an artifact's only profile for other targets."""
    from wanbuild.build_options import BuildOptions, CompileRequest
    from wanrun.artifact.manifest import read_manifest

    (profile,) = read_manifest(artifact).profiles.values()
    size, options = (profile.width, profile.height), BuildOptions.of(profile.options)
    return CompileRequest(artifact, targets, [size], [profile.num_frames], options=options)


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Makes a folder once for all workers of the test run.

    Where WAN_TEST_CACHE names a folder, what is compiled is kept in it for later runs.
    """
    base = _base(factory)
    folder = base / f"shared-{name}"
    with FileLock(base / f"shared-{name}.lock"):
        if not folder.exists():
            building = base / f"building-{name}"  # so that what failed half-way is not taken for complete
            shutil.rmtree(building, ignore_errors=True)
            from helpers.compiling import compiled_once  # imports jax, which reads the environment

            with compiled_once(compiled_store(factory)):
                make(building)
            building.rename(folder)
    return folder


def far_toy(factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A toy of AnyFlow-FAR and its artifact, float32 throughout: chunks of 1, 3, 3, 3 and 2 latent frames.

    Of the last one the first and a part of the second are compressed. Its programs have slots of LoRAs. Not
    to be changed.
    """
    from helpers.loras import RANK
    from wanbuild.toy.toy_checkpoint import write_toy

    checkpoint = shared(
        factory, "anyflow-far", lambda folder: write_toy(folder, "anyflow-far-wan2.1", flow_shift=5.0)
    )

    def build(folder: Path) -> None:
        build_artifact(checkpoint, folder, guidance=(False,), num_frames=45, rank=RANK)

    return checkpoint, shared(factory, "anyflow-far-artifact", build)


def with_cpu_levels(checkpoint: Path, factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy with every CPU level of this machine beside its own target. Not to be changed.

    With the options that ship, but for encoders of long prompts, which are those of short ones in other
    shapes. Of one frame, whose decoder takes a fifth of the time to compile that one of several frames
    takes; 60 tokens, see ``ti2v_artifact``.
    """
    from wanbuild.targets.cpu_levels import CPU_LEVELS
    from wanrun.machine.cpu import cpu_features

    names = tuple(name for name, level in CPU_LEVELS.items() if set(level.features) <= set(cpu_features()))
    assert names, "this CPU is below all levels"

    def build(artifact: Path) -> None:
        build_artifact(checkpoint, artifact, size=(160, 96), num_frames=1, loop="step")
        compile_fast(same_profile(artifact, names), LONG_TEXTS)

    return shared(factory, f"levels-{'-'.join(names)}", build)
