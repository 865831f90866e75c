"""The table of kinds: nothing can be left out, nothing falls through, kinds are not numbers."""

import copy
import operator
import pickle

import pytest
from schedule_helpers import drop_kinds, run

from megatron_het.features.context_exchange.kinds import EXCHANGE
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.kinds import PARAMETER_KINDS
from megatron_het.schedule import Kind, Program, Shape, add_transfers, generate, kinds
from megatron_het.schedule.ir import parse_op
from megatron_het.schedule.kinds import COMPUTE, TRANSFERS, Columns, executed_by

ROW = {column: getattr(Kind.OPTIMIZER_STEP, column) for column in Columns.__annotations__} | {"mnemonic": "XX"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"NEW": {**ROW, "extra": 1}}, "row 'XX' and the columns differ in extra"),
        ({"NEW": {k: v for k, v in ROW.items() if k != "colour"}}, "row 'XX' and the columns differ in colour"),
        ({"NEW": {**ROW, "other_end": "RECV_FORWARD"}}, "NEW and RECV_FORWARD are not each other's other end"),
        ({"NEW": {**ROW, "mnemonic": "OS"}}, "two kinds have one mnemonic"),
        ({"OPTIMIZER_STEP": ROW}, "there are two kinds OPTIMIZER_STEP"),
    ],
)
def test_a_row_that_lacks_something_is_refused(rows: dict[str, dict[str, object]], message: str) -> None:
    """There are no defaults, both ends of a transfer name each other, and text can be read back."""
    before = dict(Kind.rows)
    try:
        with pytest.raises(TypeError, match=message):
            kinds.add_kinds(rows)
    finally:
        drop_kinds(Kind.rows.keys() - before.keys())
    assert Kind.rows == before


def test_sets_grow_with_the_table() -> None:
    """A feature that is imported later has its kinds in the sets that others made, and takes them along."""
    updates = kinds.where(lambda kind: kind.effect.updates)
    assert updates == {Kind.OPTIMIZER_STEP}
    kinds.add_kinds({"NEW": ROW})
    try:
        assert updates == {Kind.OPTIMIZER_STEP, Kind.NEW} and parse_op("XX_.0.0").kind is Kind.NEW
    finally:
        drop_kinds({"NEW"})
    assert updates == {Kind.OPTIMIZER_STEP} and "NEW" not in Kind.rows
    with pytest.raises(AttributeError, match="no kind NEW"):
        _ = Kind.NEW


def test_a_kind_is_copied_and_pickled_by_name() -> None:
    """Its number depends on the features that are imported."""
    assert copy.deepcopy(Kind.VOCAB_FORWARD) is Kind.VOCAB_FORWARD
    assert pickle.loads(pickle.dumps(Kind.VOCAB_FORWARD)) is Kind.VOCAB_FORWARD


def test_kinds_have_no_order() -> None:
    for compare in (
        lambda: operator.lt(Kind.FORWARD, 3),
        lambda: operator.ge(Kind.KV_SEND, Kind.KV_RECV),
        lambda: max(tuple(Kind)),
    ):
        with pytest.raises(TypeError, match="have no order"):
            compare()


def test_sets_come_from_the_table() -> None:
    assert executed_by("compute") == {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT}
    assert executed_by("compute") | executed_by("zero_bubble") == COMPUTE
    assert executed_by("transfer") == TRANSFERS - EXCHANGE
    assert executed_by("window") == PARAMETER_KINDS
    assert executed_by("nobody") == frozenset()
    executors = {kind.executor for kind in Kind}
    assert set().union(*(executed_by(name) for name in executors if name)) == {k for k in Kind if k.executor}


def split(name: str, forward_only: bool = False, **shape: int) -> Program:
    """A complete program whose output layer and embeddings are split."""
    program = generate(name, Shape.uniform(2, 4, **shape), forward_only=forward_only)
    return add_transfers(add_embedding(add_vocabulary(program)))


def test_split_embeddings_cost_time() -> None:
    """Each device's own, a slice's share of it."""
    program = split("slimpipe", slices=4)
    free = run(program)
    result = run(program, embed_forward_s=(0.4, 0.8), embed_backward_s=(1.2, 1.6))
    seconds = {
        (event.device, event.op.kind): event.end_s - event.start_s
        for event in result.events()
        if event.op.kind in (Kind.EMBED_FORWARD, Kind.EMBED_BACKWARD)
    }
    assert seconds == pytest.approx(
        {
            (0, Kind.EMBED_FORWARD): 0.1,
            (1, Kind.EMBED_FORWARD): 0.2,
            (0, Kind.EMBED_BACKWARD): 0.3,
            (1, Kind.EMBED_BACKWARD): 0.4,
        }
    )
    added = [busy - before for busy, before in zip(result.compute_s, free.compute_s)]
    assert added == pytest.approx([4 * (0.4 + 1.2), 4 * (0.8 + 1.6)])
