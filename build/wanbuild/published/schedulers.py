"""scheduler_config.json of every solver, and of the variants that have their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wanbuild.published.base_configs import Config

_SHARED_SIGMAS = {
    "num_train_timesteps": 1000,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
_MULTISTEP = {
    **_SHARED_SIGMAS,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_flow_sigmas": True,
}

_STAGES: Config = MappingProxyType(
    {
        "gamma": 1 / 3,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "shift": 1.0,
        "stage_range": [0, 1 / 3, 2 / 3, 1],
        "stages": 3,
        "use_dynamic_shifting": True,
        "use_flow_sigmas": True,
    }
)

_HELIOS: Config = MappingProxyType(
    {
        **_STAGES,
        "_class_name": "HeliosScheduler",
        "disable_corrector": [],
        "lower_order_final": True,
        "predict_x0": True,
        "scheduler_type": "unipc",
        "solver_order": 2,
        "solver_p": None,
        "solver_type": "bh2",
        "thresholding": False,
        "time_shift_type": "exponential",
    }
)

SCHEDULER_CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "unipc": MappingProxyType(
            {
                "_class_name": "UniPCMultistepScheduler",
                **_MULTISTEP,
                "disable_corrector": [],
                "predict_x0": True,
                "shift_terminal": None,
                "sigma_max": None,
                "sigma_min": None,
                "solver_p": None,
                "solver_type": "bh2",
            }
        ),
        "dpm++": MappingProxyType(
            {
                "_class_name": "DPMSolverMultistepScheduler",
                **_MULTISTEP,
                "algorithm_type": "dpmsolver++",
                "euler_at_final": False,
                "lambda_min_clipped": float("-inf"),
                "solver_type": "midpoint",
                "use_lu_lambdas": False,
                "variance_type": None,
            }
        ),
        "euler": MappingProxyType(
            {
                "_class_name": "FlowMatchEulerDiscreteScheduler",
                **_SHARED_SIGMAS,
                "base_image_seq_len": 256,
                "base_shift": 0.5,
                "invert_sigmas": False,
                "max_image_seq_len": 4096,
                "max_shift": 1.15,
                "shift": 3.0,
                "shift_terminal": None,
                "stochastic_sampling": False,
            }
        ),
        "flow-map": MappingProxyType(
            {"_class_name": "FlowMapEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 5.0}
        ),
        "self-forcing": MappingProxyType(
            {
                "_class_name": "SelfForcingFlowMatchScheduler",
                "extra_one_step": True,
                "num_inference_steps": 1000,
                "shift": 5.0,
                "sigma_min": 0.0,
                "training": True,
            }
        ),
        "helios-wan2.1": MappingProxyType({**_HELIOS, "stages": 1}),
        "helios-mid-wan2.1": _HELIOS,
        "helios-distilled-wan2.1": MappingProxyType(
            {**_STAGES, "_class_name": "HeliosDMDScheduler", "time_shift_type": "linear"}
        ),
    }
)
"""One per solver, with every field that diffusers 0.42.1 saves, or FastVideo for ``self-forcing``; Wan itself
is published with ``unipc``. Those of Helios are by variant: its dynamic shifting is that of its training
configs."""


def scheduler_config(solver: str, flow_shift: float) -> dict[str, Any]:
    """Returns scheduler_config.json of a solver in ``SCHEDULER_CONFIGS``, with this shift if it has one."""
    config = SCHEDULER_CONFIGS[solver]
    if "stages" in config:
        return dict(config)
    return {**config, "shift" if "shift" in config else "flow_shift": flow_shift}
