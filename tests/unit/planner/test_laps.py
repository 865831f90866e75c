"""The closed form of ministages against the simulator."""

import pytest

from testing.planner_cases import estimator_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.schedules.ministage import laps_s
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.simulate.simulation import simulate_block


def test_a_lap_is_the_slowest_stage_or_the_way_around():
    """Two ministages of two stages, four microbatches of 1 s; then one microbatch, which goes round and round."""
    assert laps_s([[1.0, 1.0]] * 2, [[4.0, 4.0]] * 2, [0.0], 0.0) == 4 + 4 + 1
    assert laps_s([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2, [0.5], 0.0) == (2 + 1) + 2 + 0.5
    assert laps_s([[1.0, 1.0]] * 2, [[4.0, 4.0]] * 2, [0.0], 9.0) == 1 + 4 + 9
    assert laps_s([[1.0, 2.0]], [[4.0, 8.0]], [], 0.0) == 12


@pytest.mark.parametrize(
    ("layers", "chunks", "batch", "rate"),
    [((8, 8, 8), 4, 24, 25e9), ((10, 8, 6), 4, 24, 25e9), ((7, 7, 10), 5, 6, 25e9), ((10, 4, 10), 4, 2, 25e9)],
)
def test_the_closed_form_of_ministages(layers, chunks, batch, rate):
    """Equal and unequal stages, ministages of unequal layers, fewer microbatches than stages."""
    nodes = (NodeGroup(gpu="A100-80", count=3, gpus_per_node=8, network_bytes_per_s=rate),)
    model = Model(
        num_layers=24,
        hidden_size=4096,
        ffn_hidden_size=16384,
        num_attention_heads=32,
        vocab_size=32000,
        seq_length=2048,
        global_batch_size=2 * batch,
        precision="bf16",
        distributed_optimizer=True,
        micro_batch_sizes=(1,),
        recompute=("full",),
    )
    estimator = estimator_of(Cluster(nodes=nodes), model)
    stages = tuple(Stage(n, (Group(0, 2, 2),)) for n in layers)
    candidate = Candidate(stages, 1, "full", "ministage", chunks, zero_stage=1)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    assert simulate_block(estimator, candidate, estimate).iteration_s == pytest.approx(estimate.iteration_s, rel=0.06)
