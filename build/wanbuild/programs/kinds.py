"""The table of programs: their names, when the runtime runs them, which profiles have them, how each is made.

All weights are arguments; guidance_scale, timesteps and solver coefficients are inputs, so changing them
needs no new executable. A program's arguments are listed by name, and its result is a dict, so the runtime
passes the outputs of one program to the next without knowing their meaning.

A new kind of program is a function here, or in a separate module, and a row of ``PROGRAMS``. The manifest
records its role. When it runs, what it costs and what proves it follow from the role's row: see
``wanrun.artifact.roles``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.components import KINDS
from wanbuild.models.params import bind
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.umt5 import UMT5Encoder
from wanbuild.programs import attention_programs, stream_programs
from wanbuild.programs.chunk_programs import begin, chunk, remember
from wanbuild.programs.decode_programs import begins_apart, decode_first, decode_tiny, decode_video
from wanbuild.programs.profile_parts import Maker, ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.spreading import is_staged, spread
from wanbuild.programs.step_programs import (
    encode_image,
    encode_past,
    encode_start,
    encode_video,
    prepare,
    scan,
    step,
)
from wanbuild.programs.stream_programs import STACKS
from wanrun.artifact.manifest import TINY_VAE, TRANSFORMERS
from wanrun.artifact.roles import RoleName
from wanrun.artifact.staged import spread_name

ENCODE_BATCH = 1
"""Prompts per call of a text encoder. The number is fixed, so an embedding does not depend on its batch.

It is one, not two: 512 tokens already saturate the matmuls, and a cached or unused negative prompt then costs
nothing (docs/notes/cpu.md, "encode_text").
"""

TEXT_LENGTHS = (64, 128, 256)
"""Tokens of the shorter text encoders: most prompts are short, and padding costs like text."""


def _always(parts: ProfileParts) -> bool:
    del parts
    return True


@dataclass(frozen=True)
class ProgramKind:
    """A row of the table.

    ``role`` says when the runtime runs the program, ``make`` makes it with named inputs and outputs, and
    ``built`` says whether a profile has it.
    """

    name: str
    role: RoleName
    make: Maker
    built: Callable[[ProfileParts], bool] = _always


def kinds_of(parts: ProfileParts) -> Iterator[ProgramKind]:
    """Yields the rows of the programs that a profile has, in the table's order."""
    return (kind for kind in PROGRAMS if kind.built(parts))


def encode_text(parts: ProfileParts, length: int | None = None) -> ProgramSpec:
    """Returns the program ids, mask (1, L) int32 -> embeddings (1, L, text_dim).

    Embeddings are zero after the prompt's length. ``length`` is L; None for the longest. Padding is masked,
    so a prompt of n tokens has the same embedding for every L >= n.
    """
    module: UMT5Encoder = parts.modules["text_encoder"]
    tokens = jax.ShapeDtypeStruct((ENCODE_BATCH, length or parts.max_length), jnp.int32)

    def encode_text(text_encoder: Any, ids: jax.Array, mask: jax.Array) -> dict[str, Any]:
        return {"embeddings": bind(module, text_encoder)(ids, mask, parts.dtype)}

    arguments = {"text_encoder": parts.weights["text_encoder"], "ids": tokens, "mask": tokens}
    return parts.spec(encode_text, arguments)


def _spread(component: str) -> ProgramKind:
    """Returns the row of the program that spreads a component's weights over a mesh."""

    def make(parts: ProfileParts) -> ProgramSpec:
        assert parts.mesh is not None
        record, weights = parts.components[component], parts.weights[component]
        return spread(component, record, weights, PARAMETERS, parts.mesh)

    def built(parts: ProfileParts) -> bool:
        if parts.mesh is None or component not in parts.components:
            return False
        return any(is_staged(one.layout) for one in parts.components[component].parameters.values())

    return ProgramKind(spread_name(component), "spread", make, built)


def _loop(*forms: str) -> Callable[[ProfileParts], bool]:
    """Returns whether a profile is built with one of these forms of the loop."""
    return lambda parts: any(form in forms for form in parts.options.forms)


def _streamed(name: str, role: RoleName, make: Maker) -> ProgramKind:
    return ProgramKind(f"stream_{name}", role, make, _loop("stream"))


def _streamed_layers(stack: str) -> tuple[ProgramKind, ...]:
    """Returns the rows of the programs of one layer of a stack."""

    def built(parts: ProfileParts) -> bool:
        return _loop("stream")(parts) and stack in parts.modules["transformer"].stacks

    return (
        ProgramKind(
            f"stream_keys_{stack}", "keys", functools.partial(stream_programs.keys, stack=stack), built
        ),
        ProgramKind(f"stream_{stack}", "layer", functools.partial(stream_programs.layer, stack=stack), built),
    )


def _shorter_chunk(name: str, place: int) -> ProgramKind:
    """Returns the row of the program of a chunk, the first or the last one, that is shorter than others."""

    def make(parts: ProfileParts) -> ProgramSpec:
        return chunk(parts, parts.chunks[place])

    def built(parts: ProfileParts) -> bool:
        first, *others = parts.chunks or (0,)
        own = (first, *others)[place]
        each = 0 if parts.model.chunks is None else parts.model.chunks.each
        return own < each and (place == 0 or own != first)

    return ProgramKind(name, "chunk", make, built)


def _smaller_chunk(name: str, halvings: int) -> ProgramKind:
    """Returns the row of the program of a chunk's stage whose sides are so often half of the video's."""

    def built(parts: ProfileParts) -> bool:
        return parts.model.stages > halvings

    return ProgramKind(name, "chunk", functools.partial(chunk, halvings=halvings), built)


PROGRAMS: tuple[ProgramKind, ...] = (
    *(
        ProgramKind(f"encode_text_{length}", "text", functools.partial(encode_text, length=length))
        for length in TEXT_LENGTHS
    ),
    ProgramKind("encode_text", "text", encode_text),
    ProgramKind("encode_image", "once", encode_image, lambda parts: "image_encoder" in parts.modules),
    ProgramKind("encode_video", "window", encode_video, lambda parts: parts.variant.conditioner is not None),
    ProgramKind("encode_start", "start", encode_start, lambda parts: parts.options.video_to_video),
    ProgramKind("encode_past", "past", encode_past, lambda parts: bool(parts.model.task.past)),
    ProgramKind("begin", "begin", begin, _loop("chunks")),
    ProgramKind("prepare", "prepare", prepare, _loop("step", "scan", "chunks")),
    ProgramKind("denoise_step", "step", step, _loop("step")),
    ProgramKind("denoise_loop", "scan", scan, _loop("scan")),
    ProgramKind("chunk", "chunk", chunk, _loop("chunks")),
    _shorter_chunk("chunk_first", 0),
    _shorter_chunk("chunk_last", -1),
    _smaller_chunk("chunk_half", 1),
    _smaller_chunk("chunk_quarter", 2),
    ProgramKind("remember", "remember", remember, _loop("chunks")),
    _streamed("context", "context", stream_programs.context),
    _streamed("enter", "enter", stream_programs.enter),
    *(kind for stack in STACKS for kind in _streamed_layers(stack)),
    _streamed("leave", "leave", stream_programs.leave),
    ProgramKind("decode_first", "decode_first", decode_first, begins_apart),
    ProgramKind("decode_video", "decode", decode_video),
    ProgramKind("decode_tiny", "decode_tiny", decode_tiny, lambda parts: TINY_VAE in parts.modules),
    *(_spread(name) for name in KINDS if name != TRANSFORMERS[1]),  # two experts share one
    ProgramKind("attention", "attention", attention_programs.among, attention_programs.is_kernel),
    ProgramKind("attention_text", "attention", attention_programs.to_text, attention_programs.is_kernel),
    ProgramKind(
        "attention_image", "attention", attention_programs.to_image, attention_programs.is_kernel_of_images
    ),
)
"""All kinds of programs. Programs of one role run in this order; the first step is the full one."""


class ProgramBuilder(ProfileParts):
    """Makes the programs of one profile; arguments and errors as of ``ProfileParts``."""

    def programs(self) -> tuple[ProgramSpec, ...]:
        """Returns all programs of the profile; raises UsageError if the model's parts do not fit together."""
        places = Counter[RoleName]()
        made = []
        for kind in kinds_of(self):
            spec, place = kind.make(self), places[kind.role]
            made.append(dataclasses.replace(spec, name=kind.name, role=kind.role, place=place))
            places[kind.role] += 1
        return tuple(made)

    def named(self, name: str) -> ProgramSpec:
        """Returns a program by its name."""
        (spec,) = (spec for spec in self.programs() if spec.name == name)
        return spec

    def first(self, role: RoleName) -> ProgramSpec:
        """Returns the first program of a role, whether the profile has it or not."""
        kind = next(kind for kind in PROGRAMS if kind.role == role)
        return dataclasses.replace(kind.make(self), name=kind.name, role=role)
