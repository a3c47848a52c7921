"""The options of a generation: one typed record, with a row for each option.

The command line, the lines of a prompts file, the keywords of ``Pipeline.generate``, the metadata of a video,
the table in docs/commands.md and a JSON schema derive from ``Request`` (``wanrun.rows``). A new option is one
row here, and the line that uses it.
"""

from __future__ import annotations

__all__ = ["PROMPTS", "RANDOM", "Request"]

from typing import Annotated

import msgspec

from wanrun.artifact.guiders import GuiderName
from wanrun.artifact.media import Media
from wanrun.artifact.model import Share, SolverName
from wanrun.artifact.roles import DecoderName, FormName
from wanrun.request.lora import LoraChoice, parse_lora
from wanrun.request.offered import (
    begins_with_video,
    continues,
    for_guider,
    for_nag,
    of_text_alone,
    tiny_decoder,
    two_experts,
    with_slots,
)
from wanrun.request.values import (
    AtLeast1,
    Clips,
    Count,
    FewSteps,
    Layers,
    Positive,
    Rate,
    Scale,
    Seed,
    Size,
    Steps,
    Text,
    Timesteps,
)
from wanrun.request.written import (
    RANDOM,
    parse_numbers,
    parse_seed,
    parse_size,
    parse_solver,
    parse_whole_numbers,
)
from wanrun.rows import option

PROMPTS = "Prompts"
"""The help's section of the prompts, which comes first."""

ARTIFACT = "the artifact's"
"""The help's text for a default that is in the manifest."""

STRENGTH = 0.8
"""Default share of a video to replace: diffusers'."""

TWO_EXPERTS = "two experts"
"""The models that have the options of a high-noise and a low-noise expert."""


class Request(Media, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt, its media and its other options; None means the default.

    Field names are the Python keywords. ``steps`` and ``frames`` are shorter on the command line and in JSON.
    Files are relative to the working directory. The order is that of the help and of docs/commands.md.
    """

    prompt: Annotated[Text, option("Description of the video; may be empty.", section=PROMPTS)]
    negative_prompt: Annotated[
        Text | None,
        option(
            "Description of what to avoid.",
            default=ARTIFACT,
            also="n_prompt nag_negative_prompt neg_prompt negative",
            section=PROMPTS,
        ),
    ] = None
    conditioning_scale: Annotated[
        Scale | None, option("Strength of the control video.", default=ARTIFACT, models="VACE")
    ] = None
    strength: Annotated[
        Share | None,
        option(
            "How much of --video to replace: the share of the steps that run, from the noisy video; needs a "
            "profile built with --video-to-video.",
            page="How much of the video to replace: the share of the steps that run.",
            default=f"{STRENGTH}, with --video",
            also="denoise denoising_strength",
            models="T2V, TI2V",
            needs=begins_with_video,
        ),
    ] = None
    profile: Annotated[
        str | None,
        option(
            "Name of a built profile, which sets the size, the frames and the number of videos.",
            default="chosen by the other options",
            value="NAME",
        ),
    ] = None
    size: Annotated[
        Size | None,
        option(
            "Width and height in pixels.",
            default="the first built",
            value="WxH",
            also="resolution",
            parse=parse_size,
        ),
    ] = None
    num_frames: Annotated[
        Count | None,
        option(
            "Frames of the video; with --clips, of a clip; for Animate, of a window.",
            page={"": "Frames of the video, or of a clip.", "Animate": "Frames of a window of the video."},
            default="the first built",
            also="frame_num frames length target_video_length",
        ),
    ] = msgspec.field(default=None, name="frames")
    clips: Annotated[
        Clips | None,
        option(
            "Clips of the video: each begins with the last frame of the one before, which is not repeated.",
            default="1",
            models="I2V, TI2V",
            needs=continues,
            also="num_clips",
        ),
    ] = None
    clip_prompts: Annotated[
        Text | None,
        option(
            "Prompts of the clips after the first, one per line; the last one holds for the rest.",
            default="the prompt",
            models="I2V, TI2V",
            needs=continues,
        ),
    ] = None
    window_frames: Annotated[
        Count | None,
        option(
            "Frames denoised together, of a built profile, for longer --frames: windows of text to video, "
            "blended where they overlap.",
            page="Frames denoised together, of a built profile, for a longer video.",
            default="those of --frames",
            needs=of_text_alone,
            also="context_frames",
        ),
    ] = None
    window_overlap: Annotated[
        Count | None,
        option(
            "Frames that neighbouring windows share, a multiple of 4.",
            default="a quarter of --window-frames, rounded up",
            needs=of_text_alone,
            also="context_overlap",
        ),
    ] = None
    num_steps: Annotated[
        Steps | None,
        option(
            "Denoising steps.",
            default=ARTIFACT,
            also="infer_steps num_inference_steps sample_steps sampling_steps steps",
        ),
    ] = msgspec.field(default=None, name="steps")
    guidance_scale: Annotated[
        Scale | None,
        option(
            "Strength of guidance; at most 1 turns it off. With two experts, that of the high-noise one.",
            page={
                "": "Strength of guidance; at most 1 turns it off.",
                "two experts": "Strength of guidance of the high-noise expert; at most 1 turns it off.",
            },
            default=ARTIFACT,
            also="cfg cfg_scale sample_guide_scale",
        ),
    ] = None
    guidance_scale_2: Annotated[
        Scale | None,
        option(
            "Strength of guidance of the low-noise expert, if --guidance-scale is above 1.",
            default="the given --guidance-scale, else the artifact's",
            models=TWO_EXPERTS,
        ),
    ] = None
    guidance_start: Annotated[
        Share | None,
        option(
            "Share of the steps before the first one with guidance; a step without takes half the time.",
            default="the artifact's, else 0",
        ),
    ] = None
    guidance_end: Annotated[
        Share | None,
        option("Share of the steps after which none has guidance.", default="the artifact's, else 1"),
    ] = None
    guider: Annotated[
        GuiderName | None,
        option(
            "How a step's passes are combined; cfg-zero (CFG-Zero*) and skip-layer need a profile built with "
            "--guider.",
            page={
                "": "How a step's passes are combined.",
                "cfg": "cfg: classifier-free guidance.",
                "cfg-zero": "cfg-zero: CFG-Zero*, which fits the negative pass to the positive one.",
                "skip-layer": "skip-layer: also away from a third pass, which leaves some layers out.",
            },
            default="cfg",
            built=for_guider(),
        ),
    ] = None
    zero_steps: Annotated[
        FewSteps | None,
        option(
            "First steps with velocity 0, for --guider cfg-zero.", default="1", built=for_guider("cfg-zero")
        ),
    ] = None
    skip_layers: Annotated[
        Layers | None,
        option(
            "Layers that the third pass of --guider skip-layer skips, from 0.",
            value="N,N,...",
            parse=parse_whole_numbers,
            also="skip_layer_guidance_layers slg_blocks slg_layers",
            built=for_guider("skip-layer"),
        ),
    ] = None
    skip_scale: Annotated[
        Scale | None,
        option(
            "Strength of --guider skip-layer: how far steps move away from the third pass.",
            default="2.8",
            also="skip_layer_guidance_scale slg_scale",
            built=for_guider("skip-layer"),
        ),
    ] = None
    skip_start: Annotated[
        Share | None,
        option(
            "Share of the steps after which the third pass of --guider skip-layer begins.",
            default="0.01",
            also="skip_layer_guidance_start slg_start",
            built=for_guider("skip-layer"),
        ),
    ] = None
    skip_end: Annotated[
        Share | None,
        option(
            "Share of the steps at which it ends; a step with it takes half as long again.",
            default="0.2",
            also="skip_layer_guidance_stop skip_stop slg_end",
            built=for_guider("skip-layer"),
        ),
    ] = None
    nag_scale: Annotated[
        AtLeast1 | None,
        option(
            "Strength of the negative prompt in steps without guidance (NAG), in a profile built with --nag; "
            "11 is usual.",
            page="Strength of the negative prompt in steps without guidance (NAG); 11 is usual.",
            default="1, which is off",
            built=for_nag,
        ),
    ] = None
    nag_tau: Annotated[
        Positive | None,
        option("Limit of --nag-scale: how much it may enlarge a token.", default="2.5", built=for_nag),
    ] = None
    nag_alpha: Annotated[
        Share | None,
        option("Share of --nag-scale's change that is kept.", default="0.25", built=for_nag),
    ] = None
    boundary: Annotated[
        Share | None,
        option(
            "Share of the training timesteps below which the low-noise expert runs.",
            default=ARTIFACT,
            models=TWO_EXPERTS,
            also="boundary_ratio",
        ),
    ] = None
    steps_high: Annotated[
        Steps | None,
        option(
            "Steps of the high-noise expert, with --steps-low: the two set --steps and --boundary.",
            models=TWO_EXPERTS,
            also="high_noise_steps",
            needs=two_experts,
        ),
    ] = None
    steps_low: Annotated[
        Steps | None,
        option(
            "Steps of the low-noise expert.", models=TWO_EXPERTS, also="low_noise_steps", needs=two_experts
        ),
    ] = None
    flow_shift: Annotated[
        Positive | None, option("Shift of the sigmas.", default=ARTIFACT, also="sample_shift shift")
    ] = None
    solver: Annotated[
        SolverName | None,
        option(
            "Solver, on its diffusers class's own grid; lcm, dmd and self-forcing, for distilled models, add "
            "noise between steps.",
            page="Solver of the steps; lcm, dmd and self-forcing, for distilled models, add noise.",
            default=ARTIFACT,
            also="sample_solver sampler sampler_name scheduler",
            parse=parse_solver,
        ),
    ] = None
    timesteps: Annotated[
        Timesteps | None,
        option(
            "Explicit timesteps instead of the solver's own, falling from at most 1000.",
            default="the artifact's, unless --steps, --solver or --flow-shift has another value",
            value="X,X,...",
            parse=parse_numbers,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        option(
            "Calibrated steps, instead of --steps: a schedule of the artifact, or a .json file.",
            page="Name of a schedule of calibrated steps, instead of --steps.",
            value="NAME|FILE",
        ),
    ] = None
    lora: Annotated[
        tuple[LoraChoice, ...],
        option(
            "LoRA of the artifact, or an adapter's file (.safetensors), and its strength; for two experts "
            "NAME:high=0.9,low=0.6. Repeatable.",
            page="LoRAs of the model: each one's name and strength, or for two experts high and low.",
            default="none; strength 1",
            value="NAME|FILE[:S]",
            also="loras",
            parse=parse_lora,
            built=with_slots,
        ),
    ] = ()
    loop: Annotated[
        FormName | None,
        option(
            "Form of the loop: one call per step; one call for all steps of an expert, which shows no "
            "progress; one call per step of each chunk; or one call per layer.",
            page={
                "": "Form of the loop.",
                "step": "step: one call per step.",
                "scan": "scan: one call for many steps, which shows no progress.",
                "chunks": "chunks: one call per step of each chunk.",
                "stream": "stream: one call per layer.",
            },
            default="the first of these that is built",
        ),
    ] = None
    decoder: Annotated[
        DecoderName | None,
        option(
            "Decoder of the final latents: the VAE's, or the artifact's tiny one, which is faster and "
            "coarser.",
            page={
                "": "Decoder of the final latents.",
                "full": "full: the VAE's decoder.",
                "tiny": "tiny: the tiny decoder, faster and coarser.",
            },
            default="full",
            needs=tiny_decoder,
        ),
    ] = None
    seed: Annotated[
        Seed,
        option(
            "Seed of the noise; same numbers as diffusers' CPU generator. random: another one each time, "
            "printed and recorded.",
            page="Seed of the noise; same numbers as diffusers' CPU generator. random: another one each "
            "time, recorded.",
            value="N|random",
            parse=parse_seed,
            also="base_seed noise_seed",
        ),
    ] = 0
    num_videos: Annotated[
        Count | None,
        option(
            "Videos per prompt, as built.", default="1", also="num_outputs_per_prompt num_videos_per_prompt"
        ),
    ] = None
    fps: Annotated[
        Rate | None,
        option("Frames per second of the video file.", default=ARTIFACT, also="frame_rate target_fps"),
    ] = None
