"""This rank's state as pieces: parameters, main parameters and optimizer state by global name and range.

The position of a shard in the whole parameter comes from the module's own sharded state dict, as in checkpoints.
So all state that Megatron or a feature can save, with any sharding, can be moved.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Ranges of parameters: which elements of a whole tensor a rank holds, and which ones two ranks have in common.
#
# A rank holds *pieces*: tensor parallelism gives it a block of the whole tensor, and the distributed optimizer a run of
# elements of the block in row-major order.  Relative to the whole tensor both are a list of intervals of its elements.
# The state of one plan and the needs of the next one are compared as such intervals, independently of how either
# divides tensors.

Runs = npt.NDArray[np.int64]
"""``[n, 3]``, ascending: first element in the whole tensor, first element in the piece, number of elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a block of a whole tensor."""

    key: str  # global name of the parameter
    # ``parameter``, ``main`` (fp32 main parameter), or the optimizer's name of the state, such as ``exp_avg``
    kind: str
    dtype: str  # name of the data type, such as ``float32``
    shape: tuple[int, ...]
    offset: tuple[int, ...]  # position of the block's first element, per dimension
    block: tuple[int, ...]  # shape of the block, with as many dimensions as the whole
    start: int  # first element of the block that is in the piece, in row-major order
    stop: int  # end of the piece's elements

    @property
    def name(self) -> tuple[str, str]:
        """Key and kind; pieces with the same name are parts of the same tensor."""
        return self.key, self.kind

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}  # for each piece of each copy: ``asdict`` is slow

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Piece":
        """Returns the piece of a document of :meth:`to_json`."""
        lists = {name: tuple(values[name]) for name in ("shape", "offset", "block")}
        return Piece(**{**values, **lists})

    def runs(self) -> Runs:
        """The piece as intervals of the whole tensor's elements, in row-major order."""
        shape, block = self.shape or (1,), self.block or (1,)
        offset = self.offset or (0,)
        inner, dim = 1, len(shape)
        while dim > 0:  # trailing dimensions that are whole, and the first one that is not
            dim -= 1
            inner *= block[dim]
            if block[dim] != shape[dim]:
                break
        outer = math.prod(block[:dim])
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        base = sum(o * s for o, s in zip(offset, strides, strict=True))
        starts = np.full(outer, base, dtype=np.int64)
        if outer > 1:
            index = np.unravel_index(np.arange(outer), block[:dim])
            for d in range(dim):
                starts += index[d].astype(np.int64) * strides[d]
        local = np.arange(outer, dtype=np.int64) * inner
        first, last = np.maximum(local, self.start), np.minimum(local + inner, self.stop)
        kept = first < last
        found = np.stack([starts + first - local, first - self.start, last - first], axis=1)
        return found[kept]


def common(mine: Runs, theirs: Runs) -> tuple[Runs, Runs, Runs]:
    """The common runs of two pieces, by position in ``mine`` and in ``theirs``, and the remaining runs of ``mine``."""
    if not len(mine) or not len(theirs):
        empty = np.empty((0, 3), dtype=np.int64)
        return empty, empty, mine
    if np.array_equal(mine[:, 0], theirs[:, 0]) and np.array_equal(mine[:, 2], theirs[:, 2]):  # equal divisions
        return mine, theirs, mine[:0]
    bounds = [mine[:, 0], mine[:, 0] + mine[:, 2], theirs[:, 0], theirs[:, 0] + theirs[:, 2]]
    edges = np.unique(np.concatenate(bounds))
    starts, lengths = edges[:-1], np.diff(edges)
    a, in_mine = _containing(mine, starts)
    b, in_theirs = _containing(theirs, starts)
    both, rest = in_mine & in_theirs, in_mine & ~in_theirs

    def at(runs: Runs, which: npt.NDArray[np.int64], selected: npt.NDArray[np.bool_]) -> Runs:
        rows = runs[which[selected]]
        begin = starts[selected]
        return np.stack([begin, rows[:, 1] + begin - rows[:, 0], lengths[selected]], axis=1)

    return at(mine, a, both), at(theirs, b, both), at(mine, a, rest)


def _containing(runs: Runs, starts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each start the index of the run before or at it, and whether the start lies in the run."""
    index = np.searchsorted(runs[:, 0], starts, side="right") - 1
    found = np.maximum(index, 0)
    return found, (index >= 0) & (starts < runs[found, 0] + runs[found, 2])


PARAMETER, MAIN = "parameter", "main"


class StateError(RuntimeError):
    """State that cannot be moved; the message names the state and the reason."""


@dataclass
class LocalState:
    """A rank's state, to be read or to be filled."""

    # pieces, each with its elements as a flat view of the tensor itself
    pieces: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)
    # the optimizer's state that is not tensors, such as the step, by parameter name
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    # names of parameters that are optimized here but have no optimizer state on any rank
    stateless: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Block:
    """Rows of a parameter, as a block of the whole tensor."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: tuple[int, ...]
    first: int  # element of the flat parameter at which the block begins

    @property
    def size(self) -> int:
        return torch.Size(self.block).numel()


Blocks = dict[int, tuple[torch.Tensor, list[_Block]]]


@torch.no_grad()
def collect(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    args: Any,
    blocks: Blocks | None = None,
    *,
    is_updated: bool = False,
) -> LocalState:
    """Returns this rank's present state.

    Args:
        blocks: Result of :func:`blocks_of` for these models, if available.
        is_updated: Whether parameters of the last update may be gathered only in the next forward
            (``--overlap-param-gather``): until then a rank has new values of its own part only.

    Raises:
        StateError: The optimizer stores its state in an unsupported form.
    """
    blocks = blocks or blocks_of(models, args)
    found = LocalState()
    owned: dict[int, tuple[int, int]] | None = None
    if is_updated and args.overlap_param_gather:
        # By the id of a parameter: the first element of this rank's part, and its size.
        owned = {id(p): (start, main.numel()) for _, pairs in optimizers(optimizer) for p, main, start in pairs}
    for tensor, parts in blocks.values():
        if owned is None or not tensor.requires_grad:
            _add(found, parts, PARAMETER, tensor, 0)
        elif id(tensor) in owned:
            start, size = owned[id(tensor)]
            _add(found, parts, PARAMETER, tensor.view(-1)[start : start + size], start)
    for inner, pairs in optimizers(optimizer):
        for parameter, main, start in pairs:
            parts = blocks[id(parameter)][1]
            if main.dtype != parameter.dtype:
                _add(found, parts, MAIN, main, start)
            elif main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                _add(found, parts, PARAMETER, main, start)  # the same values, kept apart by a parameter window
            for name, value in inner.state.get(main, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    _add(found, parts, name, value, start)
                elif value is not None:
                    found.numbers.setdefault(parts[0].key, {})[name] = float(value)
            step = _group_of(inner, main).get("step")
            if step is not None:  # counted per group, as in Apex and Transformer Engine
                found.numbers.setdefault(parts[0].key, {})["group.step"] = float(step)
    return found


@torch.no_grad()
def prepare(
    models: Sequence[torch.nn.Module], optimizer: Any, args: Any, kinds: Mapping[str, Sequence[str]], blocks: Blocks
) -> LocalState:
    """Allocates the state that a new rank needs, including optimizer state that is created lazily.

    Args:
        optimizer: Megatron's.  Its state is allocated, but not set, after this.
        kinds: Names of the optimizer's states with their data types, by parameter name, from the ranks that hold them.
        blocks: Result of :func:`blocks_of` for these models.
    """
    forget(optimizer)
    stateless = []
    for inner, pairs in optimizers(optimizer):
        for parameter, main, _ in pairs:
            keys = [part.key for part in blocks[id(parameter)][1]]
            entries = next((kinds[key] for key in keys if key in kinds), ())
            if not entries:
                stateless.append(keys[0])
            for entry in entries:
                name, _, dtype = entry.partition(":")
                inner.state[main][name] = torch.zeros_like(main, dtype=getattr(torch, dtype))
    found = collect(models, optimizer, args, blocks)
    found.stateless = stateless
    return found


def forget(optimizer: Any) -> None:
    """Remove the state that :func:`prepare` has allocated: without moved state an optimizer begins as a new one."""
    for inner, _ in optimizers(optimizer):
        inner.state.clear()


@torch.no_grad()
def set_numbers(optimizer: Any, blocks: Blocks, numbers: Mapping[str, Any]) -> None:
    """Give the optimizer the numbers that belong to its state, such as the count of steps."""
    for inner, pairs in optimizers(optimizer):
        for parameter, main, _ in pairs:
            for name, value in numbers.get(blocks[id(parameter)][1][0].key, {}).items():
                if name == "group.step":
                    _group_of(inner, main)["step"] = int(value)
                else:
                    inner.state[main][name] = torch.tensor(value, dtype=torch.float32)


def optimizers(optimizer: Any) -> Iterator[tuple[Any, list[tuple[torch.Tensor, torch.Tensor, int]]]]:
    """Yields each inner optimizer with its parameters.

    Yields:
        torch's optimizer, and for each parameter of this rank: the model's parameter, the tensor that is optimized in
        its place, and the parameter's element at which that tensor begins.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:  # nothing of this rank is optimized
            continue
        if getattr(part.config, "use_precision_aware_optimizer", False):
            raise StateError("--use-precision-aware-optimizer keeps its main parameters where elastic training cannot")
        if getattr(getattr(part, "ddp_config", None), "fp8_param_gather", False):
            raise StateError("--fp8-param-gather keeps weights in a form that elastic training cannot move")
        if hasattr(part, "shard_fp32_from_float16_groups"):  # the distributed optimizer
            groups = (
                *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
                *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
            )
            pairs = [
                (model, main, part._get_model_param_range_map(model)["param"].start)
                for models, mains in groups
                for model, main in zip(models, mains, strict=True)
            ]
        elif hasattr(part, "fp32_from_float16_groups"):
            groups = (
                *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
                *zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True),
            )
            pairs = [(model, main, 0) for a, b in groups for model, main in zip(a, b, strict=True)]
        else:
            pairs = [(p, p, 0) for group in inner.param_groups for p in group["params"]]
        yield inner, pairs


def blocks_of(models: Sequence[torch.nn.Module], args: Any) -> Blocks:
    """Returns each saved parameter and buffer, by id, with the blocks that it consists of."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    metadata = _build_sharded_state_dict_metadata(args) | {"non_homogeneous_layers": True}
    found: Blocks = {}
    for model in unwrap_model(list(models)):
        for entry in nested_values(model.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensorFactory):
                found[id(entry.data)] = entry.data, _blocks_of_factory(entry)
            elif isinstance(entry, ShardedTensor) and entry.data is not None:
                found[id(entry.data)] = entry.data, [_block(entry, 0)]
    return found


def _block(entry: Any, first: int) -> _Block:
    """The block of a sharded tensor; dimensions that only the whole tensor has are of size 1."""
    extra = len(entry.global_shape) - len(entry.local_shape)
    block = (*(1,) * extra, *entry.local_shape)
    return _Block(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), block, first)


def _blocks_of_factory(factory: Any) -> list[_Block]:
    """Returns the blocks that a factory makes of a parameter, by applying it to a tensor of row numbers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    data = factory.data
    width = data.numel() // max(1, data.shape[0])
    rows = torch.arange(data.shape[0]).view(-1, *(1,) * (data.dim() - 1)).expand(data.shape)
    blocks = []
    for entry in nested_values(factory.build_fn(factory.key, rows, factory.replica_id, None)):
        cut = entry.data.reshape(entry.data.shape[0], -1)[:, 0]
        first = int(cut[0])
        whole_rows = entry.data.numel() == len(cut) * width
        if not whole_rows or not torch.equal(cut, torch.arange(first, first + len(cut))):
            raise StateError(f"{factory.key}: its checkpoint form is not cut along rows, so it cannot be moved")
        blocks.append(_block(entry, first * width))
    return blocks


def _add(found: LocalState, parts: Sequence[_Block], kind: str, tensor: torch.Tensor, start: int) -> None:
    """Add the pieces of a tensor that holds a parameter's elements from ``start`` on; ``parts`` are its blocks."""
    flat = tensor.detach().view(-1)
    stop = start + flat.numel()
    dtype = str(tensor.dtype).removeprefix("torch.")
    for part in parts:
        lo, hi = max(start, part.first), min(stop, part.first + part.size)
        if lo < hi:
            piece = Piece(
                key=part.key,
                kind=kind,
                dtype=dtype,
                shape=part.shape,
                offset=part.offset,
                block=part.block,
                start=lo - part.first,
                stop=hi - part.first,
            )
            found.pieces.append((piece, flat[lo - start : hi - start]))


def _group_of(inner: Any, main: torch.Tensor) -> dict[str, Any]:
    return next((group for group in inner.param_groups if any(main is p for p in group["params"])), {})
