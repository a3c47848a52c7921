"""Reads scheduler_config.json for the solver and the shift of its sigmas.

A field that changes the timesteps, the sigmas or the update has one supported value. The fields of the
variance-preserving schedule (betas, timestep spacing) are ignored, because flow sigmas replace that schedule.
Field names and defaults: diffusers 0.42.1, the six classes' ``__init__``;
FastVideo's SelfForcingFlowMatchScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from wanbuild.config import Divisor, Number, Size, parse_config, shown
from wanrun.artifact.model import Pyramid
from wanrun.errors import SourceError

Solver = Literal["unipc", "dpm++", "euler", "flow-map", "self-forcing", "dmd"]

CLASS_SHIFT = 1.0
"""The shift of each class where the file has none: the noise levels are as they are."""

MAX_SHIFT = 1000
"""Published shifts are 3 to 16; at 1000, all but the last of 1000 timesteps have sigmas above one half."""

MAX_STAGES = 3
"""The most sizes of a chunk for which there are programs."""

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


_CHUNKS: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "shift": CLASS_SHIFT,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    # Read by diffusers' pipelines, of which these are the defaults.
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}


@dataclass(frozen=True)
class HeliosDMDConfig:
    """HeliosDMDScheduler, of distilled models that make a chunk in stages of growing sizes."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("HeliosDMDScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(_CHUNKS)
    IGNORED: ClassVar[frozenset[str]] = frozenset()

    stages: Size = 3
    stage_range: tuple[Number, ...] = (0, 1 / 3, 2 / 3, 1)
    gamma: Divisor = 1 / 3
    use_dynamic_shifting: bool = False
    time_shift_type: Literal["exponential", "linear"] = "linear"

    @property
    def pyramid(self) -> Pyramid:
        """How the steps of a chunk are laid out."""
        shift = self.time_shift_type if self.use_dynamic_shifting else None
        return Pyramid(stages=self.stages, shift=shift, gamma=self.gamma)

    def problems(self) -> list[str]:
        """Returns the reasons why no table of steps here fits."""
        found, parts = [], [stage / self.stages for stage in range(self.stages + 1)]
        if self.stages > 1 and not np.allclose(self.stage_range, parts, rtol=1e-6, atol=0):
            found.append(f"stage_range {list(self.stage_range)}, which is not {self.stages} equal parts")
        if self.stages > MAX_STAGES:
            found.append(f"{self.stages} stages, more than {MAX_STAGES}")
        if self.gamma > 1 / 3:
            found.append(f"gamma {self.gamma}, above 1/3")
        return found


@dataclass(frozen=True)
class HeliosSchedulerConfig(HeliosDMDConfig):
    """HeliosScheduler: UniPC or Euler in each stage, of which there may be one."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("HeliosScheduler",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            **_CHUNKS,
            "thresholding": False,
            "solver_order": 2,
            "predict_x0": True,
            "solver_type": "bh2",
            "lower_order_final": True,
            "disable_corrector": [],
            "solver_p": None,
        }
    )

    time_shift_type: Literal["exponential", "linear"] = "exponential"
    scheduler_type: Literal["unipc", "euler"] = "unipc"


def _read_pyramid(config: Mapping[str, Any], where: str) -> tuple[Solver, Pyramid] | None:
    """Returns the solver and the stages of a scheduler of chunks; None for any other."""
    class_name = config.get("_class_name")
    solver: Solver = "dmd"
    read: HeliosDMDConfig | None = None
    if class_name in HeliosSchedulerConfig.CLASS_NAMES:
        read = plain = parse_config(HeliosSchedulerConfig, config, where)
        solver = plain.scheduler_type
    elif class_name in HeliosDMDConfig.CLASS_NAMES:
        read = parse_config(HeliosDMDConfig, config, where)
    if read is None:
        return None
    if problems := read.problems():
        raise SourceError(
            "unsupported",
            f"{where} has no steps that are supported",
            expected="those of a published Helios",
            found=", ".join(problems),
            remedy="use the published checkpoint's scheduler_config.json",
        )
    return solver, read.pyramid


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

    Attributes:
        solver: wanrun's name of the solver.
        flow_shift: s in σ = s·u / (1 + (s − 1)·u).
        assumed: whether the file has no shift, and this one is the class's.
        pyramid: the stages of a chunk, whose shift is by the tokens; None for other schedulers.
    """

    solver: Solver
    flow_shift: float
    assumed: bool = False
    pyramid: Pyramid | None = None


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
            "unsupported",
            f"{where} describes a scheduler that is not supported",
            expected="UniPCMultistep-, DPMSolverMultistep-, FlowMatchEulerDiscrete-, FlowMapEulerDiscrete-, "
            "SelfForcingFlowMatch-, Helios- or HeliosDMDScheduler",
            found=shown(class_name),
            remedy="replace scheduler/ by a supported scheduler's",
        )
    if multistep.prediction_type != "flow_prediction" or not multistep.use_flow_sigmas:
        raise SourceError(
            "wrong_kind",
            f"{where} is not a flow-matching scheduler",
            expected="prediction_type flow_prediction and use_flow_sigmas true",
            found=f"{shown(multistep.prediction_type)} and {multistep.use_flow_sigmas}",
            remedy="use the published checkpoint's scheduler_config.json",
        )
    return multistep.SOLVER, multistep.flow_shift


def read_scheduler(config: Mapping[str, Any], where: str = "scheduler_config.json") -> SchedulerDefaults:
    """Returns the solver and shift of the content of a scheduler_config.json.

    A shift that is left out is the class's, as in diffusers. So is null, with which diffusers fails.
    Raises SourceError if the class is not one of these, a field is unknown or has an unsupported value, or
    the shift is out of range.
    """
    if (stages := _read_pyramid(config, where)) is not None:
        return SchedulerDefaults(stages[0], CLASS_SHIFT, pyramid=stages[1])
    solver, shift = _read_shift(config, where)
    if shift is None:
        return SchedulerDefaults(solver, CLASS_SHIFT, assumed=True)
    if not 0 < shift <= MAX_SHIFT:
        raise SourceError(
            "out_of_range",
            f"{where} gives no usable shift",
            expected=f"a positive flow_shift (shift of the Euler classes) of at most {MAX_SHIFT}",
            found=shift,
            remedy="use the published checkpoint's scheduler_config.json",
        )
    return SchedulerDefaults(solver, shift)
