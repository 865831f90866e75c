"""Cross entropy from split logits equals PyTorch's from whole ones."""

import pytest
import torch

from megatron_het.features.vocab_parallel.runtime import ShardLogits, log_sum_exp, merge, token_losses

TOKENS, BATCH, ROWS = 7, 2, 24


def _split(parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(parts)
    logits = (torch.randn(TOKENS, BATCH, ROWS) * 20).to(dtype)
    labels = torch.randint(ROWS, (TOKENS, BATCH))
    grad = torch.rand(TOKENS, BATCH) * (torch.rand(TOKENS, BATCH) > 0.3)  # some tokens do not count
    whole = logits.float().requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(TOKENS, BATCH)
    losses.backward(grad)
    assert whole.grad is not None
    rows = ROWS // parts
    shards = [ShardLogits(part.clone(), labels, i * rows) for i, part in enumerate(logits.split(rows, dim=-1))]
    statistics = merge([s.statistics for s in shards])
    gradients = [s.gradient(log_sum_exp(statistics), grad) for s in shards]
    return token_losses(statistics), torch.cat(gradients, dim=-1), losses.detach(), whole.grad


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_whole(parts: int, dtype: torch.dtype) -> None:
    found, gradient, expected, expected_gradient = _split(parts, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_merging_twice_is_merging_once() -> None:
    """TP ranks merge first, stages later."""
    torch.manual_seed(0)
    parts = [torch.rand(3, TOKENS, BATCH) for _ in range(4)]
    torch.testing.assert_close(merge([merge(parts[:2]), merge(parts[2:])]), merge(parts))


def test_fp32_logits_are_not_copied() -> None:
    logits = torch.randn(TOKENS, BATCH, ROWS)
    before = logits.clone()
    shard = ShardLogits(logits, torch.zeros(TOKENS, BATCH, dtype=torch.long), 0)
    assert shard.gradient(before.logsumexp(-1), torch.ones(TOKENS, BATCH)).data_ptr() == logits.data_ptr()
