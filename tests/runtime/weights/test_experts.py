"""Placing two experts: what fits where, at published sizes too."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import PROFILE
from helpers.manifests import plain_manifest, plain_model, plain_parameter, plain_program, programs_of
from wanbuild.components import KINDS
from wanbuild.models.params import abstract_params, flatten
from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER, PUBLISHED_TRANSFORMERS, PUBLISHED_VAE
from wanrun.artifact.manifest import Component, Manifest, read_manifest
from wanrun.artifact.programs import Program
from wanrun.machine.memory import DEVICE_MARGIN, HOST_MARGIN, Machine
from wanrun.opened.policy import LoadPolicy
from wanrun.weights.experts import PLACEMENTS, Division, Footprint, Placement, choose_placement

GB = 10**9
MIB = 2**20


def of_bytes(nbytes: int) -> Component:
    return Component("c", {"w": plain_parameter((nbytes // 4,), "float32")})


def manifest_of(**components: Component) -> Manifest:
    options = {"guidance_scale_2": 3.0, "boundary": 0.875} if "transformer_2" in components else {}
    return plain_manifest(components=components, model=plain_model(options=options))


def taking(**inputs: Any) -> dict[str, Program]:
    """A program for each name, whose inputs beside weights are these."""
    return {
        name: plain_program(avals={"inputs": avals, "outputs": {"x": "float32[1000000000]"}})
        for name, avals in inputs.items()
    }


SMALL = manifest_of(
    transformer=of_bytes(40 * MIB),
    transformer_2=of_bytes(40 * MIB),
    text_encoder=of_bytes(16 * MIB),
    vae=of_bytes(4 * MIB),
)
STATISTICS = {
    # 24 MiB beside weights: 6 of inputs, 2 of outputs, 16 of temporaries
    "denoise_step": {"argument_bytes": 30 * MIB, "output_bytes": 2 * MIB, "temporary_bytes": 16 * MIB},
    "decode_video": {"argument_bytes": 4 * MIB, "output_bytes": 3 * MIB, "temporary_bytes": 20 * MIB},
    "prepare": {"output_bytes": 4 * MIB, "temporary_bytes": 1 * MIB, "code_bytes": 1 * MIB},
}
INPUTS = {
    "denoise_step": {"kv": {"k": f"bfloat16[2,{MIB}]", "v": "float32[512,1024]"}, "flag": "bool[]"},
    "decode_video": {"latents": "uint8[1024]"},
    "prepare": {},
}
WORKING = 25 * MIB + 1  # and the flag's byte
BOTH, ONE = (40 + 40 + 16 + 4) * MIB + WORKING, (40 + 16 + 4) * MIB + WORKING
PLENTY = 1000 * MIB


def policy_of(memory: str = "auto") -> LoadPolicy:
    return LoadPolicy(memory=memory)


def choose(device: int | None, host: int = PLENTY, separate: bool = True, **options: Any) -> Placement:
    machine = Machine(device, host, separate)
    return choose_placement(SMALL, taking(**INPUTS), STATISTICS, machine, policy_of(**options))


def enough(needed: int, margin: float = DEVICE_MARGIN) -> int:
    """The least memory that this fits."""
    size = int(needed / (1 - margin))
    while needed > (1 - margin) * size:
        size += 1
    return size


HOST_ENOUGH = enough((40 + 40 + 16) * MIB, HOST_MARGIN)
TEXT = 16 * MIB


@pytest.mark.parametrize(
    ("device", "host", "options", "kind"),
    [
        (enough(BOTH), 0, {}, "both"),
        (enough(BOTH) - 1, PLENTY, {}, "host"),
        (enough(BOTH) - 1, HOST_ENOUGH, {}, "host"),
        (enough(BOTH) - 1, HOST_ENOUGH - 1, {}, "one"),
        (enough(ONE), PLENTY, {}, "host"),
        (enough(ONE) - 1, PLENTY, {}, "one"),
        (PLENTY, PLENTY, {"memory": "low"}, "one"),
        (None, 0, {}, "both"),
        (None, PLENTY, {"memory": "low"}, "one"),
        # Shared memory: the device's is not asked for, and host memory is no other place.
        (None, enough(BOTH, HOST_MARGIN), {"separate": False}, "both"),
        (PLENTY, enough(BOTH, HOST_MARGIN) - 1, {"separate": False}, "one"),
        (None, PLENTY, {"separate": False, "memory": "low"}, "one"),
    ],
)
def test_the_first_that_fits_is_chosen(
    device: int | None, host: int, options: dict[str, Any], kind: str
) -> None:
    found = choose(device, host, **options)
    assert kind in PLACEMENTS
    assert found.kind == kind
    assert found.available == (device if options.get("separate", True) else host)
    spared = TEXT * (options.get("memory") == "low" or not options.get("text_encoder", True))
    if not options.get("separate", True) and options.get("memory") != "low":
        spared = 0  # the text encoder takes memory wherever it runs
    assert found.needed == (BOTH if kind == "both" else ONE) - spared


def test_without_statistics_weights_inputs_and_slots_count() -> None:
    """Each expert on the device has its slots."""
    slots = taking(denoise_step={"lora": {"blocks": {"lora_a": f"bfloat16[{MIB}]"}}, "latents": "uint8[8]"})
    for programs, device, expected in (
        (taking(**INPUTS), PLENTY, ("both", 100 * MIB + 6 * MIB + 1)),
        (taking(), PLENTY, ("both", 100 * MIB)),
        (slots, PLENTY, ("both", 100 * MIB + 2 * 2 * MIB + 8)),
        (slots, 80 * MIB, ("host", 60 * MIB + 2 * MIB + 8)),
    ):
        found = choose_placement(SMALL, programs, {}, Machine(device, PLENTY, True), LoadPolicy())
        assert (found.kind, found.needed) == expected


def test_one_transformer_is_no_choice() -> None:
    model = manifest_of(transformer=of_bytes(40 * MIB), vae=of_bytes(4 * MIB))
    for memory in ("auto", "low"):
        machine = Machine(1 * MIB, 1 * MIB, True)
        found = choose_placement(model, taking(), {}, machine, policy_of(memory))
        assert (found.kind, found.needed) == ("both", 44 * MIB)


# --- in words -------------------------------------------------------------------------------------------


def test_the_choice_is_said_in_one_line() -> None:
    model = manifest_of(
        transformer=of_bytes(20 * GB), transformer_2=of_bytes(20 * GB), text_encoder=of_bytes(10 * GB)
    )

    def say(device: int | None, host: int = 100 * GB, separate: bool = True, **options: Any) -> list[str]:
        """The kind, the gigabytes that its line has, and the memory and the options that it names."""
        machine = Machine(device, host, separate)
        placement = choose_placement(model, taking(), {}, machine, policy_of(**options))
        line = placement.describe()
        assert line.startswith("experts: ") and placement.reason in line and "\n" not in line
        values = re.findall(r"([\d.]+) GB|\b(device|host)\b|(--memory low|memory is low)", placement.reason)
        return [placement.kind, *("".join(value) for value in values)]

    assert say(80 * GB) == ["both", "50.0", "80.0"]
    assert say(None) == ["both", "50.0"]
    short = ["50.0", "38.0", "device", "40.0"]
    assert say(40 * GB) == ["host", *short]
    assert say(40 * GB, 48 * GB) == ["one", *short, "host", "50.0", "48.0"]
    assert say(24 * GB) == ["one", "50.0", "22.8", "device", "24.0", "30.0", "--memory low"]
    assert say(None, 40 * GB, False) == ["one", "50.0", "36.0", "host", "40.0"]
    assert say(80 * GB, memory="low") == ["one", "memory is low"]


# --- published sizes ------------------------------------------------------------------------------------


@functools.cache
def published(kind: str) -> Component:
    """A published component with the default dtypes, from its config."""
    configs = {
        "transformer": PUBLISHED_TRANSFORMERS["wan2.2-t2v-a14b"],
        "text_encoder": PUBLISHED_TEXT_ENCODER,
        "vae": PUBLISHED_VAE,
    }
    made = KINDS[kind]
    module = made.module(made.parse(configs[kind], "config.json"), made.policy(None))
    leaves = flatten(abstract_params(module))
    return Component(kind, {path: plain_parameter(leaf.shape, leaf.dtype.name) for path, leaf in leaves})


def published_a14b() -> Manifest:
    transformer = published("transformer")
    return manifest_of(
        transformer=transformer,
        transformer_2=transformer,
        text_encoder=published("text_encoder"),
        vae=published("vae"),
    )


KV = "bfloat16[40,2,512,40,128]"
STEP_480P = {"denoise_step": {"output_bytes": 10**8, "temporary_bytes": 8_100_000_000}}
STEP_720P = {"denoise_step": {"output_bytes": 10**8, "temporary_bytes": 16_900_000_000}}
"""XLA's prediction for 14B with guidance on the CPU (benchmarks/RESULTS.md, "The whole path at 1.3B")."""


@pytest.mark.parametrize(
    ("device", "host", "statistics", "memory", "kind"),
    [
        (141, 256, STEP_720P, "auto", "both"),  # 87 GB
        (80, 256, {}, "auto", "both"),  # 71 GB of 76
        (80, 256, STEP_480P, "auto", "host"),  # 79 GB
        (60, 256, STEP_720P, "auto", "one"),  # what JAX takes of 80 GB by default; one needs 59
        (80, 64, STEP_480P, "auto", "one"),  # the host cannot hold both
        (141, 64, STEP_720P, "auto", "both"),
        (24, 256, {}, "auto", "one"),  # nor does one fit
        (141, 256, STEP_720P, "low", "one"),
    ],
)
def test_published_sizes_on_published_devices(
    device: int, host: int, statistics: dict[str, Any], memory: str, kind: str
) -> None:
    manifest = published_a14b()
    # 14.3 G parameters in bfloat16, of which the condition embedder's 0.2 are in float32.
    sizes = {name: component.nbytes / GB for name, component in manifest.components.items()}
    expected = {"transformer": 29.05, "transformer_2": 29.05, "text_encoder": 11.4, "vae": 0.5}
    assert sizes == pytest.approx(expected, abs=0.06)
    machine, programs = Machine(device * GB, host * GB, True), taking(denoise_step={"kv": {"k": KV, "v": KV}})
    assert choose_placement(manifest, programs, statistics, machine, policy_of(memory)).kind == kind


def test_the_inputs_of_a_real_profile(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    (target,) = manifest.targets.values()
    programs, statistics = programs_of(manifest, PROFILE), target.statistics[PROFILE]
    needed, machine = dict[str, int](), Machine(None, PLENTY, True)
    for name, program in programs.items():
        numbers = statistics[name]
        found = choose_placement(manifest_of(), {name: program}, {name: numbers}, machine, LoadPolicy())
        beside = sum(numbers[f"{kind}_bytes"] for kind in ("output", "temporary", "code"))
        # At least what the compiler counts as arguments, if every weight were read.
        weights = sum(manifest.components[key].nbytes for key in program.inputs if key in manifest.components)
        assert found.needed - beside >= numbers["argument_bytes"] - weights
        needed[name] = found.needed - beside
    assert needed["decode_first"] == 16 * 8 * 12 * 4  # latents of a frame, float32
    assert needed["encode_text_64"] == 2 * 64 * 4  # ids and mask, int32
    whole = choose_placement(manifest_of(), programs, statistics, machine, LoadPolicy())
    code = sum(numbers["code_bytes"] for numbers in statistics.values())
    parts = ("output_bytes", "temporary_bytes")
    assert whole.needed == code + max(
        needed[name] + sum(statistics[name][part] for part in parts) for name in needed
    )


# --- a mesh ---------------------------------------------------------------------------------------------

PARTS = Division(
    4,
    2,
    {
        "transformer": Footprint(host=20 * MIB, device=10 * MIB, shared=30 * MIB),
        "transformer_2": Footprint(host=21 * MIB, device=11 * MIB, shared=31 * MIB),
        "text_encoder": Footprint(host=12 * MIB, device=9 * MIB, shared=13 * MIB),
        "vae": Footprint(host=4 * MIB, device=4 * MIB, shared=4 * MIB),
    },
)


@pytest.mark.parametrize(
    ("machine", "kind", "needed"),
    [
        # Devices with memory of their own hold their parts; what is read passes through the host.
        (Machine(enough(34 * MIB + WORKING), 0, True), "both", 34 * MIB + WORKING),
        (
            Machine(enough(34 * MIB + WORKING) - 1, enough(53 * MIB, HOST_MARGIN), True),
            "host",
            24 * MIB + WORKING,
        ),
        (Machine(enough(34 * MIB + WORKING) - 1, enough(53 * MIB, HOST_MARGIN) - 1, True), "one", None),
        # CPU devices of one process: all that they hold together, and the work of both.
        (Machine(None, enough(78 * MIB + 2 * WORKING, HOST_MARGIN), False), "both", 78 * MIB + 2 * WORKING),
        (
            Machine(None, enough(78 * MIB + 2 * WORKING, HOST_MARGIN) - 1, False),
            "one",
            48 * MIB + 2 * WORKING,
        ),
    ],
)
def test_devices_of_a_mesh(machine: Machine, kind: str, needed: int | None) -> None:
    found = choose_placement(SMALL, taking(**INPUTS), STATISTICS, machine, LoadPolicy(), PARTS)
    assert found.kind == kind
    if needed is not None:
        assert found.needed == needed


def test_rows_that_are_spread_are_divided() -> None:
    """Each of four devices has a quarter of them, and what it makes of them is counted as weights."""
    rows = {"inputs": {"rows": {"w": "float32[8,1048576]"}}}
    spread = plain_program(inputs=("rows",), avals=rows, role="spread")
    numbers = {
        "spread_transformer": {"output_bytes": 32 * MIB, "temporary_bytes": 3 * MIB, "code_bytes": MIB}
    }
    machine = Machine(PLENTY, PLENTY, True)
    for statistics, expected in ({}, 8 * MIB), (numbers, 12 * MIB):
        programs = {"spread_transformer": spread}
        found = choose_placement(SMALL, programs, statistics, machine, LoadPolicy(), PARTS)
        assert found.needed == 34 * MIB + expected
