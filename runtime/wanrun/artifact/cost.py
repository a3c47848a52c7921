"""The cost of a generation: calls of each program, operations and bytes, by the compiler's figures."""

from __future__ import annotations

__all__ = ["cost_of"]

import math
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.mesh import paired
from wanrun.artifact.programs import Profile, decodes_any_length, with_role
from wanrun.artifact.roles import DECODERS, FORMS, Counts, When, roles_of

_BYTES = ("argument_bytes", "output_bytes", "temporary_bytes", "code_bytes")


@dataclass(frozen=True)
class Cost:
    """The cost of a generation, as the manifest knows it.

    Attributes:
        windows: windows or clips of the video; None if a video that was not read yet decides. Then all other
            figures are those of one window.
        steps: denoising steps, of all windows.
        calls: calls of each program by role; a layer's program counts for each layer. Those of the text
            encoder are the most possible: stored embeddings take none, and short prompts a shorter program.
        parts: floating point operations of all calls, by target and part of the generation; without targets
            that have no figures.
        bytes: the most bytes on a device that one program takes, with its weights, by target.
    """

    windows: int | None
    steps: int
    calls: Mapping[str, int]
    frames: int
    pixels: int
    parts: Mapping[str, Mapping[When, float]]
    bytes: Mapping[str, int]

    @property
    def flops(self) -> dict[str, float]:
        """Floating point operations of all calls, by target; without targets that have no figures."""
        return {target: sum(parts.values()) for target, parts in self.parts.items()}


def cost_of(counts: Counts, manifest: Manifest, profile: Profile) -> Cost:
    """Returns the cost of a generation of a profile."""
    # Not every artifact has a program for the first frame.
    roles, others = roles_of(counts.form, counts.decoder), DECODERS[counts.decoder][:-1]
    calls: dict[str, int] = {role.name: role.calls(counts) for role in roles if role.name not in others}
    parts, most = dict[str, dict[When, float]](), dict[str, int]()
    for name, target in manifest.targets.items():
        programs, figures = manifest.programs(target, profile), target.statistics.get(profile.name, {})
        flows = counts.blended and decodes_any_length(programs, counts.decoder)
        own = replace(counts, latents=counts.blended) if flows else counts
        run = [
            (role, one, programs[one].pieces(own.latents))
            for role in roles
            # Of the text encoder's programs the longest is counted.
            for one in with_role(programs, role.name)[-1 if role.when == "prompts" else None :]
        ]
        calls |= {role.name: role.calls(own) * pieces for role, _, pieces in run}
        by_chunk = FORMS[counts.form].chunked
        if not run or any(one not in figures for _, one, _ in run):
            continue
        most[name] = max(int(sum(figures[one][part] for part in _BYTES)) for _, one, _ in run)
        if any("flops" not in figures[one] for _, one, _ in run):
            continue
        program_set, parts[name] = manifest.program_sets[target.program_set], {}
        layers, together = program_set.layers, paired(program_set.mesh)
        for role, one, pieces in run:  # a program that takes a layer of a stack runs for each of them
            each = math.prod(len(layers[stack]) for stack in programs[one].inputs if stack in layers)
            mine = own.of_chunks(programs[one].array("latents")[1][2]) if by_chunk and role.makes else own
            stages = manifest.model.stages if by_chunk and role.makes else 1
            flops = figures[one]["flops"] * each * pieces * role.cost(mine, together) / stages
            parts[name][role.when] = parts[name].get(role.when, 0.0) + flops
    windows, frames = counts.windows if counts.known else None, counts.videos * counts.frames
    pixels = frames * profile.width * profile.height
    return Cost(windows, counts.all_steps, calls, frames, pixels, parts, most)
