"""The transport between stages is chosen by the validator, with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_het.lowering.programs import choose_transport
from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import RECEIVES, Program, Shape
from megatron_het.schedule.transfers import add_transfers


def good() -> Program:
    return add_transfers(generate("ministage", Shape.uniform(3, 4, chunks=2)))


def with_a_cycle() -> Program:
    """Every device posts its first receive only after everything else."""
    program = good()
    late = []
    for ops in program.ops:
        first = next(op for op in ops if op.kind in RECEIVES)
        late.append((*(op for op in ops if op is not first), first))
    return replace(program, ops=tuple(late))


def test_nccl_where_no_cycle_is_possible_and_staged_elsewhere() -> None:
    chosen = choose_transport("auto", "nccl", True, [good()])
    assert (chosen.transport, chosen.reason) == ("nccl", "no cycle of transfers is possible")
    chosen = choose_transport("auto", "nccl", True, [good(), with_a_cycle()])
    assert chosen.transport == "staged" and "may form a cycle" in chosen.reason


def test_hosts_use_gloo_and_other_backends_are_staged() -> None:
    assert choose_transport("auto", "gloo", False, [good()]).transport == "gloo"
    assert choose_transport("auto", "gloo", True, [good()]).transport == "staged"


def test_what_was_asked_for_is_taken_unless_it_cannot_work() -> None:
    assert str(choose_transport("staged", "nccl", True, [good()])) == "staged (as asked for)"
    with pytest.raises(ValueError, match="needs CUDA"):
        choose_transport("nccl", "gloo", False, [])
    with pytest.raises(ValueError, match="host tensors only"):
        choose_transport("gloo", "nccl", True, [])
