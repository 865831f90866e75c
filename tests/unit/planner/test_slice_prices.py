"""What slices of sequences take besides whole sequences: every pass reads its operands and starts its kernels."""

from dataclasses import replace

import pytest

from tests.unit.planner.test_profile_prices import GPU, costs, model, timing
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.catalog import catalog
from tools.planner.cluster import Cluster, NodeGroup
from tools.planner.estimate import Estimator
from tools.planner.estimates import Unit
from tools.planner.layer import Spread
from tools.planner.layercost import CatalogCosts
from tools.planner.model import Model
from tools.planner.model_parts import Experts


def estimator(of: Model, gpu: str = "H100-SXM") -> Estimator:
    cluster = Cluster(nodes=(NodeGroup(gpu=gpu, count=1, gpus_per_node=8),))
    return Estimator(cluster, of, CatalogCosts(of, lambda name: catalog()[name]))


def unit(of: Model, slices: int = 1, tp: int = 1) -> Unit:
    group = Group(0, tp, 1)
    candidate = Candidate((Stage(8, (group,)),), 1, schedule="slimpipe", slices=slices)
    found = estimator(of).unit_of(candidate, group)
    assert found is not None
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("experts", [None, Experts(count=8, top_k=2, ffn_hidden_size=2048)])
@pytest.mark.parametrize("slices", [2, 4, 16])
def test_slices_take_what_so_many_short_sequences_take(slices: int, experts: Experts | None, tp: int) -> None:
    """Besides attention, whose keys are those of the whole sequence."""
    whole = model(hidden_size=2048, ffn_hidden_size=8192, seq_length=4096, experts=experts)
    short = whole.model_copy(update={"seq_length": 4096 // slices, "attention": "fused"})
    cut, each = unit(whole, slices, tp), unit(short, 1, tp)
    assert cut.head_f == pytest.approx(slices * each.head_f)
    assert cut.embedding_f == pytest.approx(slices * each.embedding_f)
    assert cut.attention_f == pytest.approx(unit(whole, 1, tp).attention_f)
    # Where the host cannot start kernels sooner, attention is beside the launches.
    longer = cut.attention_f - slices * each.attention_f
    assert slices * each.layer_f - 1e-12 <= cut.layer_f <= slices * each.layer_f + longer + 1e-12
    assert cut.layer_f + cut.layer_b > unit(whole, 1, tp).layer_f + unit(whole, 1, tp).layer_b


def test_an_estimate_has_the_price_of_its_slices() -> None:
    """Slices of 128 tokens take several times as long as whole sequences on a GPU that is fast enough."""
    of = model(hidden_size=2048, ffn_hidden_size=8192, seq_length=2048)
    found = estimator(of)
    stages = (Stage(4, (Group(0, 1, 1),)), Stage(4, (Group(0, 1, 1),)))
    busy = {}
    for slices in (1, 2, 16):
        schedule = "1f1b" if slices == 1 else "slimpipe"
        estimate = found.estimate(Candidate(stages, 1, schedule=schedule, slices=slices))
        assert estimate is not None
        busy[slices] = estimate.busy_s
    assert busy[1] < busy[2] < 1.5 * busy[1]
    assert busy[16] > 3 * busy[1]


CPU = {"is_processor": True}


def test_a_profile_shows_what_is_left_of_a_pass_without_sequences() -> None:
    """10 and 18 ms for one and two sequences: 2 ms are left without any, and come once more with each further slice."""
    found = costs(model(), timing("layer", 10e-3), timing("layer", 18e-3, micro_batch_size=2))
    gpu = catalog()[GPU].model_copy(update=CPU)
    found.gpu = lambda name: gpu
    whole = found.cost(GPU, "layer", 2, 1, "none")
    cut = found.cost(GPU, "layer", 2, 1, "none", Spread(slices=4))
    assert cut.forward_s - whole.forward_s == pytest.approx(3 * 2e-3)
    assert cut.backward_s - whole.backward_s == pytest.approx(3 * 4e-3)


def test_what_comes_once_per_pass_comes_with_every_slice() -> None:
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=2e-3, fixed_backward_s=3e-3))
    cut = found.cost(GPU, "layer", 1, 1, "none", Spread(slices=4))
    assert (cut.fixed_forward_s, cut.fixed_backward_s) == pytest.approx((8e-3, 12e-3))


def test_measured_slices_are_taken_as_measured() -> None:
    """Four slices of 4 ms, and the attention to earlier slices; never less than the whole sequence."""
    slice_of = replace(timing("layer", 4e-3), slice_tokens=256)
    fast = replace(timing("layer", 1e-3), slice_tokens=128)
    found = costs(model(), timing("layer", 10e-3), slice_of, fast)
    whole = found.cost(GPU, "layer", 1, 1, "none")
    cut = found.cost(GPU, "layer", 1, 1, "none", Spread(slices=4))
    attention = whole.attention_forward_s
    assert cut.forward_s == pytest.approx(4 * 4e-3 + attention * 3 / 4)
    assert found.cost(GPU, "layer", 1, 1, "none", Spread(slices=8)).forward_s == pytest.approx(whole.forward_s)


def test_a_profile_of_one_micro_batch_goes_by_the_catalog_on_gpus() -> None:
    found = costs(model(), timing("layer", 10e-3))
    more = {}
    for costs_of in (found, found.analytic):
        whole = costs_of.cost(GPU, "layer", 1, 1, "none")
        cut = costs_of.cost(GPU, "layer", 1, 1, "none", Spread(slices=8))
        more[costs_of is found] = cut.forward_s - whole.forward_s
    assert more[True] == pytest.approx(more[False]) and more[True] > 0
