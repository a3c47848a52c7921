"""The text encoder in torch: transformers' UMT5 on the artifact's own weights.

An optional backend (the ``torch`` extra) for hosts where it is faster than the compiled program. torch and
transformers are imported when an encoder is constructed, not with this module.

A prompt is padded to the next multiple of 64 tokens, not to 512. Padding is masked, so the prompt's own rows
change only by rounding. The padded length depends on the prompt alone, and prompts of one length run as one
batch, so an embedding does not depend on the other prompts. The blocks are compiled instead of the whole
model, with dynamic shapes: one block's code serves every layer and every length.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.parameters import Tree, flat
from wanrun.errors import ArtifactError, UsageError
from wanrun.machine.environment import cpu_features, usable_cores
from wanrun.text.embeddings import TEXT_ENCODER
from wanrun.text.encoder import Warn, silent
from wanrun.weights.restore import Restore, default_threads

if TYPE_CHECKING:
    import torch

TOKEN_MULTIPLE = 64
"""Prompts are padded to a multiple of this: lengths that suit matmul kernels, and few different ones."""

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CXX")
"""Environment variables on which the bits of an embedding may depend."""

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "shared": "shared.weight",
        "final_norm/weight": "encoder.final_layer_norm.weight",
        "blocks/attn_norm/weight": "encoder.block.{layer}.layer.0.layer_norm.weight",
        "blocks/q/weight": "encoder.block.{layer}.layer.0.SelfAttention.q.weight",
        "blocks/k/weight": "encoder.block.{layer}.layer.0.SelfAttention.k.weight",
        "blocks/v/weight": "encoder.block.{layer}.layer.0.SelfAttention.v.weight",
        "blocks/o/weight": "encoder.block.{layer}.layer.0.SelfAttention.o.weight",
        "blocks/relative_attention_bias": (
            "encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
        "blocks/ff_norm/weight": "encoder.block.{layer}.layer.1.layer_norm.weight",
        "blocks/wi_0/weight": "encoder.block.{layer}.layer.1.DenseReluDense.wi_0.weight",
        "blocks/wi_1/weight": "encoder.block.{layer}.layer.1.DenseReluDense.wi_1.weight",
        "blocks/wo/weight": "encoder.block.{layer}.layer.1.DenseReluDense.wo.weight",
    }
)
"""Transformers' key of every parameter path; ``{layer}`` is the row of a stacked parameter. This is the
inverse of the artifact's conversion table."""

TIED_KEY = "encoder.embed_tokens.weight"
"""The second name of ``shared.weight`` in transformers."""

CONFIG_FIELDS = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "layer_norm_epsilon",
    "feed_forward_proj",
)
"""The fields of config.json that an encoder's numbers depend on. The other fields describe the tokenizer and
the decoder or were checked at conversion, and versions of transformers disagree about them."""


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or sys.modules holds None
        return False


def check_torch(device: str = "cpu") -> None:
    """Checks that torch can run on a device, before any weight is read.

    Cheap for the CPU, which needs no import; other devices are visible only after importing torch.

    Args:
        device: a torch device, such as 'cpu', 'cuda' or 'cuda:1'.

    Raises:
        UsageError: if torch or transformers is not installed, or there is no such device.
    """
    missing = [name for name in ("torch", "transformers") if not _installed(name)]
    if missing:
        raise _not_installed(f"no {' and no '.join(missing)}")
    if device == "cpu":
        return
    found = "not the name of a device"
    match = re.fullmatch(r"(?P<kind>[a-z]+)(:(?P<index>\d{1,4}))?", device, re.ASCII)
    if match is not None:
        import torch

        try:
            module = torch.get_device_module(match["kind"])
            count = module.device_count() if module.is_available() else 0
        except (RuntimeError, AttributeError):  # no such kind of device, or not a real device
            count = 0
        if int(match["index"] or 0) < count:
            return
        found = f"{count} devices of this kind"
    raise UsageError(
        f"--text-encoder-device {device!r} cannot be used",
        expected="cpu, or a device that this installation of torch sees",
        found=found,
        remedy="use cpu, or install torch for this device",
    )


def _not_installed(found: object) -> UsageError:
    return UsageError(
        "--text-encoder torch is not installed",
        expected="torch and transformers",
        found=found,
        remedy="pip install 'wanrun[torch]'",
    )


def torch_facts(device: str = "cpu") -> dict[str, Any]:
    """Returns, as JSON, the facts that decide an embedding's bits, besides prompt, weights and dtype.

    For the CPU this imports nothing.

    Args:
        device: a torch device that passed ``check_torch``.
    """
    facts: dict[str, Any] = {
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "device": device,
        "cpu_features": list(cpu_features()),
        "cores": usable_cores(),
        "variables": {name: os.environ.get(name, "") for name in VARIABLES},
        # Without a compiler the blocks run eagerly, which rounds more often.
        "compiler": shutil.which(os.environ.get("CXX", "g++")) is not None,
    }
    if device.partition(":")[0] != "cpu":
        import torch

        facts["device_name"] = torch.get_device_module(device).get_device_name(device)
    return facts


class TorchTextEncoder:
    """An artifact's text encoder in torch.

    torch and transformers are imported while the weights are read. If dtypes agree, the tensors are views of
    the buffers that were read into. Norms and position biases, stored in float32, are rounded to bfloat16 for
    a bfloat16 encoder, as in transformers.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        dtype: the compute dtype, 'bfloat16' or 'float32'.
        device: a torch device; see ``check_torch``.
        verify: 'fast' or 'sha256', as in ``wanrun.weights.restore.Restore``.
        weights: a folder or URL that holds the components, if they are not in the artifact.
        compile: whether to compile the blocks, which takes several seconds at the first prompts. If that
            fails, for example without a C++ compiler, the blocks run eagerly and ``warn`` is called.
        clock: tells the time for ``restored``.
        warn: receives warnings.

    Raises:
        UsageError: if torch or transformers is missing or cannot be imported, or there is no such device.
        ArtifactError: if a weight is missing or damaged, or does not fit transformers' model.
    """

    restored: tuple[float, float]
    """When reading the weights started and ended, by ``clock``."""

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        verify: str = "fast",
        weights: str | None = None,
        compile: bool = True,
        clock: Callable[[], float] = time.monotonic,
        warn: Warn = silent,
    ) -> None:
        check_torch(device)
        self.dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        self._config = manifest.configs[TEXT_ENCODER]
        self._device, self._warn = device, warn
        with ThreadPoolExecutor(default_threads(), thread_name_prefix="restore") as pool:
            restore = Restore(
                artifact, TEXT_ENCODER, manifest.components[TEXT_ENCODER], pool, verify, clock, weights
            )
            try:
                model = _abstract_model(self._config)
                self._state = _tensors(restore.result(bits=True), dtype, device)
            except BaseException:
                restore.cancel()
                raise
        self.restored = restore.started_at, restore.finished_at
        _check_keys(self._state, model, artifact)
        self._model: Any = _filled(model, self._state)
        self._compile_errors = self._compile() if compile else ()

    def _compile(self) -> tuple[type[Exception], ...]:
        """Marks the blocks for compilation; returns the exceptions that a failed compilation raises."""
        try:
            # The import makes a cache folder, unless transformers has imported it already.
            from torch._dynamo.exc import TorchDynamoException
        except OSError as error:
            self._warn_eager(error)
            return ()
        for block in self._model.encoder.block:
            block.compile(dynamic=True)
        return (TorchDynamoException,)

    def _warn_eager(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # torch names the backend, not the cause
        reason = f"{type(cause).__name__}: {str(cause).strip()}".partition("\n")[0]
        self._warn(f"the torch text encoder is not compiled and will be slower: {reason}")

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Encodes prompts.

        Args:
            ids: int32 (P, L) token ids, padded.
            mask: int32 (P, L), 1 for a token.

        Returns:
            Embeddings (P, L, D) in the encoder's dtype, zero where the mask is 0.
        """
        if self._model is None:
            raise RuntimeError("the text encoder is closed")
        P, L = ids.shape
        embeddings = np.zeros((P, L, self._config["d_model"]), self.dtype)
        lengths = (np.arange(1, L + 1) * (mask > 0)).max(axis=1)
        # Add at least one column of padding: for a mask without a zero, transformers passes no mask to the
        # blocks, which would then be compiled again.
        columns = (lengths // TOKEN_MULTIPLE + 1) * TOKEN_MULTIPLE
        for T in np.unique(columns):
            rows = np.flatnonzero(columns == T)
            keep = mask[rows, :T]
            hidden = self._run(_padded(ids[rows, :T], T), _padded(keep, T))
            embeddings[rows, :T] = np.where(keep[..., None] > 0, hidden[:, :L], 0)
        return embeddings

    def _run(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the last hidden states (P, T, D) for int64 ids and mask (P, T)."""
        try:
            return self._forward(ids, mask)
        except self._compile_errors as error:
            # The same tensors in a model with uncompiled blocks.
            self._model = _filled(_abstract_model(self._config), self._state)
            self._warn_eager(error)
        return self._forward(ids, mask)

    def _forward(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            tokens, keep = (torch.from_numpy(array).to(self._device) for array in (ids, mask))
            hidden = self._model(input_ids=tokens, attention_mask=keep).last_hidden_state.cpu().contiguous()
            if hidden.dtype == torch.bfloat16:  # NumPy has no bfloat16, only its bits
                return hidden.view(torch.uint16).numpy().view(self.dtype)
            return hidden.numpy()

    def close(self) -> None:
        """Releases the weights."""
        self._model = None
        self._state = {}


def _padded(array: np.ndarray, columns: int) -> np.ndarray:
    """Returns the array as int64, padded with zeros to this many columns."""
    padded = np.zeros((len(array), columns), np.int64)
    padded[:, : array.shape[1]] = array
    return padded


def _abstract_model(config: Mapping[str, Any]) -> Any:
    """Returns transformers' model without memory for its weights, in evaluation mode.

    Raises:
        UsageError: if torch and transformers cannot be imported.
    """
    try:
        import torch
        from transformers import UMT5Config, UMT5EncoderModel

        with torch.device("meta"):
            fields = {name: config[name] for name in CONFIG_FIELDS if name in config}
            return UMT5EncoderModel(UMT5Config(**fields)).eval()
    except ImportError as error:  # for example incompatible versions
        raise _not_installed(error) from None
    except OSError as error:  # transformers imports torch's compiler, which makes a cache folder
        raise UsageError(
            f"--text-encoder torch cannot be used: {error}",
            remedy="set TORCHINDUCTOR_CACHE_DIR to a folder that can be written",
        ) from None


def _tensors(tree: Tree, dtype: str, device: str) -> dict[str, torch.Tensor]:
    """Returns transformers' state dict; rows of stacked parameters are views."""
    import torch

    target: torch.dtype = getattr(torch, dtype)
    state: dict[str, torch.Tensor] = {}
    for path, array in flat(tree).items():
        tensor = torch.from_numpy(array)
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        tensor = tensor.to(device=device, dtype=target)
        key = KEYS.get(path, path)  # an unknown path is reported later, with the other wrong keys
        if "{layer}" in key:
            state.update({key.format(layer=layer): row for layer, row in enumerate(tensor)})
        else:
            state[key] = tensor
    return state


def _check_keys(state: dict[str, torch.Tensor], model: Any, artifact: Path) -> None:
    """Checks the state dict's keys and shapes against the model.

    Raises:
        ArtifactError: naming every key that is missing, unexpected or of another shape.
    """
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != TIED_KEY}
    found = {key: tuple(value.shape) for key, value in state.items()}
    problems = [f"missing {key}" for key in sorted(wanted.keys() - found.keys())]
    problems += [f"unexpected {key}" for key in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{key} has shape {found[key]} instead of {wanted[key]}"
        for key in sorted(wanted.keys() & found.keys())
        if wanted[key] != found[key]
    ]
    if problems:
        raise ArtifactError(
            f"the text encoder of {artifact} does not fit transformers' UMT5EncoderModel",
            found=", ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else ""),
            remedy="use --text-encoder jax, or build the artifact again",
        )


def _filled(model: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Makes these tensors the model's parameters, without copies."""
    model.load_state_dict({**state, TIED_KEY: state["shared.weight"]}, assign=True)
    return model
