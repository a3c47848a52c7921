"""The programs of the stream form: the transformer passes through the device layer by layer.

``context`` runs once for an expert. In each step ``enter`` embeds the latents, the program of a stack runs
once for each of its layers, and ``leave`` makes the velocity and the solver's update. ``keys`` computes a
layer's keys and values of text, before its first run. Together they compute what ``step_programs.step`` does,
with one layer of weights as an argument, which the runtime reads or transfers while another one runs. The
slots of an argument of weights are the argument ``lora``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention_forms import attention_form
from wanbuild.models.loops import at, put
from wanbuild.models.low_rank import with_slots
from wanbuild.models.params import bind, bind_layer
from wanbuild.models.transformer import WanTransformer
from wanbuild.programs.denoiser import guided, model_inputs, passes, updated
from wanbuild.programs.profile_parts import ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.step_programs import given_of, prompted_of, row_of, state_of
from wanrun.artifact.guiders import NAG, SKIPPED_LAYERS
from wanrun.errors import UsageError
from wanrun.weights.layers import OUTSIDE

STACKS = ("blocks", "vace_blocks", "face_adapter")
"""The stacks of layers that transformers have: see ``WanTransformer.stacks``."""

_OF_TIME = ("timestep", "next_timestep")
"""Inputs that only a step's beginning takes."""


def _module(parts: ProfileParts) -> WanTransformer:
    """Returns the abstract transformer; refuses a mesh, whose devices hold large models together."""
    if parts.mesh is not None:
        raise UsageError(
            "no_effect", "--loop stream is for one device", remedy="leave --mesh out, or use --loop step"
        )
    module: WanTransformer = parts.modules["transformer"]
    return module


def _outside(parts: ProfileParts) -> dict[str, Any]:
    """Returns the abstract weights that are in no stack, and their slots, by their arguments' names."""
    stacks = _module(parts).stacks
    trees = {OUTSIDE: parts.weights["transformer"], **parts.lora}
    return {
        argument: {name: below for name, below in tree.items() if name not in stacks}
        for argument, tree in trees.items()
    }


def _one_layer(parts: ProfileParts, stack: str) -> dict[str, Any]:
    """Returns the abstract weights of one layer of a stack, and their slots, by their arguments' names."""
    trees = {
        stack: parts.weights["transformer"][stack],
        **{name: tree[stack] for name, tree in parts.lora.items()},
    }
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), trees)


def _given(parts: ProfileParts, *names: str) -> dict[str, Any]:
    """Returns those of these abstract arguments that the model's steps take."""
    return {name: tree for name, tree in given_of(parts).items() if name in names}


def _scales_of(parts: ProfileParts) -> dict[str, Any]:
    """Returns a step's abstract scales that say how many passes it has, for a profile that has guidance."""
    return {name: one for name, one in row_of(parts).items() if name in ("guidance_scale", "skip_scale")}


def context(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the context of all layers' keys and values, and of the rotary tables."""
    module, (arguments, extra) = _module(parts), prompted_of(parts)

    def stream_context(
        outside: Any, embeddings: jax.Array, lora: Any = None, **inputs: jax.Array
    ) -> dict[str, Any]:
        model = bind(module, with_slots(outside, lora), module.stacks)
        found = model.context(embeddings, parts.dtype, **inputs, **extra)
        return {"context": found, "rope": model.rope(parts.latent_shape)}

    return parts.spec(stream_context, {**_outside(parts), **arguments})


def enter(parts: ProfileParts) -> ProgramSpec:
    """Returns the program from a step's latents to ``carry``, which the layers pass on, and ``modulation``.

    ``carry`` has what layers pass on in each pass, one after the other along a first axis; ``embedding``
    is the time's, for ``leave``.
    """
    module, passes = _module(parts), 1 + len(_scales_of(parts))

    def stream_enter(
        outside: Any,
        latents: jax.Array,
        timestep: jax.Array,
        condition: Any = None,
        frame_mask: jax.Array | None = None,
        next_timestep: jax.Array | None = None,
        lora: Any = None,
    ) -> dict[str, Any]:
        model = bind(module, with_slots(outside, lora), module.stacks)
        given = model_inputs(latents, timestep, False, condition, frame_mask, next_timestep)
        begun = model.begin(*given, parts.dtype)
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (passes, *x.shape)), begun["carry"])
        return {**begun, "carry": carry}

    arguments = {
        **_outside(parts),
        "latents": state_of(parts)["latents"],
        **{name: one for name, one in row_of(parts).items() if name in _OF_TIME},
        **_given(parts, "condition", "frame_mask"),
    }
    return parts.spec(stream_enter, arguments)


def keys(parts: ProfileParts, stack: str) -> ProgramSpec:
    """Returns the program of one layer's keys and values."""
    module = _module(parts)
    blocks = getattr(module, stack)

    def stream_keys(context: Any, lora: Any = None, **layer: Any) -> dict[str, Any]:
        found = bind_layer(blocks, with_slots(layer[stack], lora))
        return {"kv": module.keys(stack, found, context, parts.dtype)}

    arguments = {"context": parts.outputs(context)["context"], **_one_layer(parts, stack)}
    return parts.spec(stream_keys, arguments)


def layer(parts: ProfileParts, stack: str) -> ProgramSpec:
    """Returns the program of one layer, for the passes that a step has; ``carry`` is donated.

    For a layer that the third pass skips, ``skip_scale`` is 0. A layer of the second stack takes its
    ``index`` too, and the options of all of its stack.
    """
    module = _module(parts)
    blocks, begun, attention = getattr(module, stack), parts.outputs(enter), attention_form(parts.kernels)
    beside = stack != next(iter(module.stacks))
    options = _given(parts, "conditioning_scale") if beside else {}
    if options:
        options["index"] = jax.ShapeDtypeStruct((), jnp.int32)
    if stack != "face_adapter":  # it attends to no text
        options |= _given(parts, NAG)
    options |= _scales_of(parts)

    def stream_layer(
        carry: Any,
        kv: Any,
        modulation: jax.Array,
        rope: Any,
        index: jax.Array | None = None,
        conditioning_scale: jax.Array | None = None,
        guidance_scale: jax.Array | None = None,
        skip_scale: jax.Array | None = None,
        nag: jax.Array | None = None,
        lora: Any = None,
        **weights: Any,
    ) -> dict[str, Any]:
        found = bind_layer(blocks, with_slots(weights[stack], lora))
        options = {} if conditioning_scale is None else {"scale": conditioning_scale}
        extra = None if index is None else module.per_layer_beside(options)[index]

        def one(turn: Any, carry: Any) -> Any:
            prompt = turn if skip_scale is None else jnp.where(turn == 1, 1, 0)
            apply = module.applying(modulation, rope, parts.latent_shape, attention, prompt, nag)
            own = jax.tree.map(lambda x: at(x, turn)[0], carry)
            if beside:
                own = module.apply_beside(apply, found, own, kv, extra)
            else:
                own = module.apply_block(apply, found, own, kv)
            return jax.tree.map(lambda x, entry: put(x, turn, entry[None]), carry, own)

        return {"carry": jax.lax.fori_loop(0, passes(guidance_scale, skip_scale), one, carry)}

    arguments = {
        **_one_layer(parts, stack),
        "carry": begun["carry"],
        "kv": keys(parts, stack).outputs["kv"],
        "modulation": begun["modulation"],
        "rope": parts.outputs(context)["rope"],
        **options,
    }
    return parts.spec(stream_layer, arguments, donate=("carry",))


def leave(parts: ProfileParts) -> ProgramSpec:
    """Returns the program from ``carry`` and a step's state to the next state, which is donated."""
    module, begun, state = _module(parts), parts.outputs(enter), state_of(parts)

    def stream_leave(
        outside: Any,
        carry: Any,
        embedding: jax.Array,
        latents: jax.Array,
        history: Any,
        coefficients: jax.Array,
        guidance_scale: jax.Array | None = None,
        guidance_projection: jax.Array | None = None,
        skip_scale: jax.Array | None = None,
        lora: Any = None,
    ) -> dict[str, Any]:
        model = bind(module, with_slots(outside, lora), module.stacks)

        def predict(turn: Any) -> jax.Array:
            own = jax.tree.map(lambda x: at(x, 0 if turn is None else turn)[0], carry)
            return model.end(own, embedding, parts.latent_shape)  # type: ignore[no-any-return]

        velocity = guided(predict, guidance_scale, guidance_projection, skip_scale)
        return updated(velocity, latents, history, coefficients)

    arguments = {
        **_outside(parts),
        "carry": begun["carry"],
        "embedding": begun["embedding"],
        **state,
        **{name: one for name, one in row_of(parts).items() if name not in (*_OF_TIME, SKIPPED_LAYERS)},
    }
    return parts.spec(stream_leave, arguments, donate=tuple(state))
