"""Operations in which all devices of a microbatch meet: the parts of a split vocabulary.

A part sends messages to another stage and waits for messages of that stage, all inside one operation
(``features/vocab_parallel/output_layer.py``, ``embedding.py`` beside it).  NCCL runs the messages of two ranks one
after the other, and with one hardware queue per device everything that is launched behind them waits too.  So a part
neither begins nor ends alone: the parts of one slice, on all devices that its microbatch visits, are one event.

As long as that holds in the order in which transfers are placed (``passes/transfers.py``), all lists are
projections of one total order in which a meeting is one point, and the first event of that order that has not
happened can always happen.  The validator looks for what breaks this.
"""

from collections.abc import Sequence

from megatron_het.schedule.graph import Graph
from megatron_het.schedule.kinds import PARTS


def meetings(graph: Graph) -> list[list[int]]:
    """The nodes of every meeting, one per device that takes part."""
    if graph.kinds.isdisjoint(PARTS):
        return []
    found: dict[tuple[object, ...], list[int]] = {}
    for node, op in enumerate(graph.ops):
        if op.kind in PARTS:
            found.setdefault((op.kind, op.microbatch, op.slice), []).append(node)
    return list(found.values())


def waits_to_meet(graph: Graph) -> list[Sequence[int]]:
    """``graph.waits`` where a meeting begins when all devices have come to it."""
    waits = list(graph.waits)
    for nodes in meetings(graph):
        before = [node - 1 for node in nodes if node > graph.first[graph.device[node]]]
        for node in nodes:
            waits[node] = [*waits[node], *(other for other in before if other != node - 1)]
    return waits


def waits_to_leave(graph: Graph) -> list[Sequence[int]]:
    """``waits_to_meet`` where nobody goes on before all have met."""
    waits = waits_to_meet(graph)
    for nodes in meetings(graph):
        for node in nodes:
            if node + 1 < graph.first[graph.device[node] + 1]:
                waits[node + 1] = [*waits[node + 1], *(other for other in nodes if other != node)]
    return waits


__all__ = ["meetings", "waits_to_leave", "waits_to_meet"]
