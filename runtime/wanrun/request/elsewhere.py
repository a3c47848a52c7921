"""Options of other tools that a generation does not have here: what each means, or what to do instead.

The names come from diffusers' pipelines, ComfyUI, SGLang, vllm-omni, LightX2V, FastVideo and Wan's own
``generate.py``. A name that means an option of a generation has no row here: ``also`` of the option has it.
"""

from __future__ import annotations

__all__ = ["ALIKE", "ELSEWHERE", "OF_CLIENTS", "OF_PYTHON", "by_name", "nearest", "no_attribute"]

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from wanrun.errors import UsageError, field

_Remedy = TypeVar("_Remedy")

NEAR = 0.8
"""Of two names: the share of letters in the same order that makes one look like the other misspelt."""

ALIKE = 0.5
"""The share that makes one an example where nothing is sure."""


class Remedy(NamedTuple):
    """What to do instead of an option of another tool, with options as ``errors.field``.

    ``own`` is for those who run the artifact, ``client`` for clients of a server, who can neither build nor
    load it; empty for the same.
    """

    own: str
    client: str = ""


def by_name(rows: Mapping[_Remedy, str]) -> Mapping[str, _Remedy]:
    """Returns the remedy by each name, of rows with a remedy and names with spaces between them.

    Raises:
        ValueError: for a name in two rows.
    """
    pairs = [(name, remedy) for remedy, names in rows.items() for name in names.split()]
    if len(pairs) > len(dict(pairs)):
        raise ValueError(f"a name stands in two rows: {sorted(name for name, _ in pairs)}")
    return MappingProxyType(dict(pairs))


_MODEL = "an artifact is made ahead; ask for a model that the server has"
_SERVER = "leave it out: it is decided where the model is built and served"

_LORA = f"pass {field('lora')}, with the name of one of the model's and its strength"

_REMEDIES = by_name(
    {
        Remedy("convert it first: wanbuild convert CHECKPOINT --artifact DIR", _MODEL): (
            "checkpoint ckpt ckpt_dir model model_path model_id pretrained_model_name_or_path"
        ),
        Remedy(
            "an artifact has it; another one is made of single files: wanbuild convert --help", _MODEL
        ): "diffusion_model image_encoder text_encoder tokenizer transformer transformer_2 unet vae",
        Remedy(f"pass {field('clips')} for a longer video; an artifact has its image encoder"): "clip",
        Remedy(
            f"pass {field('lora')} NAME:STRENGTH; wanbuild lora makes one of a published file",
            _LORA,
        ): (
            "fuse_lora load_lora_weights lora_configs lora_name lora_nickname lora_path lora_request "
            "lora_scale lora_strength lora_weight set_adapters use_relighting_lora"
        ),
        Remedy(
            f"pass {field('lora')} NAME:high=0.9,low=0.6; wanbuild lora makes one adapter of both",
            _LORA,
        ): "high_noise_lora low_noise_lora lora_high lora_low",
        Remedy("it belongs to a distilled model: wanbuild convert --sampling NAME", _MODEL): "sampling",
        Remedy("an artifact is one model; wanbuild inspect DIR says which", _MODEL): (
            "model_cls model_type task workload_type"
        ),
        Remedy("programs are compiled ahead: run wanbuild compile", _SERVER): (
            "compile enable_torch_compile enforce_eager torch_compile"
        ),
        Remedy("it belongs to a program: wanbuild compile --dtype bfloat16, or float32", _MODEL): (
            "convert_model_dtype dtype precision torch_dtype"
        ),
        Remedy("8 bits are a matter of converting: wanbuild convert --quantise int8, or float8", _MODEL): (
            "fp8 fp8_e4m3fn int8 load_in_8bit quantisation quantise quantization quantize transformer_quant"
        ),
        Remedy("leave it out: a target has its own form of attention", _SERVER): (
            "attention attention_backend attn attn_mode flash_attention sage sage_attention "
            "use_flash_attention use_sage_attention xformers"
        ),
        Remedy(
            "the VAE decodes few frames at a time already; wanbuild compile --vae-dtype bfloat16 halves its "
            "memory",
            _SERVER,
        ): (
            "enable_vae_slicing enable_vae_tiling tile_size vae_slicing vae_tiling vae_use_slicing "
            "vae_use_tiling"
        ),
        Remedy(
            f"pass {field('decoder')} tiny, where wanbuild convert --tiny-vae has added a tiny decoder",
            _MODEL,
        ): "tae tae_path taehv tiny_vae tiny_vae_path use_lightvae use_tae use_taehv use_tiny_vae vae_tiny",
        Remedy("a mesh belongs to a program: wanbuild compile --mesh, see docs/meshes.md", _SERVER): (
            "cfg_parallel cfg_parallel_size dit_fsdp enable_cfg_parallel gpus n_gpus num_gpus ring_degree "
            "ring_size sp sp_degree sp_size t5_fsdp tensor_parallel_size tp tp_size ulysses_degree "
            "ulysses_size use_fsdp_inference"
        ),
        Remedy(
            f"pass {field('memory')} low, or {field('memory')} stream: see docs/small-cards.md", _SERVER
        ): (
            "block_swap blocks_to_swap cpu_offload dit_cpu_offload dit_layerwise_offload enable_cpu_offload "
            "enable_model_cpu_offload enable_sequential_cpu_offload low_memory low_vram lowvram novram "
            "offload offload_model pin_cpu_memory vae_cpu_offload"
        ),
        Remedy(f"pass {field('text_encoder_device')} cpu", _SERVER): "t5_cpu text_encoder_cpu_offload",
        Remedy(
            f"the target decides: pass {field('target')}, one of those that wanrun --list prints; "
            "CUDA_VISIBLE_DEVICES says which GPU",
            _SERVER,
        ): "cpu device device_id gpu gpu_id platform",
        Remedy(
            f"pass {field('schedule')}, steps that wanbuild calibrate has chosen: none is skipped",
            f"pass {field('schedule')}, one of the model's presets: none of its steps is skipped",
        ): "cache_backend cache_dit enable_teacache magcache tea_cache teacache use_teacache VSA_sparsity",
        Remedy(
            f"pass {field('num_videos')}, as built, or several prompts",
            f"pass {field('num_videos')}, as built, or send several requests",
        ): "batch_count batch_size n_iter",
        Remedy(
            f"pass {field('num_frames')}: seconds times frames per second, as built", "pass seconds"
        ): "duration seconds",
        Remedy(f"pass {field('size')} as WIDTHxHEIGHT"): "aspect_ratio height width",
        Remedy(f"pass {field('guidance_scale')}, and {field('guidance_scale_2')} for the low-noise expert"): (
            "guidance_scale_high guidance_scale_low"
        ),
        Remedy(f"pass {field('steps_high')} and {field('steps_low')}, the steps of each expert"): (
            "boundary_step_index end_at_step start_at_step"
        ),
        Remedy(f"pass {field('guidance_scale')} 1"): "no_cfg no_guidance",
        Remedy(f"pass {field('timesteps')}: a sigma of 0.5 is the timestep 500"): "sigmas",
        Remedy(f"Wan has one kind of guidance: {field('guidance_scale')}"): "true_cfg_scale",
        Remedy(
            f"pass {field('reference_image')} for each image"
        ): "ref_images reference_images src_ref_images",
        Remedy(f"pass {field('mode')} replace"): "replace_flag",
        Remedy(f"pass {field('segment_overlap')}"): "refert_num",
        Remedy(f"pass {field('pose_video')} and {field('face_video')}"): "src_root_path",
        Remedy(f"pass {field('prompt')}"): "caption positive positive_prompt text text_prompt",
        Remedy(f"pass {field('seed')}"): "generator",
        Remedy("write the longer prompt, or give several", "write the longer prompt"): (
            "enhance_prompt prompt_extend_method prompt_extend_model prompt_extend_target_lang "
            "use_prompt_enhancer use_prompt_extend"
        ),
        Remedy("these models have no sound"): "audio audio_path audio_reference enable_tts",
        Remedy("leave it out: the model reads 512 tokens"): "max_sequence_length",
    }
)
"""By a name of other tools that no option has, what to do instead."""

ELSEWHERE: Mapping[str, str] = MappingProxyType({name: one.own for name, one in _REMEDIES.items()})
"""The same for those who run an artifact."""

OF_CLIENTS: Mapping[str, str] = MappingProxyType(
    {name: one.client or one.own for name, one in _REMEDIES.items()}
)
"""The same for clients of a server."""

_RESULT = "result.frames are a NumPy array, and result.save(PATH) writes a video"

OF_PYTHON = by_name(
    {
        "pass on_step=FUNCTION: see docs/python.md": (
            "callback callback_on_step_end callback_on_step_end_tensor_inputs callback_steps"
        ),
        _RESULT: ("output output_file output_path output_type save save_path"),
        "pass the prompt: wanbuild embed keeps the embeddings of prompts": (
            "image_embeds negative_prompt_embeds prompt_embeds"
        ),
        "pass media=wanrun.Media(...)": "images ip_adapter_image",
        "leave it out: it changes nothing here": (
            "attention_kwargs cross_attention_kwargs guidance_rescale return_dict"
        ),
    }
)
"""The same for keywords of Python, which commands and files do not have."""


_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        **ELSEWHERE,
        **by_name(
            {
                "wanrun.load(DIR) loads an artifact, which wanbuild convert makes of a checkpoint": (
                    "DiffusionPipeline WanAnimatePipeline WanImageToVideoPipeline WanPipeline "
                    "WanVACEPipeline WanVideoToVideoPipeline from_pretrained from_single_file"
                ),
                "the target decides the device: wanrun.load(DIR, target=NAME)": "cuda to",
                "solver= of generate chooses it": "scheduler",
                _RESULT: "images videos",
            }
        ),
    }
)


def no_attribute(where: str, name: str) -> AttributeError:
    """Returns the error of a name that a module or an object lacks, with what to do if it is diffusers'."""
    what = f"{where} has no attribute {name!r}"
    if name not in _ATTRIBUTES:
        return AttributeError(what)
    return AttributeError(str(UsageError("unknown_name", what, remedy=_ATTRIBUTES[name])))


def nearest(name: str, names: Iterable[str], near: float = NEAR) -> str | None:
    """Returns the name that another one may be misspelt for, or the beginning of; None if there is none."""
    import difflib  # not in every start

    every = list(names)
    begun = [one for one in every if len(name) > 2 and one.startswith(f"{name}_")]
    return next(iter([*difflib.get_close_matches(name, every, 1, near), *begun]), None)
