"""Programs of a profile: bound to either expert, and one executable for all profiles that share it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.damage import PROFILE, PROGRAMS, flip, linked, own
from helpers.opened import LIMIT_SECONDS, Opened, Watch, settled
from helpers.refusals import refuses
from wanrun.artifact.layout import array_folder
from wanrun.artifact.manifest import Component, read_manifest
from wanrun.errors import ArtifactError

pytestmark = pytest.mark.slow

Open = Callable[..., Opened]


def leaf(tree: Any) -> jax.Array:
    return jax.tree.leaves(tree)[0]


def chunk_bytes(folder: Path, component: Component) -> dict[str, bytes]:
    """The bytes of each parameter, from the chunk files: rows, each file with its crc32c at the end."""
    values = {}
    for path, parameter in component.parameters.items():
        layout = parameter.layout
        array = folder / array_folder(path)
        files = [array / layout.chunk_file(index) for index in range(layout.chunks)]
        values[path] = b"".join(file.read_bytes()[: layout.chunk_bytes] for file in files)
    return values


def test_a_program_is_bound_to_either_expert(shared: Path, open_here: Open) -> None:
    opened = open_here(shared)
    programs = opened.programs()
    first = programs.bound("denoise_step")
    second = programs.bound("denoise_step", transformer="transformer_2")
    assert first.func is second.func  # type: ignore[attr-defined]
    assert opened.timings.cache_hits == 1
    manifest = read_manifest(shared)
    contents = []
    for bound, name in ((first, "transformer"), (second, "transformer_2")):
        weights = opened.weights.weights(name)
        assert bound.keywords == {"transformer": weights}  # type: ignore[attr-defined]
        component = manifest.components[name]
        expected = chunk_bytes(shared / component.folder, component)
        found = {
            "/".join(key.key for key in path): np.asarray(value).tobytes()
            for path, value in jax.tree_util.tree_leaves_with_path(weights)
        }
        assert found == expected
        contents.append(found)
    assert contents[0] != contents[1]
    shape = manifest.configs["text_encoder"]["d_model"]
    embeddings = np.random.default_rng(3).standard_normal((2, 512, shape), np.float32)
    kv = [
        leaf(programs.bound("prepare", transformer=name)(embeddings=embeddings)["kv"])
        for name in ("transformer", "transformer_2")
    ]
    # Random weights: they have nothing in common.
    assert np.abs(np.asarray(kv[0]) - np.asarray(kv[1])).max() > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [{"vae": "vae"}, {"latents": "transformer"}, {"x": "transformer"}])
def test_what_a_program_does_not_take_is_not_bound(
    shared: Path, open_here: Open, wrong: dict[str, str], watch: Watch
) -> None:
    programs = open_here(shared).programs()
    with pytest.raises(ValueError, match=f"denoise_step .*'{next(iter(wrong))}'"):
        programs.bound("denoise_step", **wrong)
    assert watch.read == []


def test_a_bound_program_holds_its_weights(shared: Path, open_here: Open, watch: Watch) -> None:
    opened = open_here(shared)
    settled(opened.weights, "transformer")
    step = opened.programs().bound("denoise_step")
    opened.weights.release("transformer")
    assert watch.blocks[0]() is not None and step is not None
    del step
    opened.weights.request(["vae"])
    assert watch.blocks[0]() is None


# --- profiles that share -----------------------------------------------------------------------------------

OTHER = PROFILE.replace("-cfg", "-nocfg")


def test_a_shared_program_is_loaded_once(shared: Path, open_here: Open) -> None:
    """Of the two profiles, with guidance and without, only the steps differ: NAG prepares two prompts."""
    opened = open_here(shared)
    with_guidance, without = opened.programs(), opened.programs(OTHER)
    names = sorted((*PROGRAMS, "encode_start"))
    assert sorted(with_guidance) == sorted(without) == names
    same = {name for name in names if with_guidance[name].sha256 == without[name].sha256}
    assert same == {name for name in names if name.startswith(("encode_", "decode_", "prepare"))}
    for name in names:
        (one,), (other,) = (programs.request(programs=[name]) for programs in (with_guidance, without))
        assert (one is other) == (name in same)
        assert (one.result(LIMIT_SECONDS) is other.result(LIMIT_SECONDS)) == (name in same)
    assert (opened.timings.cache_hits, opened.timings.cache_misses) == (2 * len(names) - len(same), 0)
    one, other = (
        jax.tree.leaves(programs.bound("denoise_step", transformer="transformer_2").keywords)  # type: ignore[attr-defined]
        for programs in (with_guidance, without)
    )
    assert len(one) > 10 and all(a is b for a, b in zip(one, other, strict=True))  # one copy of the weights


def test_every_profile_is_checked(shared: Path, open_here: Open, tmp_path: Path) -> None:
    """What is damaged of the second one is found when it is made, and is no matter of the first."""
    artifact = linked(shared, tmp_path / "artifact")
    own(artifact, "executables")
    target = read_manifest(artifact).targets["cpu"]
    flip(artifact / target.folder / target.executables[OTHER]["denoise_step"].file, 1000)
    opened = open_here(artifact)
    assert opened.programs()
    with refuses("damaged", ArtifactError, what="denoise_step", expected="sha256"):
        opened.programs(OTHER)
