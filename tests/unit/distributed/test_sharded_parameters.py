"""What the exchange between TP classes takes a parameter for."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_het.distributed.gradient_sums import mark_sharded
from megatron_het.distributed.resharding import CopiesCheck, sharded_parameters, with_all_experts
from megatron_het.plan import Cut


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_norms_hold_partial_gradients(sequence_parallel: bool, qk_layernorm: bool) -> None:
    """The norms of a layer under sequence parallelism; those of heads wherever there are some."""
    of_layer, of_heads, weight = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    of_layer.sequence_parallel = True  # type: ignore[attr-defined]
    weight.tensor_model_parallel, weight.partition_dim = True, 0  # type: ignore[attr-defined]
    named = [
        ("decoder.layers.0.input_layernorm.weight", of_layer),
        ("decoder.layers.0.self_attention.q_layernorm.weight", of_heads),
        ("decoder.layers.0.self_attention.linear_qkv.weight", weight),
    ]
    found = sharded_parameters(iter(named), lambda p: p.data, Cut(2), sequence_parallel, qk_layernorm)
    assert [p.partial for p in found] == [sequence_parallel, qk_layernorm, False]
    assert [p.dim for p in found] == [-1, -1, 0]
    assert [p.full for p in found] == [0, 0, 8]


@pytest.mark.parametrize("gated", [False, True])
def test_gated_experts_are_cut_in_two_halves(gated: bool) -> None:
    """Transformer Engine's experts say that they are cut in one piece, with one weight for each expert."""
    model = torch.nn.Module()
    model.config = SimpleNamespace(gated_linear_unit=gated)  # type: ignore[assignment]
    for path in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1"):
        layer = torch.nn.Module()
        layer.weight0 = torch.nn.Parameter(torch.zeros(4))
        layer.weight0.tensor_model_parallel, layer.weight0.partition_stride = True, 1  # type: ignore[attr-defined]
        holder = model
        *parents, last = path.split(".")
        for name in parents:
            if not hasattr(holder, name):
                holder.add_module(name, torch.nn.Module())
            holder = getattr(holder, name)
        holder.add_module(last, layer)
    mark_sharded([model])
    found = {name: p.partition_stride for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert found == {
        "mlp.experts.linear_fc1.weight0": 2 if gated else 1,
        "mlp.experts.linear_fc2.weight0": 1,
        "mlp.shared_experts.linear_fc1.weight0": 1,
    }


EXPERTS = 4
CUTS = (Cut(1), Cut(2), Cut(2, 2), Cut(4), Cut(4, 2), Cut(4, 4))


def layer_of_experts(cut: Cut, grouped: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A rank's parameters of a router and its experts, one module each or all in one."""
    yield "decoder.layers.0.mlp.router.weight", torch.nn.Parameter(torch.zeros(EXPERTS, 2))
    kinds = (("linear_fc1", 0, (16 // cut.expert_tp, 2)), ("linear_fc2", 1, (2, 8 // cut.expert_tp)))
    mine = range(EXPERTS // cut.ep)
    order = [(e, k) for k in kinds for e in mine] if grouped else [(e, k) for e in mine for k in kinds]
    for expert, (name, dim, shape) in order:
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.tensor_model_parallel, weight.partition_dim = True, dim  # type: ignore[attr-defined]
        own = f"{name}.weight{expert}" if grouped else f"local_experts.{expert}.{name}.weight"
        yield f"decoder.layers.0.mlp.experts.{own}", weight
    yield "decoder.layers.1.input_layernorm.weight", torch.nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_all_ranks_list_all_experts_alike(cut: Cut, grouped: bool) -> None:
    """A message without headers needs one order and the sizes of whole parameters; every rank has its own experts."""
    whole = sharded_parameters(layer_of_experts(Cut(1), grouped), lambda p: p.data, Cut(1), True, False)
    expected = with_all_experts(whole, Cut(1), 0)
    assert sorted(p.name for p in expected) == sorted(p.name for p in whole)
    held: dict[str, int] = dict.fromkeys((p.name for p in expected), 0)
    for rank in range(cut.tp):
        local = sharded_parameters(layer_of_experts(cut, grouped), lambda p: p.data, cut, True, False)
        found = with_all_experts(local, cut, rank)
        assert [(p.name, p.dim, p.full, p.expert, p.full_bytes) for p in found] == [
            (p.name, p.dim, p.full, p.expert, p.full_bytes) for p in expected
        ]
        for parameter in found:
            held[parameter.name] += parameter.tensor.numel()
    experts = {p.name: p.tensor.numel() for p in expected if p.expert is not None}
    assert {name: held[name] for name in experts} == experts


def test_an_expert_keeps_its_own_tensor() -> None:
    cut = Cut(2, 2)
    local = dict(layer_of_experts(cut, False))
    found = with_all_experts(
        sharded_parameters(iter(local.items()), lambda p: p.data, cut, True, False), cut, tp_rank=1
    )
    by_name = {p.name: p.tensor for p in found}
    for expert in range(2):
        name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
        assert by_name[name.format(expert)].numel() == 0
        assert by_name[name.format(2 + expert)].data_ptr() == local[name.format(expert)].data_ptr()


def test_copies_of_one_weight_must_have_one_gradient() -> None:
    """Compared at the first update, where this rank has parts of both."""
    gradient = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    check = CopiesCheck(2)
    check.see(0, gradient[:3])
    check.see(1, gradient[1:])
    check.see(0, gradient + 1.0)  # the next update is not looked at
    alone = CopiesCheck(1)
    alone.see(0, gradient)
    alone.see(0, gradient + 1.0)
    check = CopiesCheck(2)
    check.see(0, gradient)
    with pytest.raises(RuntimeError, match="copies of the tied embedding.*different gradients.* 1 of 3 elements"):
        check.see(1, torch.tensor([float("nan"), 3.0, 5.0]))
