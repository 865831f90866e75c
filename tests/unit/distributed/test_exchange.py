"""The exchange between classes of replicas, with threads for ranks: whatever the cut, one total is counted once."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.distributed import resharding
from megatron_het.distributed.resharding import ReplicaClass, ShardedParameter, ShardExchange
from megatron_het.lowering.ranks import segments
from megatron_het.plan import Cut

WAIT_S = 20.0
REPLICAS = (((0, 1), (2, 3)), ((4,), (5,)))  # ranks of the replicas of two classes, of TP 2 and TP 1
FULL = 8


class Group:
    """Ranks that meet; what each of them brings is seen by all."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(len(ranks), timeout=WAIT_S)
        self._brought: dict[int, torch.Tensor] = {}

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(Ranks.here.rank)

    def meet(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.nbytes <= resharding._BUCKET_BYTES  # also of a part of a large parameter
        self._brought[Ranks.here.rank] = tensor.clone()
        self._barrier.wait()
        found = [self._brought[rank] for rank in self.ranks]
        self._barrier.wait()
        return found


class Ranks:
    """What the exchange calls of ``torch.distributed``."""

    here = threading.local()
    isend, irecv = "isend", "irecv"

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def get_global_rank(self, group: Group, index: int) -> int:
        return group.ranks[index]

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> None:
        tensor.copy_(sum(group.meet(tensor)))  # type: ignore[arg-type]

    def reduce(self, tensor: torch.Tensor, target: int, group: Group) -> None:
        total = sum(group.meet(tensor))
        # The others are left with something that means nothing.
        tensor.copy_(total if target == self.here.rank else tensor * 0.5 + 1.0)  # type: ignore[arg-type]

    def broadcast(self, tensor: torch.Tensor, source: int, group: Group) -> None:
        tensor.copy_(group.meet(tensor)[group.ranks.index(source)])

    def P2POp(self, kind: str, tensor: torch.Tensor, peer: int, group: Group) -> tuple[str, torch.Tensor, int]:
        assert tensor.nbytes <= resharding._BUCKET_BYTES
        return kind, tensor, peer

    def batch_isend_irecv(self, operations: list[tuple[str, torch.Tensor, int]]) -> list[Any]:
        me = self.here.rank
        for kind, tensor, peer in operations:
            if kind == self.isend:
                self._edge(me, peer).put(tensor.clone())
        for kind, tensor, peer in operations:
            if kind == self.irecv:
                tensor.copy_(self._edge(peer, me).get(timeout=WAIT_S))
        return [SimpleNamespace(wait=lambda: None)]

    def _edge(self, source: int, target: int) -> queue.Queue[torch.Tensor]:
        with self._lock:
            return self._sent.setdefault((source, target), queue.Queue())


class Stage:
    """Two classes of two replicas each: ``full[class][replica][tp rank][name]`` is what a rank computed, uncut."""

    def __init__(self) -> None:
        leaders = Group((0, 1, 4))
        groups = [Group((0, 2)), Group((1, 3)), Group((4, 5))]
        tps = [Group(ranks) for replicas in REPLICAS for ranks in replicas]
        classes = [ReplicaClass(Cut(2), (0, 1)), ReplicaClass(Cut(1), (4,))]
        self.places = {
            rank: (c, q, t)
            for c, replicas in enumerate(REPLICAS)
            for q, ranks in enumerate(replicas)
            for t, rank in enumerate(ranks)
        }
        generator = torch.Generator().manual_seed(5)
        self.parameters: dict[int, list[ShardedParameter]] = {}
        self.full: dict[str, torch.Tensor] = {}
        self.exchanges: dict[int, Any] = {}
        wholes = {
            place[:2]: torch.randint(-9, 9, (4, FULL, 4), generator=generator).double()
            for place in self.places.values()
        }
        partial = {rank: torch.randint(-9, 9, (5,), generator=generator).double() for rank in self.places}
        for name, index in (("columns", 0), ("gated", 1), ("rows", 2), ("copied", 3)):
            self.full[name] = sum(whole[index] for whole in wholes.values())  # type: ignore[assignment]
        self.full["partial"] = sum(partial.values())  # type: ignore[assignment]
        for rank, (c, q, t) in self.places.items():
            mine = wholes[c, q]
            self.parameters[rank] = [
                ShardedParameter("columns", self.cut(mine[0], c, t, 0), 0, 1, FULL),
                ShardedParameter("copied", mine[3].clone(), -1, 1),
                ShardedParameter("gated", self.cut(mine[1], c, t, 0, 2), 0, 2, FULL),
                ShardedParameter("partial", partial[rank].clone(), -1, 1, partial=c == 0),
                ShardedParameter("rows", self.cut(mine[2].t().contiguous(), c, t, 1), 1, 1, FULL),
            ]
            of_class = next(group for group in groups if rank in group.ranks)
            of_tp = next(group for group in tps if rank in group.ranks)
            Ranks.here.rank = rank
            given: Any = (of_class, of_tp, leaders if rank in leaders.ranks else None)
            self.exchanges[rank] = ShardExchange(classes, c, t, *given)

    @staticmethod
    def cut(whole: torch.Tensor, c: int, t: int, dim: int, stride: int = 1) -> torch.Tensor:
        """What TP rank ``t`` of a class holds of a whole tensor."""
        found = segments(FULL, (2, 1)[c], t, stride)
        return torch.cat([whole.narrow(dim, part.full, part.length) for part in found], dim).clone()

    def on_all(self, step: Callable[[ShardExchange, list[ShardedParameter]], object]) -> None:
        def one(rank: int) -> None:
            Ranks.here.rank = rank
            step(self.exchanges[rank], self.parameters[rank])

        with ThreadPoolExecutor(len(self.places)) as pool:
            for done in [pool.submit(one, rank) for rank in self.places]:
                done.result(timeout=WAIT_S)

    def tensors(self) -> Iterator[tuple[int, ShardedParameter, torch.Tensor]]:
        """Rank, parameter, and what the sum over all replicas is for it."""
        for rank, (c, _, t) in self.places.items():
            for p in self.parameters[rank]:
                whole = self.full[p.name] if p.dim < 1 else self.full[p.name].t()
                yield rank, p, whole if p.dim < 0 else self.cut(whole, c, t, p.dim, p.stride)

    def reduce_in_classes(self) -> None:
        """What Megatron does: sums over the members of a class, then summands over TP ranks."""
        for replicas in REPLICAS:
            for members in zip(*replicas, strict=True):
                for same in zip(*(self.parameters[rank] for rank in members), strict=True):
                    total = sum(p.tensor for p in same)
                    for p in same:
                        p.tensor.copy_(total)  # type: ignore[arg-type]
            for ranks in replicas:
                for same in zip(*(self.parameters[rank] for rank in ranks), strict=True):
                    if same[0].partial:
                        total = sum(p.tensor for p in same)
                        for p in same:
                            p.tensor.copy_(total)  # type: ignore[arg-type]


@pytest.fixture(params=[600, 64], ids=["several messages", "parts of parameters"])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(resharding, "dist", Ranks())
    monkeypatch.setattr(resharding, "_BUCKET_BYTES", request.param)
    return Stage()


def assert_summed(stage: Stage) -> None:
    for rank, parameter, expected in stage.tensors():
        assert torch.equal(parameter.tensor, expected), (rank, parameter.name)


def test_what_is_reduced_afterwards_is_the_sum_over_all_replicas(stage: Stage) -> None:
    stage.on_all(lambda exchange, parameters: exchange.sum_gradients(parameters))
    stage.reduce_in_classes()
    assert_summed(stage)


def test_what_was_reduced_before_is_summed_over_classes(stage: Stage) -> None:
    stage.reduce_in_classes()
    stage.on_all(lambda exchange, parameters: exchange.sum_reduced(parameters))
    assert_summed(stage)


def test_shards_of_what_was_reduced_are_gathered_and_summed(stage: Stage) -> None:
    """The distributed optimizer leaves each member a part of the class's sum, and what it had in the rest."""
    stage.reduce_in_classes()
    spans = {}
    for rank, parameters in stage.parameters.items():
        replica = stage.places[rank][1]
        for p in parameters:
            half = p.tensor.numel() // 2
            spans[id(p)] = start, stop = (0, half) if replica == 0 else (half, p.tensor.numel())
            flat = p.tensor.view(-1)
            flat[:start] = flat[stop:] = 77.0

    def step(exchange: ShardExchange, parameters: list[ShardedParameter]) -> None:
        exchange.gather_reduced(parameters, [spans[id(p)] for p in parameters])
        exchange.sum_reduced(parameters)

    stage.on_all(step)
    assert_summed(stage)


def test_parts_that_add_up_to_a_class_are_summed(stage: Stage) -> None:
    for parameters in stage.parameters.values():
        for i, p in enumerate(parameters):
            if p.partial:  # the window sums these over TP ranks before
                parameters[i] = ShardedParameter(p.name, p.tensor, -1, 1)
    for ranks in REPLICAS[0]:
        summands = [stage.parameters[rank][3].tensor for rank in ranks]
        total = sum(summands)
        for tensor in summands:
            tensor.copy_(total)  # type: ignore[arg-type]
    stage.on_all(lambda exchange, parameters: exchange.sum_parts(parameters))
    assert_summed(stage)


def test_weights_become_those_of_the_first_class(stage: Stage) -> None:
    for rank, parameter, expected in stage.tensors():
        parameter.tensor.copy_(expected if stage.places[rank][0] == 0 else torch.zeros_like(expected))
    stage.on_all(lambda exchange, parameters: exchange.copy_weights(parameters))
    assert_summed(stage)
