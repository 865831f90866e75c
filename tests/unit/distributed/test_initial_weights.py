"""When the replicas of a plan get equal weights: Megatron moves a model to its device between two hooks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_het.device import activate

PLATFORM = activate()  # before Megatron is imported, which binds what the platform replaces

from megatron_het.distributed import PairGroups, PlanGroups  # noqa: E402
from megatron_het.distributed.gradient_sums import GradientFinalizer  # noqa: E402
from megatron_het.distributed.resharding import ShardedParameter, ShardExchange  # noqa: E402
from megatron_het.plan import Placement, Plan, Replica, Stage  # noqa: E402
from megatron_het.plan.run_config import HetConfig  # noqa: E402
from megatron_het.runtime.session import HetSession  # noqa: E402
from testing.fp8_weights import quantised  # noqa: E402
from testing.groups import Group  # noqa: E402
from tests.unit.plan.test_plan import document, read  # noqa: E402


class Model(torch.nn.Module):
    """One chunk with a norm and an embedding, on ``meta`` until it is moved to its device."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, qk_layernorm=False)
        self.norm = torch.nn.LayerNorm(4, device="meta")
        self.embedding = torch.nn.Embedding(8, 4, device="meta")
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()

    pre_process = post_process = True

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.embedding.weight


def plan(tied: bool) -> Plan:
    body = document()
    body["model"]["tied_embeddings"] = tied
    return read(body)


@pytest.mark.parametrize(("rank", "tied", "count"), [(0, False, 0), (0, True, 1), (4, False, 3), (4, True, 3)])
def test_weights_are_copied_on_the_device(rank: int, tied: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is of the first stage, rank 4 of a stage of mixed TP."""
    copied: list[str] = []
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(overlap_grad_reduce=False))

    def copy_weights(_exchange: ShardExchange, parameters: list[ShardedParameter]) -> None:
        copied.extend(p.tensor.device.type for p in parameters)

    monkeypatch.setattr(ShardExchange, "copy_weights", copy_weights)
    session = HetSession(HetConfig(plan(tied)), PLATFORM)
    roles = {role: Group() for role in ("tp", "class", "stage", "leaders", "ends")}
    session._groups = PlanGroups(session.placement, rank, "gloo", Group(), PairGroups(rank, 1.0), roles)  # type: ignore[arg-type]
    session._num_chunks = 1
    session._finalizer = GradientFinalizer(session.groups, session.tied_copies)
    layers: Any = SimpleNamespace(hidden_dropout=0.0, add_bias_linear=False)
    config: Any = SimpleNamespace(transformer=layers, pre_wrap_hooks=[], post_wrap_hooks=[])
    session.prepare_model_config(config)
    assert layers.bias_dropout_fusion is False, "residuals alone"
    models = [Model()]
    for hook in config.pre_wrap_hooks:
        models = hook(models)
    models = [model.to_empty(device="cpu") for model in models]
    for hook in config.post_wrap_hooks:
        models = hook(models)
    assert len(models) == 1
    assert copied == ["cpu"] * count


@pytest.mark.parametrize(("device", "is_copied"), [("H100", True), ("A100", False)])
def test_replicas_of_one_tp_on_different_devices_get_the_weights_of_the_first(
    device: str, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU draws for a large tensor depends on the number of its multiprocessors."""
    sent: list[int] = []
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 7)

    def broadcast(tensor: torch.Tensor, source: int, group: Group) -> None:
        assert type(tensor) is torch.Tensor, "values before quantisation"
        sent.append(source)
        tensor.fill_(0.5)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    replicas = (Replica((0,), (0, 1), device="A100"), Replica((1,), (2, 3), device=device))
    alone = replace(plan(False), stages=(Stage((4,), replicas),))
    roles = {role: Group() for role in ("tp", "class", "stage")}
    groups = PlanGroups(Placement(alone), 0, "gloo", Group(), PairGroups(0, 1.0), roles)  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 2)
    model.weight = weight = quantised(model.weight)
    monkeypatch.setattr(GradientFinalizer, "_exchanges", lambda *_: iter(()))
    GradientFinalizer(groups, False).copy_initial_weights([model])
    assert sent == [7, 7] * is_copied
    assert [bool((tensor == 0.5).all()) for tensor in (weight.get_high_precision_init_val(), weight)] == [is_copied] * 2


@pytest.mark.parametrize(("rank", "counts"), [(0, True), (1, False), (2, True), (3, False)])
def test_tokens_count_on_the_first_tp_rank_of_each_replica_of_the_last_stage(
    rank: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a replica know the same tokens, which the division by the whole number counts once."""
    given: list[int] = []
    monkeypatch.setattr("megatron.core.distributed.finalize_model_grads", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda total: given.append(int(total)))
    alone = replace(plan(False), stages=(Stage((4,), (Replica((0, 1), (0, 1)), Replica((2, 3), (2, 3)))),))
    roles = {role: Group() for role in ("tp", "class", "stage")}
    groups = PlanGroups(Placement(alone), rank, "gloo", Group(), PairGroups(rank, 1.0), roles)  # type: ignore[arg-type]
    monkeypatch.setattr(GradientFinalizer, "_sum_across_classes", lambda *_: None)
    GradientFinalizer(groups, False)([], torch.tensor(12))
    assert given == [12 * counts]
