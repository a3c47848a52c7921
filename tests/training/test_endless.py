"""Videos without end: what is drawn is what the captions of its blocks say, wherever a thing is."""

from __future__ import annotations

import numpy as np
import pytest
from tinywan.captions import caption
from tinywan.endless import BLOCK, block_frames, centred, changed, draw_story, judge_blocks, random_story
from tinywan.scenes import Scene, Thing


def _scene(motion: str, colour: str = "red") -> Scene:
    return Scene((Thing(colour, "ball", motion),), "grey", "plain")


@pytest.mark.slow
def test_every_block_shows_its_caption() -> None:
    """The thing goes out at one side, comes in at the other, and turns at once."""
    scenes = [_scene("right")] * 3 + [_scene("up", "blue")] * 2 + [_scene("circle"), _scene("shrink")]
    frames = draw_story(scenes, np.random.default_rng(1))
    assert len(frames) == sum(block_frames(block) for block in range(len(scenes)))
    assert len(frames) == 4 * (BLOCK * len(scenes)) - 3
    verdicts = list(judge_blocks(frames, [caption(scene) for scene in scenes]))
    assert [verdict.score for verdict in verdicts] == [1.0] * len(scenes)
    assert not [verdict.badly_drawn for verdict in verdicts if verdict.badly_drawn]


def test_a_thing_at_the_edge_is_brought_to_the_middle() -> None:
    video = np.full((3, 64, 96, 3), 92, np.uint8)
    video[:, :8], video[:, -8:] = (222, 44, 40), (222, 44, 40)
    turned = centred(video, "red")
    assert turned[1, 24:40, :, 0].min() == 222
    assert turned[1, :22, :, 0].max() == 92


def test_a_change_changes_something() -> None:
    rng = np.random.default_rng(2)
    scenes, turns = random_story(rng, 6, 2)
    assert turns[0] == 0 and turns[-1] == 2 and sorted(turns) == turns
    assert all(changed(scene, rng) != scene for scene in scenes)
