"""Records results of small profiles, on this machine, for targets whose chips are not here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from wanbuild.check.verify import with_golden
from wanbuild.devices import open_exactly
from wanbuild.options import BuildOptions, CompileRequest
from wanbuild.programs.compile import compile_artifact
from wanbuild.programs.proxies import proxies_of
from wanbuild.programs.shape import Shape
from wanbuild.staging import changing
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.named import WEIGHTS
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import FORMS
from wanrun.artifact.select import select_target
from wanrun.errors import WanError
from wanrun.generation.load import load
from wanrun.machine.memory import host_memory_bytes
from wanrun.replay.golden import Golden, replayed
from wanrun.temporary import temporary_folder

Report = Callable[[str], None]

STREAMED_FROM = 0.5
"""The part of this machine's memory that a transformer may take before its layers are streamed."""


def record_proxies(folder: Path, report: Report) -> None:
    """Records the results of an artifact's proxies that have none; what cannot be recorded is reported.

    Args:
        folder: the artifact's folder.
        report: gets one line per proxy.
    """
    artifact = open_artifact(folder.resolve())
    manifest = artifact.manifest
    for name in sorted(_unrecorded(manifest)):
        proxy = manifest.profiles[name]
        report(f"{name}: its video is made on this machine, by which the chips' executables are checked")
        try:
            golden = _recorded_here(artifact, proxy)
        except (WanError, MemoryError, OSError, RuntimeError) as error:  # XLA's are RuntimeErrors
            report(f"{name}: not recorded, so wanrun will refuse what it stands for: {error}")
            continue
        with changing(artifact.folder) as now:
            same = now.manifest.content_digest == manifest.content_digest
            if not same or now.manifest.profiles.get(name) != proxy:
                report(f"{name}: not recorded: the artifact was changed meanwhile")
                return
            with_golden(now, proxy, golden).write()
        report(f"{name}: recorded")


def _unrecorded(manifest: Manifest) -> set[str]:
    """Returns the names of the built proxies that have no recorded result."""
    return {
        small.name
        for target in manifest.targets.values()
        for small in proxies_of(manifest, target).values()
        if small is not None and small.name in target.executables and small.name not in manifest.golden
    }


def _recorded_here(artifact: Artifact, proxy: Profile) -> Golden:
    """Compiles a profile for this machine's CPU, in a folder of its own, and returns what it makes.

    Raises:
        WanError, OSError, RuntimeError: if it cannot be compiled, or cannot run here.
    """
    manifest = artifact.manifest
    streams = manifest.components[TRANSFORMERS[0]].nbytes > STREAMED_FROM * host_memory_bytes()
    form = next(form for form in FORMS.values() if form.streams == streams)
    options = BuildOptions.of(replace(proxy.options, loop=form.name))
    shape = Shape.of(proxy)
    with temporary_folder(Path(tempfile.gettempdir())) as folder:
        tokenizer = manifest.tokenizer.file
        (folder / tokenizer).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.folder / tokenizer, folder / tokenizer)
        empty = manifest.changed(profiles={}, program_sets={}, targets={}, golden={}, embeddings={})
        empty.write(folder)
        compile_artifact(
            CompileRequest(
                folder,
                ["cpu"],
                sizes=[(shape.width, shape.height)],
                frames=[shape.num_frames],
                guidance=[shape.guidance],
                num_videos=shape.num_videos,
                num_references=shape.num_references,
                options=options,
            ),
            lambda line: None,
        )
        built = open_artifact(folder)
        environment = select_target(built, built.manifest.profiles[proxy.name]).target.environment
        open_exactly(environment["platform"], 1)
        with load(
            built,
            profile=proxy.name,
            weights=str(artifact.folder / WEIGHTS.folder),
            memory="stream" if streams else "low",
            embeddings="none",
            lazy=True,
            progress=True,
        ) as pipeline:
            replay = replayed(pipeline, environment)
            replay.prove(pipeline.session(pipeline.profile), form.name)
            return replay.golden
