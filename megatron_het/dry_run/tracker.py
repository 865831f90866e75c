"""Counts a rank's memory, computation and traffic, operator by operator, on real and on fake tensors."""

import contextlib
import functools
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_het.device.memory import Storages, StorageWatch, uncounted, watched
from megatron_het.dry_run.device_streams import HostWaits
from megatron_het.dry_run.kernels import SELECT, Remembered, selected

# The ledger of a rank's memory: every change of a storage's size, with its moment in the run.
#
# Categories are assigned afterwards, because they depend on lifetimes: a storage that outlives the
# operation that created it is an activation, the others are temporary.

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, CACHE, TEMPORARIES, OTHER = "activations", "cache", "temporaries", "other"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CACHE, TEMPORARIES, OTHER)


@dataclass(frozen=True, slots=True)
class Moment:
    """The part of a run in which one operation or phase runs."""

    iteration: int  # training iteration from 0; -1 before the first one
    label: str  # label of the operation or phase
    is_operation: bool  # whether it is an operation of the program


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory in a part of a run."""

    total_bytes: int  # all categories together
    label: str  # operation or phase at the peak
    by_category: Mapping[str, int]  # bytes of each category at the peak
    category_peaks: Mapping[str, int]  # each category's own peak


@dataclass
class Ledger:
    """Memory changes in order.

    A *life* of a storage lasts from an allocation to its release; a storage that is resized may have several.
    """

    moments: list[Moment] = field(default_factory=lambda: [Moment(-1, "start", False)])
    _lives: array[int] = field(default_factory=lambda: array("q"))
    _changes: array[int] = field(default_factory=lambda: array("q"))
    _when: array[int] = field(default_factory=lambda: array("q"))
    _marked: dict[int, str] = field(default_factory=dict)
    _born: array[int] = field(default_factory=lambda: array("q"))
    _died: dict[int, int] = field(default_factory=dict)

    def begin(self, moment: Moment) -> None:
        """Begin a moment."""
        self.moments.append(moment)

    def open(self) -> int:
        """Begin a life; returns its number."""
        self._born.append(len(self.moments) - 1)
        return len(self._born) - 1

    def change(self, life: int, difference_bytes: int) -> None:
        """Record that a storage has grown or shrunk."""
        self._lives.append(life)
        self._changes.append(difference_bytes)
        self._when.append(len(self.moments) - 1)

    def close(self, life: int) -> None:
        """Record the end of a life."""
        self._died[life] = len(self.moments) - 1

    def mark(self, life: int, category: str) -> None:
        """Set the category of a life, which then does not depend on its moments."""
        self._marked[life] = category

    def category(self, life: int) -> str:
        """Returns the category of a life, by its mark or its moments."""
        marked = self._marked.get(life)
        if marked is not None:
            return marked
        born, died = self._born[life], self._died.get(life)
        if self.moments[born].is_operation and died != born:
            return ACTIVATIONS
        if self.moments[born].iteration < 0 and (died is None or self.moments[died].iteration >= 0):
            return OTHER
        return TEMPORARIES

    def peak(self, iteration: int) -> Peak:
        """The peak of an iteration, or of the time before the first one (-1)."""
        now = dict.fromkeys(CATEGORIES, 0)
        most = defaultdict(int, now)
        total, highest, label, at_peak = 0, -1, "", dict(now)
        known: dict[int, str] = {}
        moment = -1
        for life, difference, when in zip(self._lives, self._changes, self._when, strict=True):
            if self.moments[when].iteration > iteration:
                break
            category = known.get(life)
            if category is None:
                category = known[life] = self.category(life)
            if when != moment:
                if self.moments[when].iteration == iteration and (
                    moment < 0 or self.moments[moment].iteration < iteration
                ):
                    total, highest, label, at_peak = sum(now.values()), sum(now.values()), "start", dict(now)
                    most = defaultdict(int, now)
                moment = when
            now[category] += difference
            total += difference
            if self.moments[when].iteration != iteration:
                continue
            if total > highest:
                highest, label, at_peak = total, self.moments[when].label, dict(now)
            most[category] = max(most[category], now[category])
        return Peak(max(highest, 0), label, at_peak, dict(most))


# Waiting until the threads of gloo have released the tensors of completed work.
#
# A thread of gloo first reports that its work is done and then releases the tensors.  A thread that is suspended
# in between keeps them alive during later operations of this rank, unlike on a GPU or in a dry run.


_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_SLEEP_S = 0.0001
_LOOKS = 3
_BOUND_S = 1.0


def let_go() -> None:
    """Wait until no thread of gloo is running: such a thread has released its tensors, or its work is not done.

    A thread that waits for Python's GIL is not running either.  It gets the GIL while this thread sleeps, hence
    several checks.  Waits for a second at most; returns early if the system has no ``/proc/self/task``.
    """
    deadline_s = time.monotonic() + _BOUND_S
    quiet = 0
    while quiet < _LOOKS and time.monotonic() < deadline_s:
        time.sleep(_SLEEP_S)
        quiet = 0 if _computes() else quiet + 1


def _computes() -> bool:
    if not _TASKS.is_dir():
        return False
    for task in _TASKS.iterdir():
        try:
            name, stat = (task / "comm").read_text("utf-8"), (task / "stat").read_text("utf-8")
        except OSError:  # it has ended
            continue
        # The name is in parentheses and may contain one.
        if name.startswith(_NAME) and stat.rsplit(")", 1)[1].split()[0] == "R":
            return True
    return False


# Traffic of a rank: the operations of ``torch.distributed``, by peer or by collective.


_POINT_TO_POINT = {"send": "sent", "recv_": "received"}
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
}
"""Name, and position of the larger argument: the full output of a gather, the full input of a reduce-scatter."""


@dataclass(slots=True)
class Count:
    """Number and bytes of one kind of operation."""

    calls: int = 0
    payload_bytes: int = 0  # of a transfer, the tensor; of a collective, the larger of input and output


class Traffic:
    """Counts since the last :meth:`restart`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], Count] = defaultdict(Count)

    def restart(self) -> None:
        """Count from zero."""
        self._counts.clear()

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count one operation, an overload of ``torch.ops.c10d``."""
        name = func._schema.name.removeprefix("c10d::")
        if name in _POINT_TO_POINT:
            group = _group(func, args)
            members = dist.get_process_group_ranks(group)
            peer = members[int(args[2])]
            self._add(_POINT_TO_POINT[name], (peer,), _size_bytes(args[0]))
        elif name in _COLLECTIVES:
            members, (what, position) = dist.get_process_group_ranks(_group(func, args)), _COLLECTIVES[name]
            if len(members) > 1:
                self._add(what, tuple(members), _size_bytes(args[position]))

    def _add(self, what: str, ranks: tuple[int, ...], size_bytes: int) -> None:
        count = self._counts[what, ranks]
        count.calls += 1
        count.payload_bytes += size_bytes

    def as_json(self) -> list[dict[str, Any]]:
        """One entry per sort and group, in a fixed order."""
        return [{"what": what, "ranks": list(ranks), **asdict(c)} for (what, ranks), c in sorted(self._counts.items())]


class _UnderWay(dist.Work):
    """Work with absent ranks: not completed until it is waited for, which takes no time."""

    def wait(self, timeout: Any = None) -> bool:
        """See :class:`torch.distributed.Work`."""
        return True


_WORK = _UnderWay()  # a global, because torch does not keep the Python object alive


def answer(func: Any, args: tuple[Any, ...]) -> Any:
    """Returns the result of an operation of ``torch.ops.c10d`` without other ranks: its first argument, and work."""
    work = _WORK.boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    position = next(i for i, a in enumerate(func._schema.arguments) if a.name == "process_group")
    return dist.ProcessGroup.unbox(args[position])


def _size_bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


_ATEN = torch.ops.aten
_VALUE = _ATEN._local_scalar_dense.default
_LENGTH_FIRST = {
    _ATEN._efficient_attention_forward,
    _ATEN._efficient_attention_backward,
    _ATEN._flash_attention_forward,
    _ATEN._flash_attention_backward,
}
_SETS = {_ATEN.set_.source_Storage, _ATEN.set_.source_Storage_storage_offset}


class _LedgerStorages(Storages):
    """Storages that record every change in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._life: dict[int, list[int]] = {}

    def changed(self, key: int, before_bytes: int, after_bytes: int) -> None:
        if before_bytes == 0:
            self._life.setdefault(key, []).append(self._ledger.open())
        life = self._life[key][-1]
        self._ledger.change(life, after_bytes - before_bytes)
        if after_bytes == 0:
            self._ledger.close(life)

    def forget(self, key: int) -> None:
        super().forget(key)
        self._life.pop(key, None)

    def mark(self, tensor: torch.Tensor, category: str) -> None:
        """Set the category of a tensor's storage, for all its lives."""
        for life in self._life.get(tensor.untyped_storage()._cdata, ()):
            self._ledger.mark(life, category)


class Tracker(StorageWatch):
    """Counts memory, FLOPs and traffic in the context :meth:`running`, inside a ``FakeTensorMode`` for fake tensors.

    Args:
        is_fake: Whether tensors have no values and the other ranks are absent.
        remembers: Whether results of operators on fake tensors are cached, which only saves time.
    """

    def __init__(self, *, is_fake: bool, device_type: str = "cpu", remembers: bool = True) -> None:
        self.ledger = Ledger()  # memory
        self._known = _LedgerStorages(self.ledger)
        self._known.device_type = device_type
        super().__init__(self._known)
        self._is_fake, self._remembers = is_fake, remembers
        self.traffic = Traffic()  # operations of ``torch.distributed`` in the current iteration
        # waits of the host for the device in the current iteration; counted on fake tensors of a CUDA device
        self.waits = HostWaits()
        # FLOPs of matrix products and attention in the current iteration, by kind of operation of the program
        self.flops: dict[str, int] = defaultdict(int)
        self.top_k = 0  # experts that a token is sent to, for fake tensors
        self._remembered: Remembered | None = None
        self._iteration = -1
        self._kind = ""
        self._has_sent = False

    @property
    def live_bytes(self) -> int:
        """Returns the live bytes."""
        return self._known.live_bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: a dry run compiles nothing, and torch's own check takes longer than an operator."""
        return False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the tracker counts."""
        if self._is_fake and self._remembers:
            self._remembered = Remembered(_fake_mode(), functools.partial(self._known.see, new=True))
        with watched(self._known), _objects_overlooked(), self:
            yield

    def start_iteration(self) -> None:
        """Begin an iteration of training, and end the one before."""
        self._iteration += 1
        self.traffic.restart()
        self.waits.restart()
        self.flops.clear()
        self.phase("between operations")

    def phase(self, label: str) -> None:
        """Begin a phase that is not an operation of the program."""
        self._begin("", Moment(self._iteration, label, is_operation=False))

    def operation(self, kind: str, label: str) -> None:
        """Begin an operation of the program."""
        self._begin(kind, Moment(self._iteration, label, is_operation=True))

    def _begin(self, kind: str, moment: Moment) -> None:
        if not self._is_fake:
            let_go()  # tensors that are released late would count as activations
        self._kind = self.waits.during = kind
        self.ledger.begin(moment)

    def add_flops(self, count: float) -> None:
        """Count FLOPs of code that is not an operator of torch."""
        self.flops[self._kind] += int(count)

    def mark(self, tensors: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Set the categories of storages, from tensors by category."""
        for category, found in tensors.items():
            for tensor in found:
                self._known.mark(tensor, category)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._has_sent:
            self._has_sent = False
            let_go()
        if func.namespace == "c10d":
            self.traffic.see(func, args)
            if self._is_fake:
                return answer(func, args)
            self._has_sent = True
        elif func is _VALUE and self._is_fake:
            return _value(args[0])
        elif func is SELECT and self._is_fake:
            made = selected(args, self.top_k)
            self._known.see(made, new=True)  # no operator returned it, so the dispatch mode has not seen it
            return made
        if self._remembered is None:
            return self._counted(func, types, args, kwargs)[0]
        key, tensors = self._remembered.key(func, args, kwargs or {})
        if key is None:
            return self._counted(func, types, args, kwargs)[0]
        known = self._remembered.find(key, tensors)
        if known is None:
            result, flops = self._counted(func, types, args, kwargs)
            self._remembered.keep(key, tensors, result, flops)
            return result
        if known.flops:
            self.flops[self._kind] += known.flops
        return self._remembered.again(known, tensors)

    def _counted(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, int]:
        """Runs an operator; returns its result and its FLOPs."""
        # torch's cache of fake operators keeps storages of arguments alive, and cached views would return freed ones.
        forgets = self._is_fake and (func.is_view or func in _SETS)
        with disable_fake_tensor_cache(_fake_mode()) if forgets else contextlib.nullcontext():
            result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func.overloadpacket)
        flops = 0
        if formula is not None:
            given = map(_heads_first, args) if func.overloadpacket in _LENGTH_FIRST else args
            flops = formula(*given, **(kwargs or {}), out_val=result)
        if flops:
            self.flops[self._kind] += flops
        return result, flops


def _heads_first(argument: Any) -> Any:
    """torch's formulas for these kernels take ``[b, heads, s, d]``, whereas the kernels take ``[b, s, heads, d]``."""
    is_matrix = isinstance(argument, torch.Tensor) and argument.dim() == 4
    return argument.transpose(1, 2) if is_matrix else argument


def _fake_mode() -> FakeTensorMode:
    return next(m for m in _get_current_dispatch_mode_stack() if isinstance(m, FakeTensorMode))


def _value(tensor: torch.Tensor) -> Any:
    """Returns the result of ``item()``: the value if it is known, else zero, which means no overflow and no NaN."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


@contextlib.contextmanager
def _objects_overlooked() -> Iterator[None]:
    """Context in which ``all_gather_object``, used while ranks start, does not count its tensors."""
    original = dist.all_gather_object

    @functools.wraps(original)
    def all_gather_object(*positional: Any, **keywords: Any) -> None:
        with uncounted():
            original(*positional, **keywords)

    dist.all_gather_object = all_gather_object
    try:
        yield
    finally:
        dist.all_gather_object = original
