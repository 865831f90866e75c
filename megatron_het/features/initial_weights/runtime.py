"""Initial weights by name as a feature of a rank.

Megatron's layers fill their weights by functions of the model's configuration.  These functions are replaced by ones
that only note which weight asked for which function.  When a chunk is complete, its names are known, and the weights
are drawn.
"""

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_het.distributed.gradient_sums import initial_values, set_initial_values
from megatron_het.lowering.ranks import Segment, expert_name, held_experts, segments, stride_of
from megatron_het.plan import Cut
from megatron_het.runtime.feature import OpenContext, RuntimeFeature

# Random values that depend on a name, a seed and the place in the whole tensor only.
#
# A tensor is drawn in blocks of rows, each from a generator of its own, so that a rank draws the blocks that it needs
# and no others.  Blocks are always drawn whole, because the last values of a short one would come out otherwise.

BLOCK_ROWS = 256  # rows of a block; a rank draws up to so many rows more than it keeps at either end of a segment

Draw = Callable[..., object]  # fills a tensor with random values, e.g. ``torch.nn.init.normal_``.


def fill(
    target: torch.Tensor,
    draw: Draw,
    name: str,
    seed: int,
    *,
    full_size: int,
    dim: int,
    segments: Sequence[Segment],
    in_blocks: bool = True,
) -> None:
    """Write a rank's part of a random tensor.

    Args:
        target: The rank's part, ``[rows, ...]``.
        draw: Fills a block or, without blocks, the whole tensor.
        name: Of the tensor in the whole model.
        full_size: Size of the whole tensor along ``dim``.
        dim: The dimension that is split, 0 or 1; 0 for tensors that are not.
        segments: Which part of ``dim`` this rank has.
        in_blocks: Whether every value is drawn alike, whatever the tensor's size.
    """
    shape = list(target.shape)
    shape[dim] = full_size
    with torch.no_grad():
        for first, block in _blocks(
            shape=shape, draw=draw, name=name, seed=seed, dim=dim, segments=segments, in_blocks=in_blocks
        ):
            if dim == 0:
                _copy_rows(target, block, first, segments)
            else:
                rows = min(block.shape[0], target.shape[0] - first)
                for part in segments:
                    source = block[:rows, part.full : part.full + part.length]
                    target[first : first + rows, part.local : part.local + part.length].copy_(source)


def _copy_rows(target: torch.Tensor, block: torch.Tensor, first: int, segments: Sequence[Segment]) -> None:
    for part in segments:
        low, high = max(part.full, first), min(part.full + part.length, first + block.shape[0])
        if low < high:
            start = part.local + low - part.full
            target[start : start + high - low].copy_(block[low - first : high - first])


def _blocks(
    shape: Sequence[int], draw: Draw, name: str, seed: int, dim: int, segments: Sequence[Segment], in_blocks: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and values of every block that the segments touch."""
    takes_generator = _takes_generator(draw)
    if not in_blocks or len(shape) < 2:
        yield 0, _drawn(shape, draw, f"{seed}/{name}", takes_generator)
        return
    blocks = [
        first
        for first in range(0, shape[0], BLOCK_ROWS)
        if dim != 0 or any(part.full < first + BLOCK_ROWS and part.full + part.length > first for part in segments)
    ]

    def block(first: int) -> torch.Tensor:
        return _drawn((BLOCK_ROWS, *shape[1:]), draw, f"{seed}/{name}/{first}", takes_generator)

    # Drawing is the work of one core, and a rank of ten billion values would start a minute late.
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = min(cores, len(blocks)) if takes_generator else 1
    if threads < 2:
        yield from ((first, block(first)) for first in blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for some in itertools.batched(blocks, threads):  # the whole tensor would be twice in memory
            yield from zip(some, pool.map(block, some), strict=True)


def _takes_generator(draw: Draw) -> bool:
    """Whether the function is one of ``torch.nn.init`` with some arguments set, as most of Megatron's are.

    Not in a dry run, whose tensors have no values: its mode holds for its own thread.
    """
    if type(torch.empty(0)) is not torch.Tensor:
        return False
    function = draw.func if isinstance(draw, functools.partial) else draw
    return getattr(function, "__module__", None) == "torch.nn.init" and "generator" in signature(function).parameters


def _drawn(shape: Sequence[int], draw: Draw, key: str, takes_generator: bool) -> torch.Tensor:
    """A tensor, filled on the host: devices of different kinds have generators of their own."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    seed, tensor = int.from_bytes(digest) >> 1, torch.empty(*shape)
    with torch.no_grad():  # which a thread of its own does not inherit
        if takes_generator:
            draw(tensor, generator=torch.Generator().manual_seed(seed))
        else:
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                draw(tensor)
    return tensor


_FUNCTIONS = ("init_method", "output_layer_init_method", "embedding_init_method")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class _Noting:
    """An initialisation function that notes what it was asked to fill.

    Args:
        draw: The function that it stands for.
        noted: By the parameter's identity: the parameter, kept alive, and the function.
    """

    def __init__(self, draw: Draw, noted: dict[int, tuple[torch.Tensor, Draw]]) -> None:
        self.draw, self._noted = draw, noted

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._noted[id(tensor)] = tensor, self.draw
        tensor.detach().zero_()  # a layer in fp8 quantises it at once, and delayed scaling remembers what was there
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Noting":
        return self  # copies of the configuration note into the same place


class InitialWeightsByName(RuntimeFeature):
    """Draws weights when a chunk's names are known.

    Args:
        experts: Of a layer; 0 without layers of experts.
        in_blocks: Whether the values do not depend on the size of the tensor that they are drawn in.
    """

    def __init__(self, seed: int, cut: Cut, tp_rank: int, expert_rank: int, experts: int, *, in_blocks: bool) -> None:
        self._seed, self._cut, self._tp_rank, self._in_blocks = seed, cut, tp_rank, in_blocks
        self._expert_rank, self._experts = expert_rank, experts
        self._noted: dict[int, tuple[torch.Tensor, Draw]] = {}
        self._replaced: list[tuple[Any, str, Draw]] = []

    def prepare_config(self, model_config: Any) -> None:
        config = model_config.transformer
        for name in _FUNCTIONS:
            draw = getattr(config, name)
            self._replaced.append((config, name, draw))
            setattr(config, name, _Noting(draw, self._noted))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        from megatron_het.attention.recurrent import draws_of

        by_memory = {_memory(tensor): draw for tensor, draw in self._noted.values()}
        for model in models:
            self._noted |= {id(tensor): (tensor, draw) for tensor, draw in draws_of(model)}
            for name, parameter, owner in _named(model):
                noted = self._noted.get(id(parameter))
                # Layers of Transformer Engine make parameters anew once these are filled: other objects, same memory.
                draw = by_memory.get(_memory(parameter)) if noted is None else noted[1]
                if draw is None:  # in fp8 in other memory; the layer knows
                    described = getattr(owner, "param_init_meta", {}).get(name.rpartition(".")[2])
                    draw = getattr(getattr(described, "init_fn", None), "draw", None)
                if draw is not None:
                    self._fill(name, parameter, owner, draw)
        self._noted.clear()

    def _fill(self, name: str, parameter: torch.Tensor, owner: torch.nn.Module, draw: Draw) -> None:
        shard = getattr(owner, "shard", None)  # rows of a vocabulary that is split over stages
        dim = 0
        tp, tp_rank = self._cut.tp, self._tp_rank
        own = expert_name(name)
        if own is not None:
            name = own.of(held_experts(self._experts, self._cut, self._expert_rank)[own.expert])
            tp, tp_rank = self._cut.expert_tp, self._expert_rank % self._cut.expert_tp
        if shard is not None:
            size = shard.total
            parts = [Segment(0, shard.first, shard.rows)]
        elif getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim  # type: ignore[attr-defined]
            size = parameter.shape[dim] * tp
            parts = segments(size, tp, tp_rank, stride_of(parameter))
        else:
            size = parameter.shape[0]
            parts = [Segment(0, 0, size)]
        values, in_blocks = initial_values(parameter), self._in_blocks
        fill(values, draw, name, self._seed, full_size=size, dim=dim, segments=parts, in_blocks=in_blocks)
        set_initial_values(parameter, values)

    def close(self) -> None:
        for config, name, draw in self._replaced:
            setattr(config, name, draw)
        self._replaced.clear()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies values that two objects share; also of tensors without memory, as in a dry run."""
    return StorageWeakRef(tensor.untyped_storage()).cdata, tensor.storage_offset(), tensor.shape


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module]]:
    """Parameters of a chunk by their names in the whole model, with the modules that hold them."""
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            match = _LAYER.match(name)
            if match:
                layer = model.decoder.layers[int(match[1])].layer_number - 1  # type: ignore[union-attr, index]
                name = f"decoder.layers.{layer}.{name[match.end() :]}"
            yield name, parameter, module


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    where = context.placement.locate(context.rank)
    args = context.args
    uniform = getattr(args, "init_method_xavier_uniform", False)  # bounds depend on the whole tensor
    cut = context.placement.replica(where.stage, where.replica).cut
    experts = getattr(args, "num_experts", None) or 0
    expert_rank = context.placement.expert_rank(context.rank)
    return InitialWeightsByName(args.seed, cut, where.tp_rank, expert_rank, experts, in_blocks=not uniform)
