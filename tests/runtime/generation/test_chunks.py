"""What is kept of a chunk, when, and by which prompt."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from wanrun.artifact.model import Chunking
from wanrun.artifact.roles import FORMS
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.past import Given, Latents
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.errors import ArtifactError
from wanrun.generation.chunks import BEGIN, REMEMBER, ChunkLoop
from wanrun.timing.timings import Timings

SHAPE = (1, 2, 3, 4, 6)


class Recorder:
    """Makes chunks that are their number, and writes down what it is called for."""

    chunks, key = Chunking(first=1, each=3), "k"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        avals = {"inputs": {"cache": {"k": "float32[2]"}, "latents": "float32[1,2,3,4,6]"}, "outputs": {}}
        keeper = SimpleNamespace(avals=avals, donated=("cache",), array=lambda _: ("float32", SHAPE))
        maker = SimpleNamespace(avals=avals, donated=("latents",), array=keeper.array)
        self.programs: Any = Programs({"beginner": None, "keeper": keeper, "maker": maker}, self.keep)

    def keep(self, *, text: str, cache: Any, chunk: np.int32, latents: np.ndarray) -> Mapping[str, Any]:
        self.calls.append((REMEMBER, text, int(chunk), latents.shape[2], float(latents[0, 0, 0, 0, 0])))
        return {"cache": {self.key: cache[self.key] + 1}}

    def prepare(self, run: Denoising, conditions: Conditions, steps: Any) -> dict[str, Any]:
        self.calls.append(("prepare", str(run.embeddings[0])))
        return {"text": str(run.embeddings[0])}

    def maker(self, role: str, shape: tuple[int, ...] = ()) -> str:
        return "maker"

    def expert_steps(self, run: Any, steps: Any, state: Any, constant: Any, draw: Any, later: Any) -> Any:
        number = int(constant["chunk"])
        kept = float(np.ravel(constant["cache"][self.key])[0])
        self.calls.append(("steps", constant["text"], number, kept))
        return {"latents": np.full_like(state["latents"], number + 10)}


class Programs(dict[str, Any]):
    def __init__(self, programs: Mapping[str, Any], keep: Any) -> None:
        super().__init__(programs)
        self._keep = keep

    def with_role(self, role: str) -> tuple[str, ...]:
        return tuple(name for name in self if name == {BEGIN: "beginner", REMEMBER: "keeper"}[role])

    def bound(self, name: str) -> Any:
        assert name == "beginner"
        return lambda: {"cache": {"k": np.zeros(2, np.float32)}}

    def of_expert(self, name: str, expert: str, loras: Any) -> Any:
        return self._keep


def run_of(prompt: str) -> Denoising:
    steps = ExpertRange("transformer", 0, 1, (1.0,))
    parts: Any = {
        "table": solver_table("flow-map", 1, 5.0),
        "ranges": (steps,),
        "embeddings": np.array([prompt]),
        "loop": "chunks",
    }
    return Denoising(**parts, timings=Timings())


def test_what_is_given_stands_for_a_first_chunk() -> None:
    """Its noise is drawn before that of the video's own first chunk, whose number is 1."""
    sampler, draw = Recorder(), Noise(0)
    one = Latents(np.ones((1, 2, 1, 4, 6), np.float32), np.zeros((1, 2, 1, 4, 6), np.float32))
    given = Given(one, [one], 0, True, 2)
    loop = ChunkLoop(cast(Any, sampler), Conditions(given=given), draw)
    expected, own = given.past(after := Noise(0)), draw(SHAPE)
    np.testing.assert_array_equal(own, after(SHAPE))
    sampler.key = "first"
    run = run_of("a")
    loop(run, own)
    loop(run, own)
    first = float(expected.first[0, 0, 0, 0, 0])
    assert [(call[0], call[2]) for call in sampler.calls[1:]] == [("steps", 1), (REMEMBER, 1), ("steps", 2)]
    assert sampler.calls[1][3] == first and sampler.calls[3][3] == first + 1


@pytest.mark.parametrize("held", [0, 1, 4])
def test_a_chunk_is_kept_before_the_next_one_by_its_own_prompt(held: int) -> None:
    assert FORMS["chunks"].chunked
    sampler = Recorder()
    given = np.full((2, held, 4, 6), 5, np.float32)
    loop = ChunkLoop(cast(Any, sampler), Conditions(held=given), Noise(0))
    one, other = run_of("a"), run_of("b")
    noise = np.zeros(SHAPE, np.float32)
    made = [loop(one, noise[:, :, :1]), loop(one, noise), loop(other, noise)]
    first, second = 5.0 if held else 10.0, 5.0 if held > 1 else 11.0
    assert [chunk.shape[2] for chunk in made] == [1, 3, 3]
    assert [float(chunk[0, 0, 0, 0, 0]) for chunk in made] == [first, second, 12.0]
    assert sampler.calls == [
        ("prepare", "a"),
        *([] if held else [("steps", "a", 0, 0.0)]),
        (REMEMBER, "a", 0, 3, first),
        *([] if held > 1 else [("steps", "a", 1, 1.0)]),
        (REMEMBER, "a", 1, 3, second),
        ("prepare", "b"),
        ("steps", "b", 2, 2.0),
    ]


def test_an_artifact_of_an_earlier_version() -> None:
    sampler = Recorder()
    del sampler.programs["beginner"]
    with pytest.raises(ArtifactError, match="role begin"):
        ChunkLoop(cast(Any, sampler), Conditions(), Noise(0))
