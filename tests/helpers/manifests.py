"""Manifests that say no more than a test needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from wanbuild.conversion.orbax import plan_layout
from wanrun.artifact.adapter import ADAPTER_METADATA, Adapter, AdapterContent, Lora, SamplingDefaults
from wanrun.artifact.manifest import NEEDED, Attested, Embedding, Manifest, Recorded, Tokenizer, read_manifest
from wanrun.artifact.model import Chunking, Defaults, ImageProcessor, Model, Pyramid
from wanrun.artifact.parameters import Component, DtypePolicy, Parameter
from wanrun.artifact.programs import Kernels, PlainFile, Profile, ProfileOptions, Program, ProgramSet
from wanrun.artifact.schedules import Schedule
from wanrun.artifact.targets import Executable, Requirements, Target
from wanrun.artifact.task import HeldFrame, Input, Modes, Task, Windows
from wanrun.files import sha256_of


def plain_manifest(**fields: Any) -> Manifest:
    """A manifest of nothing but these fields, and of components without parameters."""
    tokenizer = Tokenizer(file="tokenizer.json", sha256="", max_length=512, pad_id=0)
    nothing: dict[str, Any] = {
        "model": plain_model(),
        "configs": {name: {} for name in NEEDED},
        "source": {"files": {}},
        "dtypes": dict.fromkeys(NEEDED, DtypePolicy("bfloat16", "float32")),
        "components": {name: Component(f"weights/{name}", {}) for name in NEEDED},
        "tokenizer": tokenizer,
        "loras": (),
        **{
            name: {}
            for name in ("profiles", "program_sets", "targets", "golden", "embeddings", "tool", "times")
        },
    }
    return Manifest(**{**nothing, **fields})


def plain_model(**fields: Any) -> Model:
    """A model of text to video with these fields."""
    defaults = Defaults(
        num_steps=40, guidance_scale=4.0, flow_shift=12.0, solver="unipc", fps=16, negative_prompt="blurry"
    )
    plain: dict[str, Any] = {
        "variant": "wan2.1-t2v",
        "text_width": 32,
        "latent_channels": 16,
        "vae_spatial": 8,
        "vae_temporal": 4,
        "size_multiple": 16,
        "num_train_timesteps": 1000,
        "defaults": defaults,
        "options": {},
        "task": Task(name="t2v", inputs={}),
    }
    return Model(**{**plain, **fields})


def with_model(manifest: Manifest, defaults: Mapping[str, Any] | None = None, **fields: Any) -> Manifest:
    """The manifest with these fields of its model, and these of its defaults."""
    changed = msgspec.structs.replace(manifest.model.defaults, **(defaults or {}))
    return manifest.changed(model=msgspec.structs.replace(manifest.model, defaults=changed, **fields))


def plain_parameter(shape: tuple[int, ...], dtype: str) -> Parameter:
    """A parameter whose checksums nobody reads."""
    layout = plan_layout(shape, dtype, stacked=False)
    return Parameter(layout=layout, axes=(None,) * len(shape), crc32c=("00000000",) * layout.rows, sha256="")


def plain_adapter(name: str, **fields: Any) -> Adapter:
    """The record of an adapter whose file nobody reads, with these fields of its content."""
    plain: dict[str, Any] = {
        "format": 1,
        "variant": "wan2.1-t2v",
        "rank": 4,
        "experts": ("transformer",),
        "loras": (Lora(file=f"{name}.safetensors", sha256="0", scale=1, component=None),),
    }
    content = AdapterContent(**{**plain, **fields})
    return Adapter(file=f"adapters/{name}.safetensors", sha256="0", nbytes=8, content=content)


def write_adapter(path: Path, shapes: Mapping[str, tuple[int, ...]], **fields: Any) -> Path:
    """Writes an adapter's file with tensors of these shapes, of float32 zeros."""
    content, header, end = plain_adapter("style", **fields).content, dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    told = {"__metadata__": {ADAPTER_METADATA: msgspec.json.encode(content).decode()}, **header}
    data = msgspec.json.encode(told)
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(end))
    return path


def put_adapter(artifact: Path, name: str = "style") -> Adapter:
    """Gives an artifact an adapter whose file nobody opens."""
    data = f"the adapter {name}".encode()
    plain = plain_adapter(name)
    record = msgspec.structs.replace(plain, sha256=sha256_of(data), nbytes=len(data))
    (artifact / "adapters").mkdir(exist_ok=True)
    (artifact / record.file).write_bytes(data)
    read_manifest(artifact).changed(adapters={name: record}).write(artifact)
    return record


def built_with(**options: Any) -> ProfileOptions:
    """Options of a profile, the defaults of ``wanbuild compile`` where none are given."""
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "vae_dtype": "float32",
        "scheduler_dtype": "float32",
        "vae_decode_chunk": 1,
        "vae_encode_chunk": 1,
        "loop": "both",
        "max_steps": 100,
        "weights_dtype": "bfloat16",
        "text_weights_dtype": "bfloat16",
        "vae_weights_dtype": "float32",
    }
    return ProfileOptions(**{**defaults, **options})


def programs_of(manifest: Manifest, profile: str, target: str = "cpu") -> Mapping[str, Program]:
    """The programs of a profile for a target, by name."""
    return manifest.programs(manifest.targets[target], manifest.profiles[profile])


def plain_program(**fields: Any) -> Program:
    """A program of nothing but these fields, checked as those of a manifest are."""
    nothing = {"file": "f", "sha256": "", "inputs": (), "donate": (), "role": "prepare"}
    avals = {"inputs": {}, "outputs": {}, **fields.pop("avals", {})}
    return msgspec.convert({**nothing, "avals": avals, **fields}, Program)


def program_set(programs: Mapping[str, Mapping[str, Program]]) -> ProgramSet:
    """A set of these programs, by profile and name."""
    kernels = Kernels("cpu", "winograd", weight_bits=True, image_multiple=1)
    return ProgramSet(
        platform="cpu",
        kernels=kernels,
        mesh={},
        jax="0",
        programs=programs,
    )


ENVIRONMENT: Mapping[str, Any] = MappingProxyType(
    {
        "platform": "cpu",
        "machine": "x86_64",
        "packages": {"jax": "0", "jaxlib": "0"},
        "variables": {},
        "zstandard": True,
        "device_kind": "cpu",
        "device_count": 1,
        "platform_version": "cpu",
    }
)
"""Of a machine that there is not."""


def plain_target(environment: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Target:
    """A target of nothing but these facts and fields."""
    nothing: dict[str, Any] = {
        "program_set": "",
        "folder": "executables/cpu",
        "requirements": Requirements(file="requirements.txt", sha256=""),
        "executables": {},
        "statistics": {},
    }
    return Target(environment={**ENVIRONMENT, **environment}, **{**nothing, **fields})


def without_past(manifest: Manifest) -> Manifest:
    """Returns the manifest of a model that goes on after nothing: what is given is of the video."""
    task = manifest.model.task
    inputs = {name: msgspec.structs.replace(item, past=0) for name, item in task.inputs.items()}
    return with_model(manifest, task=msgspec.structs.replace(task, inputs=inputs))


def of_one_size(manifest: Manifest) -> Manifest:
    """The same for a model whose chunks have one size, which takes explicit timesteps."""
    assert manifest.model.chunks is not None
    chunks = msgspec.structs.replace(manifest.model.chunks, pyramid=None)
    return manifest.changed(model=msgspec.structs.replace(manifest.model, chunks=chunks))


def with_profiles(manifest: Manifest, profiles: Iterable[Profile]) -> Manifest:
    """The manifest with other profiles, all of which have the programs and executables of its first."""
    first, new = next(iter(manifest.profiles)), {profile.name: profile for profile in profiles}

    def of_first(entries: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(new, entries[first]) if first in entries else {}

    sets = {
        key: msgspec.structs.replace(old, programs=of_first(old.programs))
        for key, old in manifest.program_sets.items()
    }
    targets = {
        name: msgspec.structs.replace(
            old, executables=of_first(old.executables), statistics=of_first(old.statistics)
        )
        for name, old in manifest.targets.items()
    }
    return manifest.changed(profiles=new, program_sets=sets, targets=targets)


def without_profiles(manifest: Manifest) -> Manifest:
    """The manifest as ``wanbuild convert`` made it."""
    return manifest.changed(profiles={}, program_sets={}, targets={}, golden={})


def full_manifest() -> Manifest:
    """A manifest of one artifact that there is not, in which no field of any record is empty or None."""
    profile = Profile(
        96,
        64,
        9,
        1,
        True,
        0,
        built_with(
            image_weights_dtype="bfloat16",
            lora_rank=32,
            vae_tile=256,
            guiders=("cfg-zero",),
            video_to_video=True,
            nag=True,
        ),
        num_references=2,
    )
    program = plain_program(
        file="programs/p",
        inputs=("transformer", "latents"),
        donate=(1,),
        avals={"inputs": {"latents": "float32[1,16,3,8,12]"}, "outputs": {"latents": "float32[1,16,3,8,12]"}},
        place=1,
    )
    attention = plain_program(
        file="programs/a",
        inputs=("q",),
        avals={"inputs": {"q": "bfloat16[1,18,2,8]"}, "outputs": {"out": "bfloat16[1,18,2,8]"}},
        role="attention",
        plain=PlainFile(file="programs/a-plain", sha256="0"),
    )
    programs = msgspec.structs.replace(
        program_set({profile.name: {"denoise_step": program, "attention": attention}}),
        kernels=Kernels("flash", "direct", False, 128, (1024, 512), "highest", True, "widened", True),
        mesh={"data": 2},
        rules={"heads": ("tensor",)},
        layers={"blocks": (0, 1)},
        exported={profile.name: "2026-11-01"},
    )
    target = plain_target(
        {"variables": {"XLA_FLAGS": ""}, "cpu_features": ["avx"]},
        program_set=programs.key,
        executables={profile.name: {"denoise_step": Executable("entry", 3, "0")}},
        statistics={profile.name: {"denoise_step": {"flops": 1.5}}},
        options={"xla_option": "true"},
        program_options={"decode_video": {"optimization_level": 19}},
    )
    components = {
        name: Component(f"weights/{name}", {"w": plain_parameter((3, 2), "float32")})
        for name in ("text_encoder", "transformer", "transformer_2", "vae")
    }
    embedding = Embedding(file="embeddings/e.npy", sha256="0", prompt="blurry", dtype="float32", length=3)
    schedule = Schedule(
        solver="euler",
        timesteps=(1000.0, 500.5),
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        boundary=0.9,
        coefficients=((0.5, 0.5, 0.0, 0.0), (0.1, 0.9, 0.0, 0.25)),
        measured={"psnr": 40.5},
    )
    lora = Lora(
        file="l", sha256="0", scale=0.5, component="transformer", adapter_config_sha256="1", left_out=2
    )
    options = SamplingDefaults(
        num_steps=2,
        guidance_scale=1.0,
        guidance_scale_2=1.5,
        guidance_start=0.1,
        guidance_end=0.8,
        boundary=0.9,
        flow_shift=5,
        solver="euler",
        timesteps=(1000.0, 500.5),
        fps=8,
    )
    rows = ((1.0, 2.0, 3.0),) * 17
    attested = Attested(
        file="verdicts/v.json", sha256="0", target="cpu", profile=profile.name, device_kind="v9", made="2026"
    )
    return plain_manifest(
        preview=rows,
        verdicts={"facts": attested},
        schedules={"2-steps": schedule},
        adapters={"style": plain_adapter("style", loras=(lora,), left_out=("img_emb",), options=options)},
        model=full_model(),
        configs={name: {"eps": 1e-6} for name in components},
        source={"repository": "r", "revision": "v", "files": {"config.json": "0"}},
        loras=(lora,),
        dtypes={name: DtypePolicy("bfloat16", "float32", {"w": "int8"}) for name in components},
        components=components,
        profiles={profile.name: profile},
        program_sets={programs.key: programs},
        targets={"cpu": target},
        golden={profile.name: Recorded(file="golden/g.json", sha256="0", preview=rows)},
        embeddings={"e": embedding},
        tool={"name": "wanbuild", "version": "1"},
        times={"converted": "2026-11-01T00:00:00Z"},
    )


def full_model() -> Model:
    """A model in which no field is empty or None."""
    defaults = Defaults(
        num_steps=2,
        guidance_scale=4.0,
        flow_shift=12.0,
        solver="unipc",
        fps=16,
        negative_prompt="blurry",
        timesteps=(900, 500.5),
    )
    image = Input(kind="image", array="image", encoded=True, required=True, count="count", past=3)
    mask = Input(
        kind="video",
        array="mask",
        prepare="greyscale",
        size=64,
        mode="replace",
        beside="video",
        default=255,
        flag="masked",
    )
    task = Task(
        name="everything",
        inputs={"image": image, "video": Input(kind="video", array="video", required=True), "mask": mask},
        modes=Modes(names=("animate", "replace"), array="mode"),
        windows=Windows(frames_of="video", overlaps=(1, 5), carried={"previous": "last_frames"}),
        held=HeldFrame(condition="condition", latents="held", mask="frame_mask"),
        start="mask",
    )
    processor = ImageProcessor(
        shortest_edge=32, crop=32, resample=3, rescale_factor=0.5, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2)
    )
    options = {"guidance_scale_2": 3.0, "boundary": 0.9}
    return plain_model(
        defaults=defaults,
        options=options,
        image_processor=processor,
        task=task,
        flow_map=True,
        chunks=Chunking(
            first=1,
            each=3,
            alone=True,
            pyramid=Pyramid(stages=3, shift="linear", gamma=0.25, doubled=True),
        ),
    )
