"""The split output layer on its owner and a helper, in one process."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.features.vocab_parallel import runtime as team
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import ModelShape, Placement, Plan, Replica, Stage, TrainingShape
from megatron_het.report import Timeline
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import Call, Iteration
from megatron_het.schedule.ir import Kind

TOKENS, BATCH, HIDDEN, ROWS = 6, 1, 8, 10
MAIL: dict[tuple[int, int], deque[torch.Tensor]] = {}


class Letters:
    """Channels within the process: a receive is filled when it is waited for."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def send(self, tensor: torch.Tensor, dst: int, _label: str) -> None:
        MAIL.setdefault((self._rank, dst), deque()).append(tensor.detach().clone())

    def receive(self, target: torch.Tensor, src: int, _label: str) -> tuple[torch.Tensor, int]:
        return target, src

    def wait_receive(self, pending: tuple[torch.Tensor, int]) -> None:
        target, src = pending
        sent = MAIL[src, self._rank].popleft()
        assert (sent.dtype, sent.shape) == (target.dtype, target.shape)
        target.copy_(sent)


class Layer(torch.nn.Module):
    """Half of the output layer's rows, as Megatron's layer multiplies: only equal types."""

    def __init__(self, rows: torch.Tensor, first: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else torch.nn.Parameter(rows)
        self.shard, self.sequence_parallel = SimpleNamespace(first=first), False

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight if weight is None else weight)


def made(rank: int, rows: torch.Tensor, tied: bool) -> team.SplitVocabulary:
    stages = (Stage((1,), (Replica((0,), (0,)),)), Stage((1,), (Replica((1,), (0,)),)))
    placement = Placement(Plan(ModelShape(2, HIDDEN, 1, 1, TOKENS), TrainingShape(1, 1), stages))
    alone: Any = SimpleNamespace(size=lambda: 1)
    context: Any = SimpleNamespace(
        placement=placement,
        rank=rank,
        groups={"tp": alone},
        timeline=Timeline(),
        batches=Batches(),
        boundaries=SimpleNamespace(tokens=TOKENS),
        lowered={False: SimpleNamespace(backwards=[()])},
        has_loss=rank == 1,
        new_channels=lambda *_: Letters(rank),
    )
    found = team.SplitVocabulary(context)
    found._layer = Layer(rows, rank * ROWS, tied)  # type: ignore[assignment]
    found._tied_weight = torch.nn.Parameter(rows) if tied else None
    return found


def fp32_residuals() -> Call:
    """A call under ``--bf16 --fp32-residual-connection``: stages exchange hidden states in fp32."""
    absent = dict.fromkeys(("timers", "grad_scale_func", "num_moe_experts", "mtp_num_layers"))
    config: Any = SimpleNamespace(cross_entropy_loss_fusion=False, calculate_per_token_loss=True, **absent)
    device, sizes = torch.device("cpu"), (TOKENS, HIDDEN, lambda microbatch: BATCH, SimpleNamespace())
    models = [torch.nn.Identity()]
    return Call(None, [None], models, config, 1, *sizes, torch.float32, device, False, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_computes_in_the_weights_type(tied: bool, hidden_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    MAIL.clear()
    torch.manual_seed(0)
    weight = torch.randn(2 * ROWS, HIDDEN).bfloat16()
    hidden = torch.randn(TOKENS, BATCH, HIDDEN).to(hidden_dtype)
    labels = torch.randint(2 * ROWS, (BATCH, TOKENS))
    helper, owner = (made(rank, rows.clone(), tied) for rank, rows in enumerate(weight.split(ROWS)))
    losses: list[torch.Tensor] = []
    monkeypatch.setattr(
        owner, "_run_loss", lambda _work, found, *_: (losses.append(found.detach()), found.sum().backward())
    )
    call, state = fp32_residuals(), Iteration()
    forward, backward = (RankOp(kind, 0, 0, 0, kind.name) for kind in (Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD))
    owner._labels, owner._loss_func = labels, lambda: None
    owner._put(forward, hidden)
    for op, handler in ((forward, "_forward"), (backward, "_backward")):
        for part in (owner, helper):
            getattr(part, handler)(op, call, state)
    found = owner._hidden_gradient(backward)
    assert found.dtype == hidden_dtype and not any(MAIL.values())

    whole = hidden.detach().bfloat16().float().requires_grad_()
    logits = torch.nn.functional.linear(whole, weight.float())
    expected = torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses[0][0], expected.detach(), rtol=1e-2, atol=3e-2)
    torch.testing.assert_close(found.float(), whole.grad, rtol=3e-2, atol=3e-2)
