"""The Animate transformer: the base model with pose tokens, and with face adapters after some blocks.

Source: diffusers' WanAnimateTransformer3DModel. The latents' first frame belongs to the reference image; pose
and face belong to the frames after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.blocks import KV
from wanbuild.models.face import FaceAdapter, FaceEncoder
from wanbuild.models.layers import Linear
from wanbuild.models.motion_encoder import MotionEncoder
from wanbuild.models.params import stacked
from wanbuild.models.partition import mesh_sizes
from wanbuild.models.transformer import (
    ApplyBlock,
    Carry,
    Condition,
    Context,
    WanTransformer,
    spatial_shape,
)


class AnimateTransformer(WanTransformer):
    """The base transformer, the pose's patch embedding, the face encoders and the face adapters.

    Its condition is ``channels``, float32 (20, T, h, w), and ``pose``, float32 (16, T - 1, h, w).
    """

    config: AnimateConfig

    def __init__(
        self, config: AnimateConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        super().__init__(config, dtype, norm_dtype)
        patch_in = config.latent_channels * config.patch_volume
        self.pose_patch_embedding = Linear(patch_in, config.dim, dtype, ("embed", None))
        self.motion_encoder = MotionEncoder(config, dtype, norm_dtype)
        self.face_encoder = FaceEncoder(config, dtype)
        self.face_adapter = stacked(FaceAdapter(config, dtype, norm_dtype), len(config.face_positions))

    @property
    def stacks(self) -> dict[str, Sequence[int]]:
        return {**super().stacks, "face_adapter": self.config.face_positions}

    def prepare(
        self, embeddings: jax.Array, latent_shape: tuple[int, int, int], dtype: Any, **inputs: Any
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Checks the face video, and prepares as the base does; ``inputs`` are those of ``context``.

        Raises ValueError if the face video is missing, or its frames or size do not match.
        """
        size, face_video = self.config.motion_encoder_size, inputs.get("face_video")
        wanted = (4 * (latent_shape[0] - 2) + 1, size, size, 3)
        if face_video is None or face_video.shape != wanted:
            raise ValueError(f"face_video has to be {wanted}, not {getattr(face_video, 'shape', None)}")
        return super().prepare(embeddings, latent_shape, dtype, **inputs)

    def context(
        self,
        embeddings: jax.Array,
        dtype: Any,
        image_tokens: jax.Array | None = None,
        image_multiple: int = 1,
        face_video: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the base's context, and ``face``: face tokens (P, T, J, D), float32, of T latent frames.

        ``face_video`` is uint8 (F, S, S, 3), S the config's motion_encoder_size and F the frames of the
        video. The first prompt sees it; the others, negative prompts, see a black face.
        """
        assert face_video is not None
        tokens = self.face_encoder(self._motions(face_video, len(embeddings)))
        return {**super().context(embeddings, dtype, image_tokens, image_multiple), "face": tokens}

    def keys(self, stack: str, layer: Any, context: Context, dtype: Any) -> KV:
        """Returns the keys and values of one layer: an adapter's are of shape (P, T, J, N, K)."""
        if stack == "face_adapter":
            return layer.kv(context["face"], dtype)  # type: ignore[no-any-return]
        return super().keys(stack, layer, context, dtype)

    def _motions(self, face_video: jax.Array, prompts: int) -> jax.Array:
        """Returns motion vectors (P, F, C): of the video, and for each further prompt of black frames."""
        if prompts == 1:
            return self.motion_encoder(face_video)[None]
        # Black frames are equal, so only one is encoded, usually in a slot of the last batch that is free.
        motions = self.motion_encoder(jnp.pad(face_video, ((0, 1), (0, 0), (0, 0), (0, 0))))
        video, black = motions[:-1], motions[-1:]
        return jnp.stack([video, *[jnp.broadcast_to(black, video.shape)] * (prompts - 1)])

    def embed(self, latents: jax.Array, condition: Condition, dtype: Any) -> jax.Array:
        """Embeds latents (B, C, T, h, w) as tokens (B, S, D) in dtype; the pose begins at frame two."""
        x = super().embed(latents, condition, dtype)
        pose = (self._shared_pose if mesh_sizes() else self._pose)(condition["pose"], x)
        return (x.astype(jnp.float32) + pose).astype(dtype)

    def _pose(self, pose: jax.Array, x: jax.Array) -> jax.Array:
        """Embeds poses (C, T - 1, h, w) in float32, with zeros for the reference image's tokens of x."""
        tokens = self.pose_patch_embedding(self.patchify(pose[None]).astype(x.dtype), out_dtype=jnp.float32)
        return jnp.pad(tokens, ((0, 0), (x.shape[1] - tokens.shape[1], 0), (0, 0)))

    def _shared_pose(self, pose: jax.Array, x: jax.Array) -> jax.Array:
        """The same where devices share the tokens: the poses' tokens lie with x's from the start."""
        pose = jnp.pad(pose, ((0, 0), (1, 0), (0, 0), (0, 0)))
        tokens = self.pose_patch_embedding(self.patchify(pose[None]).astype(x.dtype), out_dtype=jnp.float32)
        _, rows, columns = self.config.grid(spatial_shape(pose[None]))
        return jnp.where(jnp.arange(x.shape[1])[:, None] < rows * columns, 0, tokens)

    def apply_beside(self, apply: ApplyBlock, layer: FaceAdapter, carry: Carry, kv: KV, extra: Any) -> Carry:
        """Adds the output of a face adapter to the tokens."""
        del extra
        x = carry["x"]
        return {"x": (x.astype(jnp.float32) + layer(x, apply.of_prompt(kv), apply.attention)).astype(x.dtype)}
