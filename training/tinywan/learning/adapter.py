"""A LoRA that learns: low-rank changes of a transformer's linear layers, and changes of all that is small."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn

_TABLES = "scale_shift_table"


class LowRank(nn.Module):
    """A linear layer with a change of low rank: W + B A.

    Args:
        layer: is kept as it is, but for its bias, which learns.
        rank: of the change.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., out_features)."""
        return torch.as_tensor(self.layer(x) + (x @ self.A.mT) @ self.B.mT)


class Adapter(nn.Module):
    """What learns of a transformer: the matrices A and B, biases, weights of norms, and modulation.

    Args:
        model: its linear layers are replaced, and its other matrices no longer learn.
        rank: of the changes.
    """

    def __init__(self, model: WanTransformer3DModel, rank: int) -> None:
        super().__init__()
        self._before = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.parts = nn.ParameterDict()  # by the parameter's name, in which dots would be refused
        for name, parameter in model.named_parameters():
            learns = parameter.ndim == 1 or name.endswith(_TABLES)
            parameter.requires_grad_(learns)
            if learns:
                self.parts[name.replace(".", "/")] = parameter
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        for name, layer in layers:
            changed = LowRank(layer, rank)
            self.parts[f"{name}.A".replace(".", "/")] = changed.A
            self.parts[f"{name}.B".replace(".", "/")] = changed.B
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, changed)

    def save(self, parts: nn.ParameterDict, file: Path) -> None:
        """Writes a LoRA in the layout of those that are published for Wan, in float16.

        Args:
            parts: this adapter's, or their averages.
            file: a safetensors file.
        """
        tensors = {}
        for key, value in parts.items():
            name = key.replace("/", ".")
            module, _, last = name.rpartition(".")
            if last in ("A", "B"):
                role = {"A": "lora_down.weight", "B": "lora_up.weight"}[last]
                tensors[f"diffusion_model.{module}.{role}"] = value.detach()
                continue
            change = value.detach() - self._before[name]
            role = {"bias": f"{module}.diff_b", "weight": f"{module}.diff"}.get(last, f"{name}.diff")
            tensors[f"diffusion_model.{role}"] = change
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: one.half().contiguous() for name, one in tensors.items()}, file, {"format": "pt"})
