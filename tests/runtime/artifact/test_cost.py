"""What a generation costs: calls, operations and bytes, and the counts that decide them."""

from __future__ import annotations

import msgspec
import numpy as np

from helpers.manifests import plain_manifest, plain_program, plain_target, program_set, with_model
from helpers.media_files import task_of
from helpers.options import PROFILE, generation
from wanrun.artifact.manifest import Component
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import ProgramSet
from wanrun.media.inputs import Inputs
from wanrun.request.generation import Generation


def test_the_cost_of_text_alone() -> None:
    pair = msgspec.structs.replace(PROFILE, num_videos=2)
    cost = generation(profile=pair, num_videos=2, num_steps=4).cost()
    assert (cost.windows, cost.steps, cost.frames, cost.pixels) == (1, 4, 18, 18 * 96 * 64)
    media = dict.fromkeys(("once", "window", "start", "past"), 0)
    assert cost.calls == {"text": 2, **media, "prepare": 1, "step": 4, "decode": 2}
    assert cost.flops == cost.bytes == {}  # nothing was compiled
    scan = generation(num_steps=4, loop="scan").cost().calls
    assert scan["scan"] == 1 and "step" not in scan
    # Noise is added between the calls.
    assert generation(num_steps=4, loop="scan", solver="lcm").cost().calls["scan"] == 4


def test_the_cost_of_a_long_video() -> None:
    animate = with_model(plain_manifest(), task=task_of("wan2.2-animate", encoder=False))

    def given() -> Generation:
        return generation(animate, num_steps=3, image="i.png", pose_video="p", face_video="f")

    unread = given().cost()
    assert unread.windows is None and unread.steps == 3
    cost = given().cost(Inputs(num_frames=33))
    assert (cost.windows, cost.steps, cost.frames) == (4, 12, 33)
    assert (cost.calls["step"], cost.calls["decode"], cost.calls["once"]) == (12, 4, 1)


def test_each_part_of_a_past_is_encoded() -> None:
    """A first frame, and chunks of 33 frames: of a video three at most, or as many as were read."""
    chunks = Chunking(first=9, each=9, alone=True)
    helios = with_model(plain_manifest(), task=task_of("helios-wan2.1"), chunks=chunks)
    given = [generation(helios, **one).cost().calls for one in ({}, {"image": "i.png"}, {"video": "v.mp4"})]
    assert [(calls["past"], calls["window"]) for calls in given] == [(0, 0), (2, 0), (4, 0)]
    for frames, calls in ((1, 2), (1 + 2 * 33, 3)):
        read = Inputs({"given": np.zeros((frames, 1)), "given_frames": np.array(99, np.int32)})
        assert generation(helios).cost(read).calls["past"] == calls


def test_the_cost_of_blended_windows() -> None:
    """They share what an expert prepares, and a decoder with a state makes their video at once."""

    def built(donate: tuple[int, ...]) -> ProgramSet:
        avals = {"inputs": {"latents": "float32[16,3,8,12]"}}
        decode = plain_program(role="decode", inputs=("latents", "past"), avals=avals, donate=donate)
        others = {role: plain_program(role=role) for role in ("text", "prepare", "step")}
        made = program_set({PROFILE.name: {**others, "decode": decode}})
        return msgspec.structs.replace(made, mesh={} if donate else {"data": 2})

    sets = {"piecewise": built((1,)), "whole": built(())}
    figures = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes", "code_bytes", "flops"), 1)
    statistics = {PROFILE.name: dict.fromkeys(("text", "prepare", "step", "decode"), figures)}
    manifest = plain_manifest(
        components={"transformer": Component("transformer", {})},
        profiles={PROFILE.name: PROFILE},
        program_sets={one.key: one for one in sets.values()},
        targets={
            name: plain_target(program_set=one.key, statistics=statistics) for name, one in sets.items()
        },
    )
    blended = generation(manifest, num_steps=2, num_frames=33, window_frames=9, guidance_scale=1.0)
    steps = {"prompts": 1, "expert": 1, "steps": 8}
    assert blended.cost().parts == {"piecewise": {**steps, "video": 3}, "whole": {**steps, "video": 4}}
    assert blended.counts().told_steps == 2 and blended.cost().bytes == dict.fromkeys(sets, 4)
    scan = generation(manifest, num_steps=2, num_frames=33, window_frames=9, loop="scan").cost().calls
    assert scan["scan"] == 8  # the windows are blended after each step


def test_a_clip_after_one_of_text_alone_begins_with_an_image() -> None:
    held = with_model(plain_manifest(), task=task_of("wan2.2-ti2v", encoder=False))
    assert generation(held, clips=3).cost().calls["window"] == 2
    assert generation(held, clips=3, image="i.png").cost().calls["window"] == 3
