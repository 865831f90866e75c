"""Which experts a rank holds, and what their parameters are called."""

from __future__ import annotations

import pytest

from megatron_het.lowering.ranks import expert_name, expert_segments, held_experts
from megatron_het.plan import Cut, Replica


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "cut", [Cut(1), Cut(2), Cut(2, 2), Cut(4, 2), Cut(4, 4), Cut(6, 3), Cut(1, 4), Cut(2, 2, 2)], ids=str
)
def test_ranks_hold_every_row_of_every_expert_once(cut: Cut, stride: int) -> None:
    experts, rows = 12, 24
    held = [
        (expert, row)
        for rank in range(cut.expert_ranks)
        for expert in range(experts)
        for part in expert_segments(rows, cut, rank, stride, expert, experts)
        for row in range(part.full, part.full + part.length)
    ]
    assert sorted(held) == [(expert, row) for expert in range(experts) for row in range(rows)]


def test_ranks_of_a_part_have_the_same_experts() -> None:
    cut = Replica(tuple(range(10, 18)), (0,), cp=2, ep=2).cut
    assert cut == Cut(4, 2)
    assert [list(held_experts(6, cut, t)) for t in range(4)] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (
            "layers.3.mlp.experts.local_experts.1.linear_fc2.weight",
            "layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
        ),
        ("layers.3.mlp.experts.linear_fc1.weight1", "layers.3.mlp.experts.linear_fc1.weight7"),
        ("layers.3.mlp.experts.linear_fc2.bias1", "layers.3.mlp.experts.linear_fc2.bias7"),
        ("layers.3.mlp.shared_experts.linear_fc1.weight", None),
        ("layers.3.mlp.router.weight", None),
        ("layers.3.mlp.linear_fc1.weight", None),
    ],
)
def test_names(name: str, other: str | None) -> None:
    found = expert_name(name)
    assert (found and (found.expert, found.of(7))) == (other and (1, other))
