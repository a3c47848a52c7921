"""The programs of the stream form: the transformer passes through the device layer by layer.

``context`` runs once for an expert. In each step ``enter`` embeds the latents, the program of a stack runs
once for each of its layers, and ``leave`` makes the velocity and the solver's update. ``keys`` computes a
layer's keys and values of text, before its first run. Together they compute what ``steps.step`` does, with
one layer of weights as an argument, which the runtime reads or transfers while another one runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention_forms import attention_form
from wanbuild.models.params import bind, bind_layer
from wanbuild.models.transformer import WanTransformer
from wanbuild.programs.denoiser import model_inputs, updated
from wanbuild.programs.parts import Parts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.steps import given_of, prompted_of, state_of
from wanrun.denoising.solvers import COLUMNS
from wanrun.errors import UsageError
from wanrun.weights.layers import OUTSIDE

STACKS = ("blocks", "vace_blocks", "face_adapter")
"""The stacks of layers that transformers have: see ``WanTransformer.stacks``."""


def _module(parts: Parts) -> WanTransformer:
    """Returns the abstract transformer.

    Raises:
        UsageError: on a mesh, whose devices hold large models together.
    """
    if parts.mesh is not None:
        raise UsageError("--loop stream is for one device", remedy="leave --mesh out, or use --loop step")
    module: WanTransformer = parts.modules["transformer"]
    return module


def _outside(parts: Parts) -> dict[str, Any]:
    stacks = _module(parts).stacks
    return {name: tree for name, tree in parts.weights["transformer"].items() if name not in stacks}


def _one_layer(parts: Parts, stack: str) -> Any:
    """Returns the abstract weights of one layer of a stack."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parts.weights["transformer"][stack]
    )


def _given(parts: Parts, *names: str) -> dict[str, Any]:
    """Returns those of these abstract arguments that the model's steps take."""
    return {name: tree for name, tree in given_of(parts).items() if name in names}


def context(parts: Parts) -> ProgramSpec:
    """Returns the program of what all layers' keys and values are computed of, and of the rotary tables."""
    module, (arguments, extra) = _module(parts), prompted_of(parts)

    def stream_context(outside: Any, embeddings: jax.Array, **inputs: jax.Array) -> dict[str, Any]:
        model = bind(module, outside, module.stacks)
        found = model.context(embeddings, parts.dtype, **inputs, **extra)
        return {"context": found, "rope": model.rope(parts.latent_shape)}

    return parts.spec(stream_context, {OUTSIDE: _outside(parts), **arguments})


def enter(parts: Parts) -> ProgramSpec:
    """Returns the program from a step's latents to ``carry``, which the layers pass on, and ``modulation``.

    ``embedding`` is the time's, for ``leave``.
    """
    module, guided = _module(parts), parts.shape.guidance

    def stream_enter(
        outside: Any,
        latents: jax.Array,
        timestep: jax.Array,
        condition: Any = None,
        frame_mask: jax.Array | None = None,
    ) -> dict[str, Any]:
        model = bind(module, outside, module.stacks)
        return model.begin(*model_inputs(latents, timestep, guided, condition, frame_mask), parts.dtype)  # type: ignore[no-any-return]

    arguments = {
        OUTSIDE: _outside(parts),
        "latents": state_of(parts)["latents"],
        "timestep": jax.ShapeDtypeStruct((), jnp.float32),
        **_given(parts, "condition", "frame_mask"),
    }
    return parts.spec(stream_enter, arguments)


def keys(parts: Parts, stack: str) -> ProgramSpec:
    """Returns the program of one layer's keys and values."""
    module = _module(parts)
    blocks = getattr(module, stack)

    def stream_keys(context: Any, **layer: Any) -> dict[str, Any]:
        found = bind_layer(blocks, layer[stack])
        return {"kv": module.keys(stack, found, context, parts.dtype)}

    arguments = {"context": parts.outputs(context)["context"], stack: _one_layer(parts, stack)}
    return parts.spec(stream_keys, arguments)


def layer(parts: Parts, stack: str) -> ProgramSpec:
    """Returns the program of one layer; ``carry`` is donated.

    A layer beside the blocks takes its ``index`` too, and the options of all of its stack.
    """
    module = _module(parts)
    blocks, begun, attention = getattr(module, stack), parts.outputs(enter), attention_form(parts.kernels)
    beside = stack != next(iter(module.stacks))
    options = _given(parts, "conditioning_scale") if beside else {}
    if options:
        options["index"] = jax.ShapeDtypeStruct((), jnp.int32)

    def stream_layer(
        carry: Any,
        kv: Any,
        modulation: jax.Array,
        rope: Any,
        index: jax.Array | None = None,
        conditioning_scale: jax.Array | None = None,
        **weights: Any,
    ) -> dict[str, Any]:
        found = bind_layer(blocks, weights[stack])
        apply = module.applying(modulation, rope, parts.latent_shape, attention)
        if not beside:
            return {"carry": module.apply_block(apply, found, carry, kv)}
        options = {} if conditioning_scale is None else {"scale": conditioning_scale}
        extra = None if index is None else module.per_layer_beside(options)[index]
        return {"carry": module.apply_beside(apply, found, carry, kv, extra)}

    arguments = {
        stack: _one_layer(parts, stack),
        "carry": begun["carry"],
        "kv": keys(parts, stack).outputs["kv"],
        "modulation": begun["modulation"],
        "rope": parts.outputs(context)["rope"],
        **options,
    }
    return parts.spec(stream_layer, arguments, donate=("carry",))


def leave(parts: Parts) -> ProgramSpec:
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
    ) -> dict[str, Any]:
        model = bind(module, outside, module.stacks)
        output = model.end(carry, embedding, parts.latent_shape)
        return updated(output, latents, history, coefficients, guidance_scale)

    arguments = {
        OUTSIDE: _outside(parts),
        "carry": begun["carry"],
        "embedding": begun["embedding"],
        **state,
        "coefficients": jax.ShapeDtypeStruct((len(COLUMNS),), jnp.float32),
        **_given(parts, "guidance_scale"),
    }
    return parts.spec(stream_leave, arguments, donate=tuple(state))
