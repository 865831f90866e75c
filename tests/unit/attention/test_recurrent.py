"""Recurrent layers over slices compute what Megatron's do over whole sequences, forward and backward."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_helpers import WAIT_S, InThread, Meeting
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch.utils.checkpoint import checkpoint

import testing.recurrent_layers as kernels
from megatron_het.attention.core import SliceParams
from megatron_het.attention.kv_pool import CacheError
from megatron_het.attention.places import take_blocks
from megatron_het.attention.recurrent import carry_states
from megatron_het.distributed.gradient_sums import mark_sharded
from megatron_het.features.initial_weights.runtime import InitialWeightsByName
from megatron_het.lowering.ranks import segments, stride_of
from megatron_het.plan import Cut
from megatron_het.plan.placement import part_tokens, token_blocks
from megatron_het.schedule.cutting import Starts
from testing.groups import Group

TOKENS, BATCH, HIDDEN = 24, 2, 16
LENGTHS = ((24,), (12, 12), (9, 1, 2, 12), (1, 1, 22))


class Linear(torch.nn.Linear):
    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, source: torch.Tensor) -> Any:
        return super().forward(source), None


CONFIG: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "normalization": "RMSNorm",
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_state_dim": 4,
}
KINDS = ("delta net", "Mamba")


def built(kind: str, tp: Group) -> Any:
    config = TransformerConfig(**CONFIG)
    config.activation_func = torch.nn.functional.silu
    groups: Any = SimpleNamespace(tp=tp, cp=Group())
    if kind == "Mamba":
        return MambaMixer(config, MambaMixerSubmodules(Linear, Linear), HIDDEN, pg_collection=groups)
    parts = GatedDeltaNetSubmodules(in_proj=Linear, out_norm=kernels.LocalNorm, out_proj=Linear)
    return GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)


@pytest.fixture(autouse=True)
def random_states() -> Iterator[None]:
    torch.manual_seed(3)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.reset()
    tracker.add("model-parallel-rng", 5)
    yield
    tracker.set_states(states)


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest, random_states: None) -> Any:
    return built(request.param, Group())


def over_slices(layer: Any, **params: Any) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    """The layer with states carried, called with a slice, its index and its first token.

    Args:
        layer: Of Megatron's.
        **params: More of its slices.
    """
    kind = "mixer" if isinstance(layer, MambaMixer) else "self_attention"
    chunk: Any = SimpleNamespace(
        hybrid_layer_pattern="", decoder=SimpleNamespace(layers=[SimpleNamespace(**{kind: layer})])
    )
    carry_states(chunk)

    def run(source: torch.Tensor, index: int, first: int) -> torch.Tensor:
        here = SliceParams.make(0, index, ((first, first + source.shape[0]),), TOKENS, **params)
        found: torch.Tensor = layer(source, None, packed_seq_params=here)[0]
        return found

    return run


def trained(layer: Any, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    generator, dtype = torch.Generator().manual_seed(1), next(layer.parameters()).dtype
    source = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).to(dtype)
    layer.zero_grad()
    out = run(source)
    out.backward(grad)
    found = [parameter.grad for parameter in layer.parameters()]
    assert source.grad is not None and all(gradient is not None for gradient in found)
    return [out.detach(), source.grad, *(gradient.clone() for gradient in found)]


def cut(run: Callable[..., torch.Tensor], lengths: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What runs slices of these lengths one after the other."""

    def sliced(source: torch.Tensor) -> torch.Tensor:
        firsts = itertools.accumulate(lengths, initial=0)
        parts = zip(source.split(list(lengths)), firsts, strict=False)
        return InReverse.apply(*(run(part, i, first) for i, (part, first) in enumerate(parts)))  # type: ignore[no-any-return]

    return sliced


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_slices_equal_the_whole(layer: Any, lengths: Sequence[int], recomputes: bool) -> None:
    """Slices shorter than what the convolution sees, too."""
    wanted = trained(layer, lambda source: layer(source, None)[0])
    run = over_slices(layer)
    if recomputes:
        run = functools.partial(checkpoint, run, use_reentrant=True)
    for ours, theirs in zip(trained(layer, cut(run, lengths)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    layer.slice_states.check_empty()


@pytest.mark.parametrize("lengths", LENGTHS[1:3])
def test_slices_lose_no_digits(layer: Any, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as near to double precision as the whole: state and its gradient are handed on as they are."""

    def whole(own: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda source: own(source, None)[0]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # Megatron computes rates in fp32
        wide = copy.deepcopy(layer).double()
        exact = trained(wide, whole(wide))
    single = trained(layer, whole(layer))
    for ours, theirs, wanted in zip(trained(layer, cut(over_slices(layer), lengths)), single, exact, strict=True):
        error, usual = ((found.double() - wanted).norm() / wanted.norm() for found in (ours, theirs))
        assert error <= 2 * usual + 1e-7


DOCUMENTS = (((0, 9, 10, 15), (0, 9, 10, 15)), ((0, 1, 11, 23), (0, 12)), ((0, 22), (0, 2, 12, 14)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("starts", DOCUMENTS)
def test_documents_equal_each_alone(layer: Any, lengths: Sequence[int], starts: Sequence[Starts]) -> None:
    """Documents that are shorter than what the convolution sees, and that begin with a slice, too."""

    def alone(source: torch.Tensor) -> torch.Tensor:
        found = []
        for i, own in enumerate(starts):
            parts = source[:, i : i + 1].split([b - a for a, b in itertools.pairwise((*own, TOKENS))])
            found.append(torch.cat([layer(part, None)[0] for part in parts]))
        return torch.cat(found, dim=1)

    wanted = trained(layer, alone)
    run = over_slices(layer, state_starts=tuple(starts))
    for ours, theirs in zip(trained(layer, cut(run, lengths)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    layer.slice_states.check_empty()


@pytest.mark.parametrize("starts", [None, DOCUMENTS[1]])
@pytest.mark.parametrize(
    ("shares", "lengths"), [((1, 1), (24,)), ((1, 1, 1), (6, 18)), ((1, 1, 1, 1), (24,)), ((2, 1), (12, 12))]
)
def test_ranks_share_heads(layer: Any, shares: tuple[int, ...], lengths: Sequence[int], starts: Any) -> None:
    """Each rank computes all tokens of a slice for its heads, of which several may share a group: 3 and 4 ranks."""
    meeting = Meeting(len(shares))

    def run_rank(rank: int) -> list[torch.Tensor]:
        own = copy.deepcopy(layer)
        tokens = [token_blocks(shares, length) for length in lengths]
        firsts = list(itertools.accumulate(lengths, initial=0))
        blocks = [[(a + x, a + y) for x, y in each[rank]] for a, each in zip(firsts, tokens, strict=False)]
        over_slices(own)
        own.slice_states.sharing = functools.partial(InThread, meeting, rank)

        def part(source: torch.Tensor) -> torch.Tensor:
            outs = []
            for i, here in enumerate(blocks):
                parts = tuple(map(part_tokens, tokens[i]))
                span = (firsts[i], firsts[i + 1])
                params = SliceParams.make(0, i, tuple(here), TOKENS, span=span, state_starts=starts, parts=parts)
                outs.append(own(take_blocks(source, tuple(here), dim=0), None, packed_seq_params=params)[0])
            return Placed.apply(source, blocks, *outs)  # type: ignore[no-any-return]

        return trained(own, part)

    with ThreadPoolExecutor(len(shares)) as pool:
        ranks = [pool.submit(run_rank, rank) for rank in range(len(shares))]
        found = [future.result(timeout=2 * WAIT_S) for future in ranks]
    run = over_slices(layer, state_starts=starts)
    wanted = trained(layer, lambda source: run(source, 0, 0))
    for i, expected in enumerate(wanted):
        torch.testing.assert_close(sum(each[i] for each in found), expected, rtol=1e-4, atol=1e-5)


class Placed(torch.autograd.Function):
    """Blocks of a rank's slices among zeros for all other tokens; their backward passes come in reverse."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, blocks: Any, *slices: torch.Tensor) -> torch.Tensor:
        ctx.blocks, found = blocks, torch.zeros_like(source)
        for here, part in zip(blocks, slices, strict=True):
            for (first, end), own in zip(here, part.split([b - a for a, b in here]), strict=True):
                found[first:end] = own
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *(take_blocks(grad, tuple(here), dim=0) for here in ctx.blocks)


class InReverse(torch.autograd.Function):
    """Slices one after the other; their backward passes come in reverse, as a schedule runs them."""

    @staticmethod
    def forward(ctx: Any, *slices: torch.Tensor) -> torch.Tensor:
        ctx.lengths = [len(part) for part in slices]
        return torch.cat(slices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad.split(ctx.lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_do_not_depend_on_tp(kind: str) -> None:
    """What no function of the configuration fills is drawn by name too: a rank has its part of one whole."""

    def drawn(tp: int, rank: int) -> dict[str, torch.nn.Parameter]:
        layer = built(kind, Group(tp, rank))
        model, holder = torch.nn.Module(), torch.nn.Module()
        chunk: Any = model
        chunk.hybrid_layer_pattern, chunk.config, chunk.decoder = "", layer.config, torch.nn.Module()
        holder.layer_number = 1  # type: ignore[assignment]
        setattr(holder, "mixer" if kind == "Mamba" else "self_attention", layer)
        chunk.decoder.layers = torch.nn.ModuleList([holder])
        mark_sharded([model])
        InitialWeightsByName(7, Cut(tp), rank, 0, 0, in_blocks=True).attach([model])
        return dict(layer.named_parameters())

    whole = drawn(1, 0)
    for rank in range(2):
        part = drawn(2, rank)
        for name in (
            "A_log",
            "dt_bias",
            *(("conv1d_weight", "conv1d_bias") if kind == "Mamba" else ("conv1d.weight",)),
        ):
            found = segments(len(whole[name]), 2, rank, stride_of(part[name]))
            wanted = torch.cat([whole[name][own.full : own.full + own.length] for own in found])
            assert torch.equal(part[name], wanted), name
    rates, steps = whole["A_log"].exp(), torch.nn.functional.softplus(whole["dt_bias"])
    assert (rates >= 0.99).all() and (rates <= 16.01).all() and len(set(rates.tolist())) == len(rates)
    assert kind != "Mamba" or ((steps > 0.0009).all() and (steps < 0.11).all())


def test_an_evaluation_is_dropped(layer: Any) -> None:
    run = over_slices(layer)
    with torch.no_grad():
        for index in range(2):
            run(torch.randn(12, BATCH, HIDDEN), index, 12 * index)
    with pytest.raises(CacheError, match="left at the end"):
        layer.slice_states.check_empty()
    assert len(layer.slice_states.tensors()) == 4
    layer.slice_states.drop(0)
    layer.slice_states.check_empty()


def test_slices_out_of_order_are_errors(layer: Any) -> None:
    run = over_slices(layer)
    with pytest.raises(CacheError, match="has left no state"):
        run(torch.randn(12, BATCH, HIDDEN), 1, 12)
    first, _ = (run(torch.randn(12, BATCH, HIDDEN).requires_grad_(), index, 12 * index) for index in range(2))
    with pytest.raises(CacheError, match="last first"):
        first.sum().backward()


def test_a_layer_outside_of_the_schedule_is_an_error(layer: Any) -> None:
    over_slices(layer)
    with pytest.raises(RuntimeError, match="outside of the schedule"):
        layer(torch.randn(12, BATCH, HIDDEN), None)
