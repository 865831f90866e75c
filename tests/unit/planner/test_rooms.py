"""The layers that are taken to fit into a stage's memory are those that its estimate has memory for."""

import pytest

from testing.planner_cases import estimator_of, search_cases
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.auto import search_auto
from tools.planner.search.balance import balance, layer_rooms
from tools.planner.search.outcome import Goal
from tools.planner.simulate.simulation import block_s

STAGES, LAYERS, MARGIN = 4, 160, 1


def estimator() -> Estimator:
    """GPUs that some ten of the model's layers fill."""
    model = Model(
        num_layers=LAYERS,
        hidden_size=1024,
        ffn_hidden_size=3072,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=2048,
        global_batch_size=64,
        precision="fp16",
        micro_batch_sizes=(1, 2),
    )
    node = NodeGroup(gpu="A100-40", count=16, gpus_per_node=4, network_bytes_per_s=12.5e9)
    return estimator_of(Cluster(nodes=(node,)), model)


def most_that_fit(found: Estimator, like: Candidate, widths: tuple[int, ...], s: int) -> int:
    """Layers of stage ``s`` beside a layer per chunk on the others, by the estimate."""

    def fits(layers: int) -> bool:
        counts = (layers if i == s else like.chunks for i in range(STAGES))
        stages = tuple(Stage(n, (Group(0, 1, width),)) for n, width in zip(counts, widths))
        estimate = found.estimate(like.with_(stages=stages))
        assert estimate is not None
        mine = next(m for m in estimate.memory if m.stage == s)
        return mine.total_bytes <= mine.capacity_bytes * found.memory_margin

    return max((n for n in range(like.chunks, LAYERS) if fits(n)), default=0)


@pytest.mark.parametrize(
    ("schedule", "chunks", "slices"),
    [
        ("1f1b", 1, 1),
        ("interleaved", 2, 1),
        ("interleaved", 6, 1),
        ("ministage", 4, 1),
        ("slimpipe", 1, 4),
        ("slimpipe", 1, 16),
    ],
)
@pytest.mark.parametrize("width", [1, 8])
def test_rooms_are_those_of_the_estimate(schedule: str, chunks: int, slices: int, width: int):
    """Of schedules where as many stages come later, however many replicas these have; to a layer."""
    found, group = estimator(), Group(0, 1, width)
    like = Candidate((), 2, "none", schedule=schedule, chunks=chunks, slices=slices, slack=0.0)
    for s in range(STAGES):
        rooms = layer_rooms(found, (group,), like, 32, s == 0, s == STAGES - 1, 0.0)
        assert rooms is not None
        wanted = most_that_fit(found, like, (width,) * STAGES, s)
        assert wanted > 1 or schedule == "ministage"
        room = rooms.cap((STAGES - 1 - s) * width, STAGES - 1 - s, STAGES)
        lacking = wanted - (room if room >= chunks else 0)
        # A rank under a parameter window has its peaks at different times, of which only the estimate knows.
        assert -MARGIN <= lacking <= (wanted / 4 if schedule == "ministage" else MARGIN), s


@pytest.mark.parametrize("widths", [(1, 8, 8, 8), (2, 4, 4, 4), (8, 1, 1, 1), (1, 2, 4, 8)])
def test_rooms_of_stages_of_unequal_width(widths: tuple[int, ...]):
    """Under slices a stage holds what later stages keep it from giving back, however wide they are."""
    found = estimator()
    like = Candidate((), 2, "none", schedule="slimpipe", slices=4, slack=0.0)
    first = layer_rooms(found, (Group(0, 1, widths[0]),), like, 32, True, False, 0.0)
    assert first is not None
    cap = first.cap(sum(widths[1:]), STAGES - 1, STAGES)
    assert abs(cap - most_that_fit(found, like, widths, 0)) <= MARGIN


def test_slices_of_wide_stages_are_balanced_by_speed():
    """32 replicas were taken for 32 stages, so that the first stages got a layer each and the last one the rest."""
    found = search_cases()["OPT-350, 32 A100-40 + 96 V100-16"]
    slow, fast = Group(1, 1, 32), Group(0, 1, 32)
    like = Candidate((), 2, schedule="slimpipe", slices=8)
    known = balance(found, ((slow,), (slow,), (slow,), (fast,)), like)
    assert known is not None and [s.layers for s in known.stages] == [4, 4, 4, 12]
    estimate = found.estimate(known)
    assert estimate is not None and found.fits(estimate)
    best = search_auto(found, Goal()).best
    assert best is not None and best.iteration_s <= block_s(found, known, estimate) * (1 + 1e-9)
