"""Stand-ins for Transformer Engine on a machine without a GPU: modules like those of release 2.14, for fake tensors.

:func:`install` lets ``import transformer_engine`` find them; it comes before Megatron is imported.  Layers have the
parameters and results of Transformer Engine's; what they compute is torch's.  ``python -m
benchmarks.te_stand_ins --json OUT`` trains two iterations of every family of ``examples/models`` with
``--transformer-impl transformer_engine`` on fake tensors of a CUDA device.  Keys: ``runs``, ``failed`` (with errors).
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.machine import command_line, write_report

VERSION = "2.14.1"
_ROOT = "transformer_engine"
SCHEDULES = ("1f1b", "slimpipe")


class _Layer(torch.nn.Module):
    """Base class of all layers."""

    def __init__(self, dtype: torch.dtype | None, device: Any = "cuda") -> None:
        super().__init__()
        self._made: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.wgrad_store = None
        self.fp8_meta: dict[str, Any] = {}

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(*shape, **self._made))

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are delayed."""
        return False

    def backward_dw(self) -> None:
        """Do nothing, because no weight gradient is delayed."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Do nothing; there is only TP 1."""


class Linear(_Layer):
    """``transformer_engine.pytorch.Linear``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **_: Any,
    ) -> None:
        super().__init__(params_dtype, device)
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        self.weight = self._parameter(rows, in_features // (tp_size if parallel_mode == "row" else 1))
        self.bias = self._parameter(rows) if bias else torch.Tensor()
        self.use_bias, self.return_bias = bias, return_bias

    def forward(self, inp: torch.Tensor, **_: Any) -> Any:
        """Returns the product, and the bias if it is added later."""
        return self._result(torch.matmul(inp, self.weight.t()))

    def _result(self, output: torch.Tensor) -> Any:
        if self.return_bias:
            return output, self.bias
        return output + self.bias if self.use_bias else output


class LayerNormLinear(Linear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(in_features, out_features, **given)
        self.layer_norm_weight = self._parameter(in_features)
        self.layer_norm_bias = self._parameter(in_features) if normalization == "LayerNorm" else None
        self.eps, self.normalization = eps, normalization
        self.return_layernorm_output = return_layernorm_output

    def forward(self, inp: torch.Tensor, **_: Any) -> Any:
        """Returns the product of the normalized input, and the bias if it is added later."""
        normed = _normed(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        found = self._result(torch.matmul(normed, self.weight.t()))
        if not self.return_layernorm_output:
            return found
        return (*found, normed) if self.return_bias else (found, normed)


class GroupedLinear(_Layer):
    """``transformer_engine.pytorch.GroupedLinear``."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__(None)
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            one = Linear(in_features, out_features, **given)
            self.use_bias, self.return_bias = one.use_bias, one.return_bias
            setattr(self, f"weight{number}", one.weight)
            setattr(self, f"bias{number}", one.bias)

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int], **_: Any) -> Any:
        """Returns one product for each expert."""
        assert len(m_splits) == self.num_gemms
        parts = torch.split(inp, list(m_splits))
        products = [part @ getattr(self, f"weight{i}").t() for i, part in enumerate(parts)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.use_bias and not self.return_bias:
            products = [product + bias for product, bias in zip(products, biases, strict=True)]
        output = torch.cat(products)
        return (output, biases if self.use_bias else None) if self.return_bias else output


def _normed(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    if bias is None:
        return torch.nn.functional.rms_norm(source, weight.shape, weight, eps)
    return torch.nn.functional.layer_norm(source, weight.shape, weight, bias, eps)


class RMSNorm(_Layer):
    """``transformer_engine.pytorch.RMSNorm``."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params_dtype or kwargs.get("dtype"), kwargs.get("device", "cuda"))
        self.weight = self._parameter(hidden_size or normalized_shape)
        self.eps = eps
        self.bias: torch.nn.Parameter | None = None

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input."""
        return _normed(inp, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """``transformer_engine.pytorch.LayerNorm``."""

    def __init__(self, normalized_shape: Any = None, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **kwargs)
        self.bias = self._parameter(kwargs.get("hidden_size") or normalized_shape)


class DotProductAttention(_Layer):
    """``transformer_engine.pytorch.DotProductAttention``."""

    def __init__(self, num_attention_heads: int, *, tp_size: int = 1, softmax_type: str = "vanilla", **_: Any) -> None:
        super().__init__(None)
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_attention_heads // tp_size, device="cuda"))

    def forward(
        self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Returns the attention's output, ``[s, b, h * d]``."""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


class CudaRNGStatesTracker:
    """``transformer_engine.pytorch.distributed.CudaRNGStatesTracker``."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        """States by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Set states by name."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state."""
        self.states_[name] = torch.tensor([seed])

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Do nothing: fake tensors draw no random numbers."""
        yield


class FP8GlobalStateManager:
    """``transformer_engine.pytorch.fp8.FP8GlobalStateManager`` without fp8."""

    is_fp8_enabled = staticmethod(lambda: False)
    is_fp8_calibration = staticmethod(lambda: False)
    get_fp8_recipe = get_fp8_group = staticmethod(lambda: None)


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``transformer_engine.pytorch.distributed.checkpoint``."""
    own = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
    rest = {name: value for name, value in kwargs.items() if name not in own}
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **rest)


def _dummy_gradient(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """``transformer_engine.pytorch.module.base.get_dummy_wgrad``."""
    return torch.empty(*shape, dtype=dtype, device="cuda")


def _never(*args: Any, **kwargs: Any) -> Any:
    """Stand-in for kernels that no family's flags select; raises when called."""
    raise NotImplementedError


class _Recipe:
    """An fp8 recipe, which is not used here."""

    def __init__(self, **kwargs: Any) -> None:
        pass


_ROUTER = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
_MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": dict.fromkeys(("DelayedScaling", "Format", "Float8CurrentScaling"), _Recipe),
    "pytorch": {
        layer.__name__: layer
        for layer in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
    }
    | {"autocast": _nothing, "fp8_autocast": _nothing, "quantized_model_init": _nothing},
    "pytorch.fp8": {
        "FP8GlobalStateManager": FP8GlobalStateManager,
        "fp8_autocast": _nothing,
        "fp8_model_init": _nothing,
    },
    "pytorch.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": _checkpoint,
        "activation_recompute_forward": _nothing,
    },
    "pytorch.module": {},
    "pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (torch.Tensor,), {})},
    "pytorch.router": dict.fromkeys(_ROUTER, _never),
    "pytorch.module.base": {"TransformerEngineBaseModule": _Layer, "get_dummy_wgrad": _dummy_gradient},
}


def install() -> None:
    """Let ``import transformer_engine`` find the stand-ins; modules that are not among them are not found."""
    for name, content in _MODULES.items():
        full = ".".join(filter(None, (_ROOT, name)))
        module = ModuleType(full)
        module.__spec__ = ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[full] = module
        parent, _, last = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def iterations(families: Sequence[str]) -> list[Any]:
    """Returns the dry runs of some families: first and last rank of a plan of each of ``SCHEDULES``."""
    from benchmarks.cuda_iterations import Iteration
    from benchmarks.models import case_for
    from megatron_het.families import LATENT_SPEC
    from testing.combination_cases import pair_row

    @dataclass(frozen=True)
    class WithLayersOfTE(Iteration):
        """A platform without the replacements for machines without Transformer Engine."""

        def flags(self) -> list[str]:
            words = super().flags()
            if "--spec" in words and words[words.index("--spec") + 1 :][:2] == list(LATENT_SPEC):
                at = words.index("--spec")
                del words[at : at + 3]
            return [*words, "--transformer-impl", "transformer_engine"]

    found = []
    for family in families:
        for schedule in SCHEDULES:
            case = case_for(
                family, pair_row([("schedule", schedule), ("precision", "bf16")]), f"{family} {schedule}", 0
            )
            found += [WithLayersOfTE(case, rank) for rank in (0, case.plan.world_size - 1)]
    return found


def main() -> int:
    """Command line; exit code 1 where a run failed."""
    parser = command_line("benchmarks.te_stand_ins", __doc__)
    parser.add_argument("--only", metavar="FAMILY", nargs="+", help="families of examples/models (default all)")
    options = parser.parse_args()
    install()
    from benchmarks.cuda_iterations import run_all
    from testing.families import MODELS

    report: dict[str, Any] = {"benchmark": "te_stand_ins", "runs": 0, "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        for entry in run_all(iterations(options.only or MODELS), Path(folder)):
            report["runs"] += 1
            report["failed"] += [f"{entry['name']}: {entry['error']}"] if "error" in entry else []
            print(entry["name"], entry.get("error", "trained"), flush=True)
    write_report(options.json, report)
    return int(bool(report["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
