"""What slices of sequences take besides whole sequences: every pass reads its operands and starts its kernels."""

from dataclasses import replace

import pytest

from tests.unit.planner.test_profile_prices import GPU, costs, model, timing
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.estimates import Unit
from tools.planner.costs.layer import Spread
from tools.planner.costs.layercost import CatalogCosts, MeasuredCosts
from tools.planner.costs.runtime import MEGATRON_HET
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.inputs.profile_schema import DeviceProfile, LayerKind, LayerTiming
from tools.planner.replan.replan import _slower, _slower_device

ONE_KERNEL = replace(MEGATRON_HET, newest_in_slices=True)
"""The same attention kernel for slices and for whole sequences."""


def estimator(of: Model, gpu: str = "H100-SXM") -> Estimator:
    cluster = Cluster(nodes=(NodeGroup(gpu=gpu, count=1, gpus_per_node=8),))
    return Estimator(cluster, of, CatalogCosts(of, lambda name: catalog()[name], ONE_KERNEL))


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


def on_processor(found: MeasuredCosts) -> MeasuredCosts:
    """The same for a CPU, of which the catalog knows nothing."""
    gpu = catalog()[GPU].model_copy(update={"is_processor": True})
    found.gpu = lambda name: gpu
    return found


def test_a_profile_shows_what_is_left_of_a_pass_without_sequences() -> None:
    """10 and 18 ms for one and two sequences: 2 ms are left without any, and come once more with each further slice."""
    found = on_processor(costs(model(), timing("layer", 10e-3), timing("layer", 18e-3, micro_batch_size=2)))
    whole = found.cost(GPU, "layer", 2, 1, "none")
    cut = found.cost(GPU, "layer", 2, 1, "none", Spread(slices=4))
    assert cut.forward_s - whole.forward_s == pytest.approx(3 * 2e-3)
    assert cut.backward_s - whole.backward_s == pytest.approx(3 * 4e-3)


def test_what_comes_once_per_pass_comes_with_every_slice() -> None:
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=2e-3, fixed_backward_s=3e-3))
    cut = found.cost(GPU, "layer", 1, 1, "none", Spread(slices=4))
    assert (cut.fixed_forward_s, cut.fixed_backward_s) == pytest.approx((8e-3, 12e-3))


def of_slice(tokens: int, seconds: float, layer: str = "layer", **changes: object) -> LayerTiming:
    return replace(timing(layer, seconds), slice_tokens=tokens, **changes)  # type: ignore[arg-type]


def forwards(found: MeasuredCosts, *slices: int, kind: LayerKind = "layer", recompute: str = "none") -> list[float]:
    """Seconds of a forward in so many slices, without attention to earlier ones, and what comes once per pass."""
    out = []
    for n in slices:
        cut = found.cost(GPU, kind, 1, 1, recompute, Spread(slices=n))
        out.append(cut.forward_s - cut.attention_forward_s * (1 - 1 / n) + cut.fixed_forward_s)
    return out


def test_measured_slices_are_taken_as_measured() -> None:
    """Four slices of 4 ms, and the attention to earlier slices; never less than the whole sequence."""
    found = costs(model(), timing("layer", 10e-3), of_slice(256, 4e-3), of_slice(128, 1e-3))
    assert forwards(found, 4) == pytest.approx([16e-3])
    whole, cut = (found.cost(GPU, "layer", 1, 1, "none", Spread(slices=n)) for n in (1, 8))
    assert cut.forward_s == pytest.approx(whole.forward_s)


def test_what_a_measured_slice_takes_once_per_pass_is_its_own() -> None:
    """Of 3 ms, half a millisecond comes once per pass, of the whole sequence's 10 ms it is 4 ms."""
    short = of_slice(256, 3e-3, fixed_forward_s=0.5e-3, fixed_backward_s=1e-3)
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=4e-3, fixed_backward_s=8e-3), short)
    assert forwards(found, 4) == pytest.approx([4 * 2.5e-3 + 4e-3])


def test_shorter_slices_than_those_measured_take_no_less() -> None:
    found = on_processor(costs(model(), timing("layer", 10e-3), of_slice(512, 7e-3), of_slice(256, 5e-3)))
    two, four, eight, sixteen = forwards(found, 2, 4, 8, 16)
    assert (two, four) == pytest.approx((14e-3, 20e-3))
    assert eight > four + 10e-3 and sixteen > eight + 20e-3


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_slices_without_recomputation_stand_for_those_with_it(recompute: str) -> None:
    """The backward repeats a forward of the slice under full recomputation; ends are never computed again."""
    found = costs(model(), timing("layer", 10e-3), of_slice(256, 4e-3), of_slice(256, 3e-4, "head"))
    assert forwards(found, 4, recompute=recompute) == pytest.approx([16e-3])
    assert forwards(found, 4, kind="head", recompute=recompute) == pytest.approx([12e-4])
    cut = found.cost(GPU, "layer", 1, 1, recompute, Spread(slices=4))
    whole = found.cost(GPU, "layer", 1, 1, recompute)
    each = 12e-3 if recompute == "full" else 8e-3
    assert cut.backward_s == pytest.approx(4 * each + whole.attention_backward_s * 3 / 4)


def test_slices_of_layers_with_and_without_experts_are_averaged() -> None:
    of = model(experts=Experts(count=4, top_k=2, ffn_hidden_size=1024, dense_layers=6))
    whole = timing("layer", 20e-3), timing("dense", 4e-3)
    found = on_processor(costs(of, *whole, of_slice(256, 5e-3), of_slice(256, 2e-3, "dense")))
    assert forwards(found, 4) == pytest.approx([0.25 * 20e-3 + 0.75 * 8e-3], rel=0.02)


def test_slices_of_layers_with_a_window_are_those_measured_with_it() -> None:
    of = model(attention_window=128, windowed_layers=1.0)
    found = costs(of, timing("layer", 10e-3, windowed=True), of_slice(256, 4e-3, windowed=True))
    assert found.cost(GPU, "layer", 1, 1, "none", Spread(slices=4)).forward_s == pytest.approx(16e-3)


def test_slices_leave_out_masked_keys_on_processors() -> None:
    """For all that they save, slices take no less than the whole sequence."""
    of = model(attention="unfused")
    found = on_processor(costs(of, timing("layer", 10e-3), of_slice(256, 4e-3), of_slice(512, 5.1e-3)))
    whole, two, four = (found.cost(GPU, "layer", 1, 1, "none", Spread(slices=n)) for n in (1, 2, 4))
    attention = whole.attention_forward_s
    assert attention > 1e-3
    assert four.forward_s == pytest.approx(4 * 4e-3 + attention * (3 / 4 - 3 / 8))
    assert two.forward_s >= whole.forward_s


def test_a_profile_of_one_micro_batch_goes_by_the_catalog_on_gpus() -> None:
    """Scaled as the whole layer compares: a slow device is slow at slices as well."""
    found = costs(model(), timing("layer", 10e-3))
    ratios = []
    for costs_of in (found, found.analytic):
        whole = costs_of.cost(GPU, "layer", 1, 1, "none")
        cut = costs_of.cost(GPU, "layer", 1, 1, "none", Spread(slices=8))
        ratios.append((cut.forward_s + cut.backward_s) / (whole.forward_s + whole.backward_s))
    assert ratios[0] == pytest.approx(ratios[1]) and ratios[0] > 1.5


@pytest.mark.parametrize("slices", [1, 4, 16])
def test_a_device_twice_as_slow_takes_twice_as_long_for_slices(slices: int) -> None:
    """As runs are priced again by what they measured, with the catalog and with a profile."""
    of, gpu = model(), _slower(catalog()[GPU], 2.0)
    measured = timing("layer", 10e-3, fixed_forward_s=2e-3, fixed_backward_s=4e-3)
    (slow,) = _slower_device(DeviceProfile(GPU, 40 << 30, 8, [measured]), GPU, (2.0, 2.0)).timings
    by_catalog = [CatalogCosts(of, lambda name: catalog()[name]), CatalogCosts(of, lambda name: gpu)]
    for pair in by_catalog, [costs(of, measured), costs(of, slow)]:
        found = [c.cost(GPU, "layer", 1, 1, "none", Spread(slices=slices)) for c in pair]
        seconds = [c.forward_s + c.backward_s + c.fixed_forward_s + c.fixed_backward_s for c in found]
        assert seconds[1] / seconds[0] == pytest.approx(2.0, rel=0.02)
