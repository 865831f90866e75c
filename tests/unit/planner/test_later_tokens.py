"""Layers for multi-token prediction in the cost model: whole sequences, slices and a parameter window."""

import pytest

from megatron_het.features.plan_checks import check_plan_alone
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layercost import CatalogCosts
from tools.planner.costs.schedules import SCHEDULES
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.simulate.simulation import simulate_candidate


@pytest.mark.parametrize("tied", [False, True])
def test_later_tokens_are_priced_on_the_last_stage(tied):
    """As a layer more there at least, the output layer again, and a second table where there is none yet."""
    sizes = {"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}
    more = {"vocab_size": 32000, "seq_length": 4096, "global_batch_size": 16, "tied_embeddings": tied}
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-80", count=2, gpus_per_node=1, network_bytes_per_s=25e9),))

    def priced(later, layers=4):
        model = Model(**sizes, **more, mtp_num_layers=later)
        estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]), memory_margin=99)
        candidate = Candidate((Stage(8 - layers, (Group(0, 1, 1),)), Stage(layers, (Group(0, 1, 1),))), 1)
        return estimator.estimate(candidate)

    plain, deeper, later = priced(0), priced(0, 5), priced(1)
    assert later.stage_busy_s[0] == plain.stage_busy_s[0] and later.memory[0] == plain.memory[0]
    layer_s = deeper.stage_busy_s[1] - plain.stage_busy_s[1]
    assert layer_s < later.stage_busy_s[1] - plain.stage_busy_s[1] < 3 * layer_s
    table = 0 if tied else 32000 * 4096
    layer = 4096 * 4096 * 4 + 3 * 4096 * 11008 + 2 * 4096
    weights = layer + 2 * 4096**2 + 3 * 4096 + table
    assert later.memory[1].parameter_bytes - plain.memory[1].parameter_bytes == pytest.approx(2 * weights, rel=0.01)
    assert later.memory[1].activation_bytes > deeper.memory[1].activation_bytes > plain.memory[1].activation_bytes


def test_later_tokens_in_slices_are_priced():
    """As with whole sequences the last stage has more to do, and the plan is one that runs."""
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-80", count=2, gpus_per_node=1, network_bytes_per_s=25e9),))
    sizes = {"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}
    more = {"vocab_size": 32000, "seq_length": 8192, "global_batch_size": 8}
    stage = Stage(4, (Group(0, 1, 1),))
    candidate = Candidate((stage, stage), 1, schedule="slimpipe", slices=4)
    found = []
    for later in (0, 1):
        model = Model(**sizes, **more, mtp_num_layers=later)
        estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]), memory_margin=99)
        assert SCHEDULES["slimpipe"].runs(estimator, candidate)
        estimate = estimator.estimate(candidate)
        plan = build_plan(estimator, candidate, estimate)
        check_plan_alone(plan)
        seconds = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
        found.append((seconds, estimate.memory[0].total_bytes, estimate.memory[1].total_bytes))
    (plain_s, *plain), (later_s, *later) = found
    assert later_s > 1.1 * plain_s and later[0] == plain[0] and later[1] > 1.1 * plain[1]


def test_later_tokens_under_a_window_are_priced():
    """The last stage gathers and holds their layers, and the plan is one that runs."""
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-80", count=2, gpus_per_node=2, network_bytes_per_s=25e9),))
    sizes = {"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}
    more = {"vocab_size": 32000, "seq_length": 4096, "global_batch_size": 16, "distributed_optimizer": True}
    stage = Stage(4, (Group(0, 1, 2),))
    candidate = Candidate((stage, stage), 1, schedule="ministage", chunks=2, zero_stage=1)
    found = []
    for later in (0, 1):
        model = Model(**sizes, **more, mtp_num_layers=later)
        estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]))
        estimate = estimator.estimate(candidate)
        plan = build_plan(estimator, candidate, estimate)
        check_plan_alone(plan)
        seconds = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
        found.append((seconds, [memory.parameter_bytes for memory in estimate.memory]))
    (plain_s, plain), (later_s, later) = found
    assert later_s > 1.1 * plain_s and later[0] == plain[0] and later[1] > 1.1 * plain[1]
