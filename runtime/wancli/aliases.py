"""Options and commands of other tools that do not exist here: what each means, or what to do instead.

``wanrun.request.elsewhere`` has the names that are not options of a generation; here are those that mean
another thing to another command, and the names of commands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from wanrun.errors import UsageError
from wanrun.request.elsewhere import ELSEWHERE, by_name, nearest
from wanrun.request.schema import rows

_EIGHT_BITS = "fp8 int8 load_in_8bit quantisation quantization quantize"
_DEVICES = "chip cpu device gpu platform"
_SPREAD = (
    "cfg_parallel_size dit_fsdp enable_cfg_parallel gpus n_gpus num_gpus ring_degree ring_size sp_degree "
    "sp_size t5_fsdp tensor_parallel_size tp tp_size ulysses_degree ulysses_size use_fsdp_inference"
)

OF_COMMANDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "wanrun": {
            **ELSEWHERE,
            **by_name(
                {
                    "pass --output with {index} in the name, such as DIR/{index}.mp4": (
                        "outdir output_dir output_directory save_dir"
                    ),
                    "every video is saved: pass --output PATH": "save save_output",
                    "pass --prompts FILE": "prompt_file prompt_path prompt_txt",
                    "pass --overwrite": "force",
                    "pass --list": "list_profiles list_targets",
                    "wanrun serve has it": "api_key host keys port",
                    "it is wanrun serve --host": "listen",
                    "wanrun serve ARTIFACT answers over HTTP": "api server",
                    "the name in --output decides: .mp4, .webm, .gif and others": "format output_format",
                    "give options one by one, or as a line of JSON in --prompts FILE": "config config_json",
                }
            ),
        },
        "wanrun serve": by_name(
            {
                "name the artifact: wanrun serve ARTIFACT": "ckpt_dir model model_path task",
                "name the artifact so: wanrun serve NAME=ARTIFACT": "served_model_name",
                "pass --keys FILE": "api_key",
                "pass --loras DIR": "lora_dir lora_modules lora_path",
                "leave it out: wanbuild compile --lora-rank makes slots": (
                    "enable_lora max_lora_rank max_loras"
                ),
                "pass --host 0.0.0.0": "listen",
                "pass --tls-certificate FILE": "cert certfile ssl_certfile",
                "pass --tls-key FILE": "keyfile ssl_keyfile",
                "pass --data DIR": "outdir output output_dir output_directory",
                "pass --workers": "data_parallel_size dp dp_size",
                "each device has a worker, and a mesh belongs to a program: see docs/meshes.md": _SPREAD,
                "pass --memory low, or --memory stream: see docs/small-cards.md": (
                    "cpu_offload dit_cpu_offload dit_layerwise_offload low_vram lowvram offload "
                    "offload_model vae_cpu_offload"
                ),
                "pass --target; CUDA_VISIBLE_DEVICES says which GPUs": _DEVICES,
            }
        ),
        "wanbuild": by_name(
            {
                "wanbuild convert --quantise int8, or float8, stores weights in 8 bits": _EIGHT_BITS,
                "wanbuild compile --dtype has it": "precision torch_dtype",
                "wanrun --memory low, or stream, has it: see docs/small-cards.md": (
                    "cpu_offload low_vram lowvram offload offload_model"
                ),
                "wanbuild calibrate chooses fewer steps: none is skipped": "cache_dit tea_cache teacache",
            }
        ),
        "wanbuild convert": by_name(
            {
                "name the checkpoint without an option: wanbuild convert CHECKPOINT": (
                    "checkpoint ckpt ckpt_dir model model_path repo_id source"
                ),
                "pass --artifact DIR": "outdir output output_dir output_directory",
                "pass --quantise int8, or float8: see wanbuild convert --help": _EIGHT_BITS,
                "weights are stored so with --weights-dtype bfloat16, or float32; wanbuild compile --dtype "
                "computes so": "dtype precision torch_dtype",
                "pass --lora-high FILE": "high_noise_lora",
                "pass --lora-low FILE": "low_noise_lora",
                "pass --transformer FILE": "diffusion_model dit high high_noise unet",
                "pass --transformer-2 FILE": "low low_noise",
                "pass --text-encoder FILE, or --image-encoder FILE": "clip",
                "pass --text-encoder FILE": "t5 umt5",
                "write it behind the file: --lora FILE:SCALE": "lora_scale lora_strength lora_weight",
                "pass --default NAME=VALUE": (
                    "boundary flow_shift fps guidance_scale guidance_scale_2 num_steps shift solver steps "
                    "timesteps"
                ),
            }
        ),
        "wanbuild compile": by_name(
            {
                "pass --size WIDTHxHEIGHT": "height width",
                "pass --num-videos": "batch_size n_iter",
                "pass --no-guidance": "no_cfg",
                "pass --guidance or --no-guidance; the scale is of wanrun": "guidance_scale",
                "a program serves every number of steps; pass wanrun --steps": "steps",
                "pass --mesh AXIS=N,...": _SPREAD,
                "pass --target": _DEVICES,
                "leave it out: a profile that is there is built again": "force overwrite",
                "a target has its own form of attention": (
                    "attention attention_backend attn sage_attention xformers"
                ),
                "few frames are decoded at a time already; --vae-dtype bfloat16 halves the VAE's memory": (
                    "vae_slicing vae_tiling"
                ),
                "pass --loop stream, for wanrun --memory stream: see docs/small-cards.md": (
                    "cpu_offload low_vram lowvram offload offload_model"
                ),
            }
        ),
        "wanbuild plan": by_name(
            {
                "pass --size WIDTHxHEIGHT": "height width",
                "pass --num-videos": "batch_size",
                "pass --guidance or --no-guidance": "guidance_scale",
                "pass --target CHIP-N": f"{_DEVICES} {_SPREAD}",
                "pass --quantise int8, or float8": _EIGHT_BITS,
            }
        ),
        "wanbuild verify": by_name({"pass --source CHECKPOINT": "checkpoint ckpt ckpt_dir model"}),
        "wanbuild push": by_name(
            {"name it without an option: wanbuild push ARTIFACT OWNER/NAME": "repo repo_id repository"}
        ),
        "wanbuild toy": by_name({"pass --variant NAME": "model model_cls task"}),
    }
)
"""By a command, and by a name that no option of it has, what to do instead. Those of ``wanbuild`` hold for
each of its commands."""

WANBUILD = (
    "attest",
    "build",
    "calibrate",
    "compile",
    "convert",
    "embed",
    "inspect",
    "lora",
    "oci",
    "plan",
    "pull",
    "push",
    "sbom",
    "sign",
    "toy",
    "verify",
)
"""The commands of ``wanbuild``."""

_VIDEO = "wanrun ARTIFACT --prompt TEXT makes a video"
_TIMED = "wanrun ARTIFACT --prompt TEXT --timing measures a run"

WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "wanrun": {
            **{name: f"wanbuild {name} does it" for name in WANBUILD},
            **by_name(
                {
                    "wanrun serve ARTIFACT answers over HTTP": "api gui server ui web webui",
                    _VIDEO: "create generate i2v infer make run sample t2v video",
                    "wanrun ARTIFACT --list prints profiles and targets": "list profiles targets",
                    _TIMED: "bench benchmark profile",
                    "wanrun ARTIFACT --check reads all of it": "check",
                    "wanbuild inspect ARTIFACT does it": "info show",
                    "see wanrun --help": "help",
                }
            ),
        },
        "wanbuild": by_name(
            {
                "wanbuild convert CHECKPOINT ARTIFACT --quantise int8 does it": (
                    "quantisation quantise quantization quantize"
                ),
                "wanbuild convert --lora FILE does it": "fuse merge",
                "wanbuild compile ARTIFACT does it": "aot export trace",
                "wanbuild calibrate ARTIFACT chooses few steps, and wanbuild plan --best settings": (
                    "optimise optimize tune"
                ),
                _VIDEO: "create generate infer run sample",
                "wanrun serve ARTIFACT answers over HTTP": "api serve server",
                "wanbuild inspect ARTIFACT does it": "info list ls show",
                "wanbuild convert OWNER/NAME ARTIFACT fetches a checkpoint, and wanbuild pull an artifact's "
                "newest revision": "download fetch get",
                "wanbuild push ARTIFACT OWNER/NAME does it": "publish upload",
                "wanbuild verify ARTIFACT does it": "check test validate",
                _TIMED: "bench benchmark profile",
                "wanbuild toy DIR writes a small checkpoint to begin with": "demo example init new",
                "see wanbuild --help": "help",
            }
        ),
    }
)
"""What to do instead of a command that a program lacks, by program and by the command's name."""


def no_option(
    command: str, written: str, meant: str, own: Sequence[str], others: Mapping[str, Collection[str]]
) -> UsageError:
    """Returns the error of an option that a command lacks, with what to do if the name is known or similar.

    ``written`` is the option as the user wrote it, ``meant`` the option of a generation that its name stands
    for, else the same. ``own`` are the command's options, ``others`` those of its program's other commands.
    """
    remedy = _remedy(command, written, meant, own, others) or f"see {command} --help"
    return UsageError("unknown_parameter", f"{command} has no {written}", remedy=remedy)


def _remedy(
    command: str, written: str, meant: str, own: Sequence[str], others: Mapping[str, Collection[str]]
) -> str | None:
    """Returns what to do about an option that a command lacks; None where nothing is sure."""
    instead = _instead(command)
    for name in (_name(written), _name(meant)):
        if name in instead:
            return instead[name]
    if having := [other for other, names in others.items() if meant in names]:
        return f"{' and '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    options = {_name(one): one for one in own}
    near = nearest(_name(written), [*options, *instead])
    return f"use {options[near]}" if near in options else instead.get(near or "")


def _instead(command: str) -> Mapping[str, str]:
    """Returns what to do instead of an option that a command lacks, by the option's name."""
    if command == "wanrun serve":
        fields = {row.key: "it is a field of each request" for row in rows()}
        return {**fields, **OF_COMMANDS[command]}
    return {**OF_COMMANDS.get(command.split()[0], {}), **OF_COMMANDS.get(command, {})}


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def command_meant(program: str, word: str, commands: Collection[str]) -> str | None:
    """Returns what to do instead of a command that a program lacks; None if the word is not known.

    ``commands`` are the program's, of which the word may be a misspelling.
    """
    if word in WORDS[program]:
        return WORDS[program][word]
    meant = nearest(word, commands)
    return None if meant is None else f"use {program} {meant}"
