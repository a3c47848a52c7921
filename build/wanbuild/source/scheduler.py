"""Reads scheduler_config.json for the solver and the shift of its sigmas.

A field that changes the timesteps, the sigmas or the update has one supported value. The fields of the
variance-preserving schedule (betas, timestep spacing) are ignored, because flow sigmas replace that schedule.
Field names and defaults: diffusers 0.42.1, the four classes' ``__init__``;
FastVideo's SelfForcingFlowMatchScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from wanbuild.config import Number, parse_config, shown
from wanrun.errors import SourceError

Solver = Literal["unipc", "dpm++", "euler", "flow-map", "self-forcing"]

CLASS_SHIFT = 1.0
"""The shift of each class where the file has none: the noise levels are as they are."""

MAX_SHIFT = 1000
"""Published shifts are 3 to 16; at 1000, all but the last of 1000 timesteps have sigmas above one half."""

_SIGMAS: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}
_MULTISTEP: Mapping[str, Any] = {
    **_SIGMAS,
    "solver_order": 2,
    "thresholding": False,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "rescale_betas_zero_snr": False,
}
_VARIANCE_PRESERVING = frozenset(
    {"beta_start", "beta_end", "beta_schedule", "trained_betas", "timestep_spacing", "steps_offset"}
)
# Used only with thresholding or dynamic shifting, and both must be off.
_SWITCHED_OFF = frozenset({"dynamic_thresholding_ratio", "sample_max_value", "time_shift_type"})


@dataclass(frozen=True)
class UniPCConfig:
    """UniPCMultistepScheduler, which the published Wan checkpoints use.

    The class itself defaults to epsilon prediction without flow sigmas, so the file must state both fields.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("UniPCMultistepScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            **_MULTISTEP,
            "predict_x0": True,
            "solver_type": "bh2",
            "disable_corrector": [],
            "solver_p": None,
            "sigma_min": None,
            "sigma_max": None,
            "shift_terminal": None,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = _VARIANCE_PRESERVING | _SWITCHED_OFF
    SOLVER: ClassVar[Solver] = "unipc"

    prediction_type: str
    use_flow_sigmas: bool
    flow_shift: Number | None = None


@dataclass(frozen=True)
class DPMSolverConfig:
    """DPMSolverMultistepScheduler, as dpmsolver++ of order 2 (midpoint) on flow sigmas."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("DPMSolverMultistepScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            **_MULTISTEP,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "euler_at_final": False,
            "use_lu_lambdas": False,
            "lambda_min_clipped": -math.inf,
            "variance_type": None,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = _VARIANCE_PRESERVING | _SWITCHED_OFF
    SOLVER: ClassVar[Solver] = "dpm++"

    prediction_type: str
    use_flow_sigmas: bool
    flow_shift: Number | None = None


@dataclass(frozen=True)
class FlowMatchEulerConfig:
    """FlowMatchEulerDiscreteScheduler; its shift field is called ``shift``."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("FlowMatchEulerDiscreteScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {**_SIGMAS, "invert_sigmas": False, "shift_terminal": None, "stochastic_sampling": False}
    )
    IGNORED: ClassVar[frozenset[str]] = _SWITCHED_OFF | {
        "base_shift",
        "max_shift",
        "base_image_seq_len",
        "max_image_seq_len",
    }
    SOLVER: ClassVar[Solver] = "euler"

    shift: Number | None = None


@dataclass(frozen=True)
class FlowMapEulerConfig:
    """FlowMapEulerDiscreteScheduler, which flow maps such as AnyFlow use; its field is ``shift`` too."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("FlowMapEulerDiscreteScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType({"num_train_timesteps": 1000})
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    SOLVER: ClassVar[Solver] = "flow-map"

    shift: Number | None = None


@dataclass(frozen=True)
class SelfForcingSchedulerConfig:
    """FastVideo's SelfForcingFlowMatchScheduler; its field is ``shift`` too, others are its grid's."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("SelfForcingFlowMatchScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "num_train_timesteps": 1000,
            "num_inference_steps": 1000,
            "sigma_max": 1.0,
            "sigma_min": 0.0,
            "extra_one_step": True,
            "inverse_timesteps": False,
            "reverse_sigmas": False,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset({"training"})  # weights of its loss
    SOLVER: ClassVar[Solver] = "self-forcing"

    shift: Number


@dataclass(frozen=True)
class SchedulerDefaults:
    """The defaults of generation.

    Args:
        solver: wanrun's name of the solver.
        flow_shift: s in σ = s·u / (1 + (s − 1)·u).
        assumed: whether the file has no shift, and this one is the class's.
    """

    solver: Solver
    flow_shift: float
    assumed: bool = False


def _read_shift(config: Mapping[str, Any], where: str) -> tuple[Solver, float | None]:
    class_name = config.get("_class_name")
    if class_name in FlowMatchEulerConfig.CLASS_NAMES:
        return "euler", parse_config(FlowMatchEulerConfig, config, where).shift
    if class_name in FlowMapEulerConfig.CLASS_NAMES:
        return "flow-map", parse_config(FlowMapEulerConfig, config, where).shift
    if class_name in SelfForcingSchedulerConfig.CLASS_NAMES:
        return "self-forcing", parse_config(SelfForcingSchedulerConfig, config, where).shift
    multistep: UniPCConfig | DPMSolverConfig
    if class_name == "UniPCMultistepScheduler":
        multistep = parse_config(UniPCConfig, config, where)
    elif class_name == "DPMSolverMultistepScheduler":
        multistep = parse_config(DPMSolverConfig, config, where)
    else:
        raise SourceError(
            f"{where} describes a scheduler that is not supported",
            expected="UniPCMultistep-, DPMSolverMultistep-, FlowMatchEulerDiscrete-, FlowMapEulerDiscrete- "
            "or SelfForcingFlowMatchScheduler",
            found=shown(class_name),
            remedy="replace scheduler/ by a supported scheduler's",
        )
    if multistep.prediction_type != "flow_prediction" or not multistep.use_flow_sigmas:
        raise SourceError(
            f"{where} is not a flow-matching scheduler",
            expected="prediction_type flow_prediction and use_flow_sigmas true",
            found=f"{shown(multistep.prediction_type)} and {multistep.use_flow_sigmas}",
            remedy="use the published checkpoint's scheduler_config.json",
        )
    return multistep.SOLVER, multistep.flow_shift


def read_scheduler(config: Mapping[str, Any], where: str = "scheduler_config.json") -> SchedulerDefaults:
    """Returns the solver and shift of a scheduler_config.json.

    A shift that is left out is the class's, as in diffusers. So is null, with which diffusers makes no step.

    Args:
        config: the parsed file.
        where: the file's name, for messages.

    Raises:
        SourceError: if the class is not one of these, a field is unknown or has an unsupported value,
            or the shift is out of range.
    """
    solver, shift = _read_shift(config, where)
    if shift is None:
        return SchedulerDefaults(solver, CLASS_SHIFT, assumed=True)
    if not 0 < shift <= MAX_SHIFT:
        raise SourceError(
            f"{where} gives no usable shift",
            expected=f"a positive flow_shift (shift of the Euler classes) of at most {MAX_SHIFT}",
            found=shift,
            remedy="use the published checkpoint's scheduler_config.json",
        )
    return SchedulerDefaults(solver, shift)
