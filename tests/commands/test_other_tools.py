"""Names of options and commands of other tools: each mistake ends in one line that names what is meant here.

The names are of diffusers' pipelines, ComfyUI, SGLang, vllm-omni, LightX2V, FastVideo and Wan's own
``generate.py``; some are what people write without any of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click
import pytest

from wanbuild.cli import wanbuild
from wancli.aliases import WANBUILD
from wancli.command import understood
from wancli.console import run
from wancli.run import wanrun
from wancli.serve import serve

COMMANDS: Mapping[str, click.Command] = {"wanrun": wanrun, "wanrun serve": serve, "wanbuild": wanbuild}

OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "wanrun": {
            "wanbuild inspect": "task model_cls",
            "wanbuild convert --artifact": "ckpt_dir model model-path",
            "--memory": (
                "offload_model enable_model_cpu_offload lowvram low-vram novram blocks-to-swap "
                "dit-cpu-offload dit-layerwise-offload vae-cpu-offload enable-cpu-offload pin-cpu-memory "
                "offload cpu-offload"
            ),
            "wanbuild compile --dtype": "convert_model_dtype torch_dtype dtype",
            "--text-encoder-device": "t5_cpu text-encoder-cpu-offload",
            "wanbuild compile --mesh": (
                "t5_fsdp dit_fsdp ulysses_size num-gpus n-gpus gpus tp tp-size sp-degree "
                "ulysses-degree ring-degree enable-cfg-parallel tensor-parallel-size cfg-parallel-size "
                "sp-size use-fsdp-inference"
            ),
            "": (
                "use_prompt_extend prompt_extend_method prompt_extend_model "
                "prompt_extend_target_lang audio strength max_sequence_length denoise "
                "use_prompt_enhancer use-sage-attention sage attention attention-backend xformers"
            ),
            "--pose-video --face-video": "src_root_path",
            "--segment-overlap": "refert_num",
            "--mode": "replace_flag",
            "--lora wanbuild lora": (
                "use_relighting_lora lora-path lora_name lora-nickname lora_strength lora-scale lora_weight "
                "lora_configs high-noise-lora lora_low"
            ),
            "--reference-image": "src_ref_images",
            "--size": "height width aspect_ratio hieght",
            "--seed": "generator",
            "--help": (
                "output_type upscale verbose quiet dry-run input interpolate loop-video crf codec help-all"
            ),
            "--target --list": "device cpu gpu-id",
            "wanbuild compile --vae-dtype": "vae-tiling vae-slicing vae-use-tiling vae-use-slicing",
            "wanbuild compile": "compile torch-compile enable-torch-compile enforce-eager",
            "wanbuild convert --quantise": "fp8 fp8_e4m3fn quantization quantize",
            "wanbuild convert --help": "unet vae text-encoder",
            "--clips": "clip",
            "--nag-scale": "nag",
            "--window-frames": "window",
            "--prompt": "text",
            "wanbuild convert --sampling": "sampling",
            "--timesteps": "sigmas",
            "--guidance-scale": "no-cfg",
            "--output": "output-directory save-output format",
            "--num-videos": "batch_size batch_count",
            "--schedule wanbuild calibrate": "enable-teacache cache-backend VSA-sparsity teacache",
            "--frames": "duration",
            "--guidance-scale --guidance-scale-2": "guidance-scale-high guidance-scale-low",
            "--prompts": "config_json prompt-txt",
            "--flow-shift": "flow-shift-2",
            "--negative-prompt": "negative-promt",
            "--overwrite": "force",
            "--list": "list-profiles",
            "wanrun serve": "port host server",
            "wanrun serve --host": "listen",
        },
        "wanbuild convert": {
            "--artifact": "output output-dir",
            "--quantise wanbuild convert --help": "quantize quantization fp8 int8",
            "wanbuild convert": "checkpoint model model-path",
            "--transformer": "unet high-noise",
            "--text-encoder --image-encoder": "clip",
            "--lora": "lora-scale lora-weight",
            "wanbuild compile wanbuild plan": "size",
            "--weights-dtype wanbuild compile --dtype": "dtype",
            "--lora-high": "high-noise-lora",
            "--default": "scheduler flow-shift",
        },
        "wanbuild compile": {
            "--size": "height width",
            "--num-videos": "batch-size",
            "--guidance --no-guidance": "cfg guidance-scale",
            "--no-guidance": "no-cfg",
            "--vae-dtype": "vae-tiling",
            "--mesh": "num-gpus tp",
            "--target": "device platform chip gpu",
            "wanbuild convert --quantise": "quantize",
            "--steps": "steps",
            "": "attention force",
            "--loop --memory": "offload",
        },
        "wanbuild plan": {
            "--target": "chip gpu",
            "--size": "height",
            "--quantise": "fp8",
        },
        "wanbuild verify": {
            "--source": "checkpoint",
        },
        "wanbuild push": {
            "wanbuild push": "repo-id",
        },
        "wanrun serve": {
            "": "tp size num-gpus profile",
            "wanrun serve": "model served-model-name",
            "--keys": "api-key",
            "--loras": "lora-dir lora_modules",
            "--host": "listen",
            "--data": "output-path",
            "wanrun serve --help": "workers-per-gpu share",
            "--tls-certificate": "ssl-certfile",
        },
    }
)
"""By a command, what a line names instead of options: its other options, and commands."""

WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "wanrun": {
            "wanrun serve": "server server",
            "--prompt": "generate generate run t2v",
            "wanbuild convert": "convert",
            "wanbuild compile": "compile",
            "wanbuild inspect": "inspect",
            "--list": "list",
            "--prompt --timing": "bench",
            "--help": "help",
            "wanbuild verify": "verify",
        },
        "wanbuild": {
            "wanbuild convert --quantise": "quantize quantise",
            "wanbuild compile": "export",
            "--prompt": "generate run",
            "wanrun serve": "serve",
            "wanbuild inspect": "info list",
            "wanbuild convert wanbuild pull": "download",
            "wanbuild push": "upload publish",
            "wanbuild calibrate wanbuild plan --best": "optimize",
            "wanbuild verify": "check test",
            "wanbuild toy": "init new",
            "wanbuild convert --lora": "fuse merge",
            "--prompt --timing": "benchmark",
            "wanbuild convert": "convrt",
            "--help": "help",
        },
    }
)
"""By a program, what a line names instead of commands."""

NAMED = re.compile(r"--[a-z][a-z0-9-]*|\bwan(?:build|run) [a-z]+\b")


def said(command: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what the only line of a command names beside the mistake itself."""
    program = command if command in COMMANDS else command.split()[0]
    before = command.split()[1:] if program == "wanbuild" else []
    assert run(COMMANDS[program], [*before, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return " ".join(dict.fromkeys(NAMED.findall(line.partition("; ")[2])))


@pytest.mark.parametrize("command", OPTIONS)
def test_an_option_of_another_tool_names_what_to_use(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for named, options in OPTIONS[command].items():
        for option in options.split():
            assert said(command, "DIR", f"--{option}", capsys=capsys) == named, option


@pytest.mark.parametrize("program", WORDS)
def test_a_command_of_another_tool_names_what_to_use(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for named, words in WORDS[program].items():
        for word in words.split():
            assert said(program, word, "DIR", capsys=capsys) == named, word
    (tmp_path / "list").mkdir()
    assert run(wanrun, ["list", "--prompt", "a"]) == 3  # a folder of this name is meant


def test_what_a_line_names_is_there() -> None:
    """A remedy with an option that is renamed would be another mistake."""
    groups = {**COMMANDS, **{f"wanbuild {name}": one for name, one in wanbuild.commands.items()}}
    params = (param for command in groups.values() for param in command.params)
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    named = {
        name
        for table in (*OPTIONS.values(), *WORDS.values())
        for names in table
        for name in NAMED.findall(names)
    }
    assert {one for one in named if one.startswith("--")} <= known
    assert {one for one in named if not one.startswith("--")} <= {*groups, "wanrun serve"}
    assert set(WANBUILD) == wanbuild.commands.keys()


def test_a_name_is_told_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert understood("scheduler") == "solver"
    assert run(wanbuild, ["convert", "x", "--scheduler=euler"]) == 2
    assert " --scheduler; " in capsys.readouterr().err
