"""The options of a generation as keywords of Python, for type checkers and editors.

tests/helpers/keywords.py writes this file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from wanrun.artifact.model import SolverName
from wanrun.request.lora import LoraChoice

File = str | os.PathLike[str]
Lora = File | Mapping[str, Any] | LoraChoice


class Options(TypedDict, total=False):
    """The fields of ``Request`` besides the prompts; None is the default. For ``**options: Unpack[Options]``.

    Behind each are the names of other tools, such as diffusers' pipelines, that are understood too.
    """

    image: File | None
    first_frame: File | None
    image_path: File | None
    input_image: File | None
    last_image: File | None
    end_image: File | None
    last_frame: File | None
    last_frame_path: File | None
    video: File | None
    src_video: File | None
    video_path: File | None
    mask: File | None
    src_mask: File | None
    reference_image: File | Sequence[File] | None
    ref_image: File | Sequence[File] | None
    pose_video: File | None
    src_pose_path: File | None
    face_video: File | None
    src_face_path: File | None
    background_video: File | None
    src_bg_path: File | None
    mask_video: File | None
    src_mask_path: File | None
    mode: Literal["animate", "replace"] | None
    segment_overlap: Literal[1, 5] | None
    fit: Literal["stretch", "crop", "pad"] | None
    conditioning_scale: float | None
    strength: float | None
    denoise: float | None
    denoising_strength: float | None
    profile: str | None
    size: str | Sequence[int] | None
    resolution: str | Sequence[int] | None
    num_frames: int | None
    frame_num: int | None
    frames: int | None
    length: int | None
    target_video_length: int | None
    clips: int | None
    num_clips: int | None
    clip_prompts: str | None
    window_frames: int | None
    context_frames: int | None
    window_overlap: int | None
    context_overlap: int | None
    num_steps: int | None
    infer_steps: int | None
    num_inference_steps: int | None
    sample_steps: int | None
    sampling_steps: int | None
    steps: int | None
    guidance_scale: float | None
    cfg: float | None
    cfg_scale: float | None
    sample_guide_scale: float | None
    guidance_scale_2: float | None
    guidance_start: float | None
    guidance_end: float | None
    guider: Literal["cfg", "cfg-zero", "skip-layer"] | None
    zero_steps: int | None
    skip_layers: Sequence[int] | None
    skip_layer_guidance_layers: Sequence[int] | None
    slg_blocks: Sequence[int] | None
    slg_layers: Sequence[int] | None
    skip_scale: float | None
    skip_layer_guidance_scale: float | None
    slg_scale: float | None
    skip_start: float | None
    skip_layer_guidance_start: float | None
    slg_start: float | None
    skip_end: float | None
    skip_layer_guidance_stop: float | None
    skip_stop: float | None
    slg_end: float | None
    nag_scale: float | None
    nag_tau: float | None
    nag_alpha: float | None
    boundary: float | None
    boundary_ratio: float | None
    steps_high: int | None
    high_noise_steps: int | None
    steps_low: int | None
    low_noise_steps: int | None
    flow_shift: float | None
    sample_shift: float | None
    shift: float | None
    solver: SolverName | None
    sample_solver: SolverName | None
    sampler: SolverName | None
    sampler_name: SolverName | None
    scheduler: SolverName | None
    timesteps: Sequence[float] | None
    schedule: str | None
    lora: Lora | Sequence[Lora] | None
    loras: Lora | Sequence[Lora] | None
    loop: Literal["step", "scan", "chunks", "stream"] | None
    decoder: Literal["full", "tiny"] | None
    seed: int | Literal["random"] | None
    base_seed: int | Literal["random"] | None
    noise_seed: int | Literal["random"] | None
    num_videos: int | None
    num_outputs_per_prompt: int | None
    num_videos_per_prompt: int | None
    fps: float | None
    frame_rate: float | None
    target_fps: float | None
