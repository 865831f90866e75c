"""fp8 on a machine without it: linear layers of Megatron stand in for those of Transformer Engine.

They keep a copy of their weight as those do, and use the copy.  They fail where the copy is not of the weight as it is,
and where they run outside of the recipe of their layer.  Copies are exact, so that trainings can be compared.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from testing import probe
from testing.fp8_weights import Fp8Weight, _bytes, quantised


class Copy:
    """The quantised copy of a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._data = weight.detach().clone()


class Recipe:
    """Knows in which layer's recipe the process is, and what has been quantised in it."""

    def __init__(self, out: Path) -> None:
        self._out, self._layer = out, -1
        self._iterations: list[Counter[str]] = []
        self._passes: Counter[str] = Counter()

    @contextlib.contextmanager
    def context(self, config: Any, layer_no: int = -1, is_init: bool = False) -> Iterator[None]:
        """In place of Megatron's ``get_fp8_context``."""
        from megatron.core.fp8_utils import is_first_last_bf16_layer

        assert config.fp8 == "hybrid"
        before = self._layer
        self._layer = -1 if is_init or is_first_last_bf16_layer(config, layer_no) else layer_no
        try:
            yield
        finally:
            self._layer = before

    def begin(self) -> None:
        self._iterations.append(Counter())

    def multiply(self, layer: Any, number: int, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight that a linear layer computes with."""
        self._passes[f"{number} {self._layer}"] += 1
        if self._layer < 0:
            return weight
        if "weight" not in layer._fp8_workspaces:
            layer._fp8_workspaces["weight"] = Copy(weight)
            self._iterations[-1][f"{number} {name}"] += 1
        assert not layer.is_first_microbatch, "the backward of this pass would write where others add"
        assert torch.equal(layer._fp8_workspaces["weight"]._data, weight), f"layer {number} {name}: stale copy"
        return weight

    def write(self) -> None:
        """Write how often each weight was quantised by iteration, and the layers and recipes of all passes."""
        self._out.write_text(json.dumps({"quantised": self._iterations, "passes": self._passes}))


def _linear_layers(models: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """The linear layers of decoders, with the number of their layer and their names there."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for layer in (layer for model in models for layer in model.decoder.layers):
        for name, module in layer.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                yield layer.layer_number - 1, name, module


def _stand_in(recipe: Recipe, number: int, name: str, layer: Any) -> None:
    own = layer._forward_impl

    def forward(*, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        found: torch.Tensor = own(weight=recipe.multiply(layer, number, name, weight), **more)
        return found

    layer._forward_impl = forward


def observe(*, rank: int, out: str, gradients: bool = False) -> None:
    """As :func:`testing.probe.observe`; ``fp8-RANK.json`` in the folder says what was quantised."""
    from megatron.core.transformer import transformer_block

    from megatron_het.arguments import megatron_args
    from megatron_het.runtime.executor import Executor
    from megatron_het.runtime.session import HetSession

    recipe = Recipe(Path(out) / f"fp8-{rank}.json")
    megatron_args._check_fp8 = lambda *_: None
    transformer_block.get_fp8_context = recipe.context
    prepare, run = HetSession._prepare_model, Executor.run

    def prepared(session: Any, models: list[Any]) -> Any:
        for _, _, layer in _linear_layers(models):
            layer._fp8_workspaces, layer.is_first_microbatch = {}, True
        found = prepare(session, models)
        for number, name, layer in _linear_layers(found):
            _stand_in(recipe, number, name, layer)
        return found

    def runs(executor: Any, call: Any) -> Any:
        recipe.begin()
        result = run(executor, call)
        recipe.write()
        return result

    HetSession._prepare_model, Executor.run = prepared, runs
    probe.observe(rank=rank, out=out, gradients=gradients)


def keep(*, rank: int, out: str) -> None:
    """Keep weights of decoders in fp8, as ``--fp8-param-gather`` does.

    ``weights-RANK.json`` in the folder counts those that the optimizer has quantised.
    """
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.transformer import transformer_block

    from megatron_het.arguments import megatron_args
    from megatron_het.runtime.session import HetSession

    path = Path(out) / f"weights-{rank}.json"
    megatron_args._check_fp8 = lambda *_: None
    transformer_block.get_fp8_context = lambda *_, **__: contextlib.nullcontext()
    own = {"FP8_TENSOR_CLASS": Fp8Weight, "HAVE_TE_FP8_TENSOR_CLASS": True, "is_te_min_version": lambda _: True}
    for name, value in own.items():
        setattr(fp8_utils, name, value)

    def modify(parameter: Any, memory: torch.Tensor) -> None:
        memory.copy_(parameter._data)
        parameter._data = memory

    def update(parameters: list[Any], mains: list[Any], starts: list[Any], group: object, *_: object) -> None:
        for parameter, main, start in zip(parameters, mains, starts, strict=True):
            if main is not None:
                parameter._data.view(-1)[start : start + main.numel()] = _bytes(main.to(parameter.dtype))
        path.write_text(json.dumps(len(parameters)))

    fp8_utils._modify_underlying_storage_impl, fp8_utils._quantize_param_shard_impl = modify, update
    param_and_grad_buffer.post_all_gather_processing = lambda _: None
    # gloo takes tensors that are gathered together for ones of the first one's type.
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext()
    prepare = HetSession._prepare_model

    def prepared(session: Any, models: list[Any]) -> Any:
        for _, name, layer in _linear_layers(models):
            config = layer.config
            draw = config.output_layer_init_method if name.endswith(("proj", "fc2")) else config.init_method
            layer.param_init_meta = {"weight": SimpleNamespace(init_fn=draw)}
            layer.weight = quantised(layer.weight)
        return prepare(session, models)

    HetSession._prepare_model = prepared
