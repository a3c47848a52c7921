"""Checkpoints in the original Wan-Video naming: converted to the same artifact, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoint_files import State, as_first_uploaded, edited, load_file, save_file
from helpers.original_checkpoint import original_config, original_keys
from helpers.refusals import refuses
from helpers.single_files import original_transformer, write_with_published_heads
from hostile.refusal import check_named
from wanbuild.build import convert
from wanbuild.components import kind_of
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.mapping.original import diffusers_names
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.source.scheduler import read_scheduler
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError

WEIGHTS = "diffusion_pytorch_model.safetensors"


def to_original(state: State, prefix: str) -> State:
    """The same tensors under their original names."""
    layers = {key.split(".")[1] for key in state if key.startswith("blocks.")}
    config = {"image_dim": None, "num_layers": len(layers)}
    return {prefix + key: state[name] for key, name in diffusers_names(original_keys(config)).items()}


def rewrite(
    checkpoint: Path, prefix: str, name: str, change: Callable[[State], object] = lambda state: None
) -> Path:
    """Replaces the transformer's weights by one file in the original naming; returns it."""
    (file,) = (checkpoint / "transformer").glob("*.safetensors")
    state = to_original(load_file(file), prefix)
    change(state)
    file.unlink()
    save_file(state, checkpoint / name)
    return checkpoint / name


@pytest.fixture
def checkpoint(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may break."""
    return Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The toy's manifest, from the diffusers naming."""
    return convert(ConvertRequest(toy_checkpoint, tmp_path_factory.mktemp("converted") / "artifact"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("", f"transformer/{WEIGHTS}"),
        ("model.diffusion_model.", "transformer/wan.safetensors"),
        ("", "wan.safetensors"),
    ],
)
def test_it_converts_to_the_same_artifact(
    checkpoint: Path, converted: Manifest, tmp_path: Path, prefix: str, place: str
) -> None:
    stored = rewrite(checkpoint, prefix, place)
    manifest = convert(ConvertRequest(checkpoint, tmp_path / "artifact"))
    assert manifest.components == converted.components
    assert manifest.configs == converted.configs
    assert place in manifest.source["files"]
    assert read_manifest(tmp_path / "artifact").components == converted.components
    with open_source(checkpoint) as source:
        transformer = source.component("transformer")
        assert transformer.files == (stored,)
        assert list(transformer.tensors) == sorted(transformer.tensors)
        assert transformer.nbytes == sum(x.nbytes for x in load_file(stored).values())
        values = load_file(stored)
        for key in ("scale_shift_table", "blocks.1.attn2.to_out.0.bias", "blocks.2.norm2.weight"):
            old = {"scale_shift_table": "head.modulation", "blocks.2.norm2.weight": "blocks.2.norm3.weight"}
            value = values[prefix + old.get(key, "blocks.1.cross_attn.o.bias")]
            assert transformer.entry(key).shape == value.shape
            assert (transformer.array(key) == value).all()
            part = np.empty(8, np.uint8)
            transformer.read(key, 4, part)
            assert part.tobytes() == value.tobytes()[4:12]


@pytest.mark.slow
def test_the_original_config_beside_it(checkpoint: Path, converted: Manifest, tmp_path: Path) -> None:
    """It says what the shapes of a toy do not: the head size."""
    config = json.loads((checkpoint / "transformer/config.json").read_text())
    shutil.copytree(checkpoint, tmp_path / "other")
    rewrite(checkpoint, "", "wan.safetensors")
    shutil.rmtree(checkpoint / "transformer")
    (checkpoint / "config.json").write_text(json.dumps(original_config(config)))
    manifest = convert(ConvertRequest(checkpoint, tmp_path / "artifact"))
    assert manifest.components == converted.components
    assert "config.json" in manifest.source["files"]
    derived = {"pos_embed_seq_len": None, **manifest.configs["transformer"]}
    del config["_diffusers_version"]
    assert derived == {"pos_embed_seq_len": None, **config}
    # In the component's folder it is the same.
    rewrite(tmp_path / "other", "", "transformer/wan.safetensors")
    (tmp_path / "other/transformer/config.json").write_text(json.dumps(original_config(config)))
    again = convert(ConvertRequest(tmp_path / "other", tmp_path / "artifact2"))
    assert (again.components, again.configs) == (manifest.components, manifest.configs)


@pytest.mark.slow
def test_a_config_from_shapes_alone(tmp_path: Path) -> None:
    """A published head size needs no config at all."""
    checkpoint = tmp_path / "checkpoint"
    write_toy(
        checkpoint,
        configs={"transformer": {"num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 2}},
        seed=2,
    )
    first = convert(ConvertRequest(checkpoint, tmp_path / "first"))
    rewrite(checkpoint, "model.diffusion_model.", "wan2.1_t2v_fp32.safetensors")
    shutil.rmtree(checkpoint / "transformer")
    second = convert(ConvertRequest(checkpoint, tmp_path / "second"))
    assert second.components == first.components
    ours, theirs = second.configs["transformer"], first.configs["transformer"]
    assert {**theirs, **ours} == {**theirs, **{k: v for k, v in ours.items() if v is None}}
    assert set(second.source["files"]) == set(first.source["files"]) - {
        "transformer/config.json",
        f"transformer/{WEIGHTS}",
    } | {"wan2.1_t2v_fp32.safetensors"}


@pytest.mark.slow
def test_a_config_of_wan_fun(tmp_path: Path) -> None:
    """As VideoX-Fun saves it: its own class of diffusers' name, and sizes of parts that are switched off."""
    write_with_published_heads(tmp_path / "checkpoint", "wan2.1-i2v")
    folder = tmp_path / "checkpoint" / "transformer"
    first = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "first"))
    config = json.loads((folder / "config.json").read_text())
    state = original_transformer(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(state, folder / WEIGHTS)
    fun = original_config(config) | {"_class_name": "WanTransformer3DModel", "model_type": "i2v"}
    fun |= {"in_channels": 16, "hidden_size": 2048, "cross_attn_type": "cross_attn"}
    fun |= {"add_control_adapter": False, "in_dim_control_adapter": 24, "add_ref_conv": False}
    (folder / "config.json").write_text(json.dumps(fun))
    second = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "second"))
    assert second.components == first.components and second.model == first.model
    (folder / "config.json").write_text(json.dumps(fun | {"add_control_adapter": True}))
    with refuses("unreadable", SourceError, what="add_control_adapter is True"):
        convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "third"))


@pytest.mark.slow
def test_dtypes_may_be_mixed(checkpoint: Path, tmp_path: Path) -> None:
    """Each tensor is read in the dtype it has: as when all had been widened to float32 before."""
    dtypes = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))

    def mix(state: State) -> None:
        state |= {key: value.astype(dtypes[i % 3]) for i, (key, value) in enumerate(state.items())}

    def widen(state: State) -> None:
        mix(state)
        state |= {key: value.astype(np.float32) for key, value in state.items()}

    other = shutil.copytree(checkpoint, tmp_path / "other")
    mixed = rewrite(checkpoint, "", "transformer/wan.safetensors", mix)
    assert {value.dtype for value in load_file(mixed).values()} == set(dtypes)
    rewrite(other, "", "transformer/wan.safetensors", widen)
    first = convert(ConvertRequest(checkpoint, tmp_path / "a"))
    assert first.components == convert(ConvertRequest(other, tmp_path / "b")).components


@pytest.mark.slow
def test_shards_in_the_original_naming(tmp_path: Path, toy_checkpoint: Path) -> None:
    """As the original 14B repositories are: an index beside the shards."""
    checkpoint = tmp_path / "checkpoint"
    write_toy(checkpoint, stored=Stored(shards=3), seed=0)
    index = checkpoint / f"transformer/{WEIGHTS}.index.json"
    whole: State = {}
    for file in sorted((checkpoint / "transformer").glob("*-of-*")):
        whole |= load_file(file)
    back = {id(value): key for key, value in to_original(whole, "").items()}
    weight_map: dict[str, str] = {}
    for file in sorted((checkpoint / "transformer").glob("*-of-*")):
        state = {back[id(whole[key])]: whole[key] for key in load_file(file)}
        save_file(state, file)
        weight_map |= dict.fromkeys(state, file.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    first = convert(ConvertRequest(checkpoint, tmp_path / "first"))
    second = convert(ConvertRequest(toy_checkpoint, tmp_path / "second"))
    assert first.components == second.components


# --- refused ------------------------------------------------------------------------------------------------


def refused(checkpoint: Path, tmp_path: Path, code: ErrorCode, *named: object) -> None:
    """Converting is refused with these values, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SourceError) as caught:
        convert(ConvertRequest(checkpoint, tmp_path / "artifact"))
    check_named({"code": caught.value.code, "message": str(caught.value)}, code, named)
    assert sorted(tmp_path.iterdir()) == before


BIAS = np.linspace(-1, 1, 40, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "code", "named"),
    [
        (["blocks.0.attn1.to_q.bias"], "wrong_kind", ("blocks.0.attn1.to_q.bias",)),  # a name of diffusers
        (["blocks.0.self_attn.q.gate"], "wrong_kind", ("blocks.0.self_attn.q.gate",)),
        ([f"extra{i}" for i in range(9)], "wrong_kind", ("extra0, extra1, extra2, extra3, extra4", 4)),
        (["blocks.3.norm3.bias"], "mismatch", ("blocks.3.norm2.bias", "3 layers")),
        ([], "mismatch", ("scale_shift_table",)),  # head.modulation is left out
    ],
)
def test_tensors_that_do_not_fit(
    checkpoint: Path, tmp_path: Path, added: Sequence[str], code: ErrorCode, named: tuple[object, ...]
) -> None:
    """Others are in tests/hostile, and other forms of 8 bits in ``test_eight_bit``."""

    def change(state: State) -> None:
        state.update({key: BIAS + number for number, key in enumerate(added)})
        if not added:
            del state["head.modulation"]

    file = rewrite(checkpoint, "", "wan.safetensors", change)
    refused(checkpoint, tmp_path, code, *(named if code == "mismatch" else (file, *named)))


@pytest.mark.parametrize("place", ["transformer", "."])
def test_two_candidates_are_refused(checkpoint: Path, tmp_path: Path, place: str) -> None:
    file = rewrite(checkpoint, "", f"{place}/wan.safetensors")
    shutil.copy(file, file.with_name("wan-fp16.safetensors"))
    refused(checkpoint, tmp_path, "wrong_kind", "wan-fp16.safetensors, wan.safetensors")
    # The published name is preferred to any other.
    shutil.copy(file, file.with_name(WEIGHTS))
    with open_source(checkpoint) as source:
        assert [path.name for path in source.component("transformer").files] == [WEIGHTS]


def test_the_component_s_folder_is_preferred(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "vae" / WEIGHTS, checkpoint / "other.safetensors")
    with open_source(checkpoint) as source:
        assert source.component("transformer").files == (checkpoint / "transformer" / WEIGHTS,)


def test_what_else_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = rewrite(checkpoint, "", "wan.safetensors")
    config = checkpoint / "transformer/config.json"
    content = config.read_text()
    config.unlink()
    refused(checkpoint, tmp_path, "mismatch", file, "config.json", 40)
    stated = original_config(json.loads(content))
    (checkpoint / "config.json").write_text(json.dumps({**stated, "ffn_dim": 57}))
    refused(checkpoint, tmp_path, "mismatch", "ffn_dim", 57, 56)
    (checkpoint / "config.json").unlink()
    config.write_text(content)
    # A single shard is no checkpoint, wherever it lies, and another component's file is never taken.
    file.rename(checkpoint / "wan-00001-of-00002.safetensors")
    refused(checkpoint, tmp_path, "missing_file", checkpoint / "transformer")
    (checkpoint / "transformer/wan.pth").write_bytes(b"\x80\x04")
    refused(checkpoint, tmp_path, "untrusted", "wan.pth")
    (checkpoint / "wan-00001-of-00002.safetensors").rename(checkpoint / "transformer/a.safetensors")
    vae = checkpoint / "vae"
    (vae / WEIGHTS).rename(vae / "wan_vae-00001-of-00002.safetensors")
    refused(checkpoint, tmp_path, "missing_file", vae)
    (vae / "wan_vae-00001-of-00002.safetensors").rename(vae / "one.safetensors")
    shutil.copy(vae / "one.safetensors", vae / "two.safetensors")
    refused(checkpoint, tmp_path, "wrong_kind", vae, "one.safetensors, two.safetensors")


# --- the classes of a first upload --------------------------------------------------------------------------

FIRST_UPLOADED = ("anyflow-wan2.1", "anyflow-far-wan2.1")


@pytest.mark.parametrize("variant", FIRST_UPLOADED)
def test_nvlabs_names_mean_diffusers(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", variant, flow_shift=5.0)
    folder = as_first_uploaded(tmp_path / "toy", tmp_path / "first")
    with open_source(tmp_path / "toy") as toy, open_source(folder) as source:
        assert variant_of(source).name == variant
        assert source.pipeline_class == toy.pipeline_class
        assert read_scheduler(source.scheduler_config) == read_scheduler(toy.scheduler_config)
        found, expected = (one.component("transformer") for one in (source, toy))
        assert found.class_name == expected.class_name
        kind = kind_of("transformer", found.class_name)
        assert kind.parse(found.config, "x") == kind.parse(expected.config, "x")
    # A class of NVlabs is both of diffusers', and its config says which.
    edited(folder / "transformer/config.json", init_far_model=variant == FIRST_UPLOADED[0])
    with open_source(folder) as source, pytest.raises(SourceError):
        transformer = source.component("transformer")
        kind_of("transformer", transformer.class_name).parse(transformer.config, "x")
    edited(folder / "transformer/config.json", init_flowmap_model=False)
    with open_source(folder) as source:
        assert source.component("transformer").config["_class_name"] == "FAR_Wan_Transformer3DModel"
