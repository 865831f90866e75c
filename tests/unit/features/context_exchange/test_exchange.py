"""The context exchange of whole programs: devices are threads, layers are bare attention."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.attention.calls import Reach
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Setting
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import NO_EXCHANGE, UNLIMITED, SliceContext
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.features.context_exchange.exchange import ContextExchange, ExchangeError
from megatron_het.features.context_exchange.helper import Limits, first_layers
from megatron_het.features.context_exchange.kinds import EXCHANGE
from megatron_het.features.context_exchange.spec import Units
from megatron_het.features.slices.runtime import most_held, passes_of
from megatron_het.lowering.programs import build, program_of
from megatron_het.lowering.ranks import BoundaryMap, RankOp, RankProgram, lower
from megatron_het.plan import Placement, ScheduleSpec
from megatron_het.plan.run_config import plan_from_flags
from megatron_het.report import Timeline
from megatron_het.schedule.cutting import Bounds, Cutting, Starts
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.validate import check

_WAIT_S = 20.0
TOKENS, HEADS, GROUPS, CHANNELS = 8, 4, 2, 8
KERNEL = choose_kernel(Setting("cpu", torch.float64, CHANNELS))
SCALE = CHANNELS**-0.5


class Wires:
    """Messages between all devices; the n-th receive posted on an edge gets its n-th message."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)


class Ends:
    """One device's channels; with ``on_device`` the host may have to wait for all that was posted, as on a GPU."""

    def __init__(self, wires: Wires, rank: int, on_device: bool) -> None:
        self.wires, self.rank, self.on_device = wires, rank, on_device
        self.under_way: list[tuple[dict[tuple[int, int], Any], tuple[int, int], int]] = []

    def moment(self, device: torch.device) -> None:
        """There are no streams."""

    def send(self, tensor: torch.Tensor, dst: int, label: str, after: None = None) -> None:
        with self.wires.changed:
            sent = self.wires.sent[self.rank, dst]
            self.under_way.append((self.wires.posted, (self.rank, dst), len(sent)))
            sent.append(tensor.clone())
            self.wires.changed.notify_all()

    def receive(self, target: torch.Tensor, src: int, label: str, after: None = None) -> Any:
        edge = src, self.rank
        with self.wires.changed:
            number = self.wires.posted[edge]
            self.wires.posted[edge] += 1
            self.under_way.append((self.wires.sent, edge, number))
            self.wires.changed.notify_all()
        return SimpleNamespace(edge=edge, number=number, target=target, label=label)

    def host_wait(self) -> None:
        """Until the other end of all that is under way is posted."""

        def ended(other: dict[tuple[int, int], Any], edge: tuple[int, int], number: int) -> bool:
            return (other[edge] if isinstance(other[edge], int) else len(other[edge])) > number

        with self.wires.changed:
            if not self.wires.changed.wait_for(lambda: all(ended(*one) for one in self.under_way), _WAIT_S):
                raise TimeoutError(f"the host of rank {self.rank} waits for its device")
            self.under_way.clear()

    def wait_receive(self, pending: Any) -> None:
        with self.wires.changed:
            sent = self.wires.sent[pending.edge]
            if not self.wires.changed.wait_for(lambda: len(sent) > pending.number, _WAIT_S):
                raise TimeoutError(f"{pending.label} on {pending.edge}")
            pending.target.copy_(sent[pending.number])

    def wait_sends(self) -> None:
        """Nothing is under way."""


class WaitingKernel:
    """A kernel before whose every call the host waits for the device."""

    def __init__(self, ends: Sequence[Ends]) -> None:
        self.ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(KERNEL, name)

    def forward(self, *given: Any) -> Any:
        self._wait()
        return KERNEL.forward(*given)

    def backward(self, *given: Any) -> Any:
        self._wait()
        return KERNEL.backward(*given)

    def _wait(self) -> None:
        for ends in self.ends:
            ends.host_wait()


@dataclass
class Sample:
    """Inputs of one layer for one microbatch, by slices, and the full attention of it."""

    leaves: list[list[torch.Tensor]]
    grad: torch.Tensor
    outs: dict[int, torch.Tensor]
    lengths: list[int]

    @classmethod
    def make(cls, bounds: Bounds, seed: int) -> Sample:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda h: torch.randn(bounds[-1], 1, h, CHANNELS, dtype=torch.float64, generator=generator)  # noqa: E731
        whole = [draw(h) for h in (HEADS, GROUPS, GROUPS)]
        lengths = lengths_of(bounds)
        return cls([[p.clone().requires_grad_() for p in t.split(lengths)] for t in whole], draw(HEADS), {}, lengths)

    def error(self, reach: Reach = UNLIMITED) -> float:
        whole = [torch.cat(leaf).detach().requires_grad_() for leaf in self.leaves]
        q, k, v = (t.permute(1, 2, 0, 3) for t in whole)
        attend = torch.nn.functional.scaled_dot_product_attention
        mask = seen(reach, len(whole[0]))
        out = attend(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True).permute(2, 0, 1, 3)
        out.backward(self.grad)
        found = torch.cat([self.outs[i] for i in sorted(self.outs)]).detach()
        pairs = [(found, out.detach())]
        pairs += [(torch.cat([p.grad for p in leaf]), w.grad) for leaf, w in zip(self.leaves, whole, strict=True)]
        return max(float((f - w).norm() / w.norm()) for f, w in pairs)


def lengths_of(bounds: Bounds) -> list[int]:
    return [end - first for first, end in itertools.pairwise(bounds)]


def seen(reach: Reach, tokens: int) -> torch.Tensor:
    """Which keys the queries of a sequence see."""
    at = torch.arange(tokens)
    mask = at[:, None] >= at[None, :]
    if reach.window_tokens is not None:
        mask &= at[:, None] - at[None, :] <= reach.window_tokens
    if reach.starts is not None:
        document = (at[:, None] >= torch.tensor(reach.starts[0])[None, :]).sum(dim=1)
        mask &= document[:, None] == document[None, :]
    return mask


class Device:
    """Runs the program of one rank."""

    def __init__(
        self,
        program: RankProgram,
        rank: int,
        layers: int,
        units: Units,
        bounds: Callable[[int], Bounds],
        wires: list[Wires],
        keep: bool,
        alone: int = 0,
        limits: Limits | None = None,
        reach: Callable[[int, int, int], Reach] = lambda chunk, layer, microbatch: UNLIMITED,
        on_device: bool = False,
    ) -> None:
        self.program, self.rank, self.bounds, self.reach = program, rank, bounds, reach
        chunks = len(program.backwards)
        self.modules = [
            [
                SimpleNamespace(cache=KVCache(most_held(passes_of(program, c))), exchange=NO_EXCHANGE)
                for _ in range(layers + alone)
            ]
            for c in range(chunks)
        ]
        self.samples: dict[tuple[int, int, int], Sample] = {}
        attention = SimpleNamespace(
            hidden_size_per_attention_head=CHANNELS,
            num_attention_heads_per_partition=HEADS,
            num_query_groups_per_partition=GROUPS,
            config=SimpleNamespace(softmax_scale=None, params_dtype=torch.float64),
        )
        model = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(self_attention=attention)]))
        ends = [Ends(w, rank, on_device) for w in wires]
        self.kernel: Any = WaitingKernel(ends) if on_device else KERNEL
        self.exchange = ContextExchange(
            {False: program}, units, rank, layers, *ends, Timeline(), torch.device("cpu"), keep
        )
        self.exchange.attach(self.modules, [model], lambda microbatch: 1)
        self.exchange._kernel = self.kernel
        if limits is not None:
            self.exchange.begin_limited(program, limits)
            for module in (m for modules in self.modules for m in modules):
                longest = max(max(lengths_of(bounds(m))) for m in range(self.program.num_microbatches))
                module.cache.reserve(module.cache.slots * longest)

    def run(self) -> float:
        for op in self.program.ops:
            if op.kind in EXCHANGE:
                self.exchange.handle(op)
            elif op.kind == Kind.FORWARD:
                with self.exchange.joint(op):
                    self.forward(op)
            elif op.kind == Kind.BACKWARD:
                with self.exchange.joint(op):
                    for layer in reversed(range(len(self.modules[op.chunk]))):
                        sample = self.samples[op.microbatch, op.chunk, layer]
                        sample.outs[op.slice].backward(sample.grad.split(sample.lengths)[op.slice])
        self.exchange.finish()
        for module in (m for modules in self.modules for m in modules):
            module.cache.check_empty()
        return max(sample.error(self.reach(c, layer, m)) for (m, c, layer), sample in self.samples.items())

    def forward(self, op: RankOp) -> None:
        for layer, module in enumerate(self.modules[op.chunk]):
            key = op.microbatch, op.chunk, layer
            if key not in self.samples:
                seed = (self.rank + 1) * 1000 + op.microbatch * 100 + op.chunk * 10 + layer
                self.samples[key] = Sample.make(self.bounds(op.microbatch), seed)
            sample = self.samples[key]
            q, k, v = (leaf[op.slice] for leaf in sample.leaves)
            place = {"microbatch": op.microbatch, "index": op.slice, "scale": SCALE, "kernel": self.kernel}
            place["reach"] = self.reach(op.chunk, layer, op.microbatch)
            sample.outs[op.slice] = slice_attention(
                q, k, v, SliceContext(cache=module.cache, exchange=module.exchange, **place)
            )


def devices(
    stages: int,
    slices: int,
    chunks: int,
    microbatches: int,
    replicas: int = 1,
    alone: int = 0,
    seen_by: tuple[Sequence[Starts] | None, int | None] = (None, None),
    keys_per_token: float = 0.0,
    on_device: bool = False,
    **options: Any,
) -> list[Device]:
    """All devices; the chunks of rank r have ``r * alone`` layers more than those of rank 0.

    ``seen_by`` says where the documents of each microbatch begin, and how many earlier tokens the queries of every
    second layer see.  With ``keys_per_token`` slices have equal work.
    """
    words = (
        f"--num-layers {2 * stages * chunks} --hidden-size 64 --num-attention-heads {HEADS} "
        f"--group-query-attention --num-query-groups {GROUPS} --seq-length {slices * TOKENS} "
        f"--micro-batch-size 1 --global-batch-size {microbatches} --pipeline-model-parallel-size {stages} "
        f"--num-virtual-stages-per-pipeline-rank {chunks}"
    )
    parameters = {"slices": slices, "context_exchange": True, **options}
    if keys_per_token:
        parameters |= {"slice_lengths": "work", "slice_keys_per_token": keys_per_token}
    plan, _ = plan_from_flags(words.split(), stages * replicas, ScheduleSpec("slimpipe", parameters))
    placement = Placement(plan)
    units, keep = parameters.get("exchange_units", 2), parameters.get("exchange_keep", False)
    program = build(placement.plan)[False]
    boundaries = BoundaryMap(placement, TOKENS, False)
    length = slices * TOKENS
    cutting = Cutting(length, slices, units if keys_per_token else TOKENS, keys_per_token)
    limits, documents, windows = None, *seen_by
    layers = [None if number % 2 else windows for number in range(plan.model.num_layers)]
    starts = lambda m: None if documents is None else (documents[m],)  # noqa: E731
    bounds = lambda m: cutting.bounds(starts(m))  # noqa: E731
    where_units = Units(units, boundaries.part_lengths(), TOKENS, bounds)
    if documents is not None or windows is not None or keys_per_token:
        cutting = replace(cutting, window_tokens=windows, window_share=0.5 if windows else 0.0)
        parts = [cutting.parts(starts(m), units) for m in range(microbatches)]
        program = program_of(plan, parts=parts)
        check(program)
        limits = Limits(placement, boundaries.side, where_units, layers, starts)
    wires = [Wires(), Wires()]
    found = []
    for rank in range(plan.world_size):
        where = placement.locate(rank)
        device = program.shape.device(where.stage, where.replica)
        lowered = lower(program, boundaries, device, rank)
        firsts = [first_layers(placement)[where.stage, chunk] for chunk in range(chunks)]
        reach = lambda c, layer, m, firsts=firsts: Reach(starts(m), layers[firsts[c] + layer])  # noqa: E731
        limited = {} if limits is None else {"limits": limits, "reach": reach}
        made = Device(lowered, rank, 2, where_units, bounds, wires, keep, rank * alone, **limited, on_device=on_device)
        found.append(made)
    return found


def run_all(made: list[Device]) -> list[float]:
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(made)) as pool:
        return [future.result(timeout=3 * _WAIT_S) for future in [pool.submit(d.run) for d in made]]


ALL = {"exchange_idle": True, "exchange_keep": True}
SMALL, LARGE = (2, 4, 2, 2), (4, 8, 1, 3)
DOCUMENTS = [(0, 3, 11, 12, 29), (0,), (0, 20)]
Sizes, Options = tuple[int, int, int, int], dict[str, Any]
Seen = tuple[Sequence[Starts] | None, int | None]


def shaped(*options: Options, small: Sequence[Sizes] = (SMALL,)) -> Any:
    """Small programs with each of the options, and a large one with all of them; with others in the full tier only."""
    rows = [pytest.param(shape, each) for shape in small for each in options]
    rows += [pytest.param(LARGE, each, marks=() if each == ALL else pytest.mark.full) for each in options]
    return pytest.mark.parametrize(("shape", "options"), rows, ids=str)


@shaped(
    *({}, {"exchange_units": 1}, {"exchange_idle": True}, {"exchange_keep": True}, ALL),
    small=[(2, 4, 1, 2), (4, 4, 1, 1), (3, 6, 2, 2)],
)
def test_exact(shape: Sizes, options: Options) -> None:
    made = devices(*shape, **options)
    assert any(op.kind == Kind.ATTEND_HELP for d in made for op in d.program.ops)
    assert max(run_all(made)) < 1e-12


@pytest.mark.parametrize("seen_by", [(None, None), (DOCUMENTS, 19)], ids=str)
@shaped({}, ALL)
def test_the_host_may_wait_for_the_device_at_every_kernel(shape: Sizes, options: Options, seen_by: Seen) -> None:
    """As CUDA makes it wait at the first launch of each: nothing under way may need this device before it ends."""
    assert max(run_all(devices(*shape, seen_by=seen_by, on_device=True, **options))) < 1e-12


@pytest.mark.parametrize("seen_by", [(DOCUMENTS, None), (None, 11), (None, 3), (DOCUMENTS, 19)], ids=str)
@shaped({"exchange_units": 4}, {"exchange_idle": True}, {"exchange_keep": True}, ALL)
def test_documents_and_windows(shape: Sizes, seen_by: Seen, options: Options) -> None:
    made = devices(*shape, seen_by=seen_by, **options)
    assert seen_by[1] == 3 or any(op.kind == Kind.ATTEND_HELP for d in made for op in d.program.ops)
    assert max(run_all(made)) < 1e-12


@pytest.mark.parametrize("seen_by", [(None, None), (DOCUMENTS, None), (DOCUMENTS, 19)], ids=str)
@shaped({}, {"exchange_units": 4, "exchange_idle": True}, ALL)
def test_slices_of_equal_work(shape: Sizes, seen_by: Seen, options: Options) -> None:
    """Units of long slices have more tokens, and slices are cut anew where documents begin elsewhere."""
    made = devices(*shape, seen_by=seen_by, keys_per_token=30.0, **options)
    assert len({*lengths_of(made[0].bounds(1))}) > 1
    assert "exchange_idle" not in options or any(op.kind == Kind.ATTEND_HELP for d in made for op in d.program.ops)
    assert max(run_all(made)) < 1e-12


@pytest.mark.parametrize("options", [{}, ALL], ids=str)
def test_chunks_of_unequal_layers(options: Options) -> None:
    """The layers that the smallest chunk has are exchanged; those after them attend alone."""
    assert max(run_all(devices(3, 6, 2, 2, alone=1, **options))) < 1e-12


def test_separate_pipelines() -> None:
    assert max(run_all(devices(2, 4, 1, 4, replicas=2, exchange_idle=True))) < 1e-12


def test_gradients_return_once() -> None:
    """With ``keep`` the gradient of a unit comes back from a helper once, with the last pass that uses it."""
    count = {}
    for keep in (False, True):
        returned: list[tuple[int, ...]] = []
        for device in devices(4, 16, 1, 2, exchange_keep=keep):
            open_: set[tuple[int, ...]] = set()
            for op in device.program.ops:
                if op.kind == Kind.ATTEND_GIVE_BACKWARD:
                    place = device.rank, op.peer, op.microbatch, op.chunk
                    now = [(*place, u) for a, b in device.exchange.returned[op] for u in range(a, b)]
                    open_ = open_.union((*place, u) for u in range(op.start, op.stop)).difference(now)
                    returned += now
                elif op.kind == Kind.BACKWARD:
                    # The owner's own backward of a slice needs its units' gradients.
                    assert not any(u // 2 >= op.slice for _, _, m, c, u in open_ if (m, c) == (op.microbatch, op.chunk))
            assert not open_
        count[keep] = len(returned), len(set(returned))
    assert count[True][0] == count[True][1] == count[False][1]
    assert 2 * count[True][0] < count[False][0]


def test_attention_for_no_pass_is_an_error() -> None:
    device = devices(2, 4, 1, 1)[0]
    give = next(op for op in device.program.ops if op.kind == Kind.ATTEND_GIVE)
    device.exchange.handle(give)
    with pytest.raises(ExchangeError, match="before its pass"):
        device.exchange.handle(replace(give, kind=Kind.ATTEND_MERGE))
    with pytest.raises(ExchangeError, match="is not for"), device.exchange.joint(replace(give, kind=Kind.BACKWARD)):
        pass
    with pytest.raises(ExchangeError, match="no pass"):
        device.exchange.finish()
