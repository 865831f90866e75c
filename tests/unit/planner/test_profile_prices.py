"""What layers cost by a profile: kinds of layers, divided experts, and what a pass costs besides its layers."""

from dataclasses import replace

import pytest

from tests.unit.planner.emit_plans import WIDE
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import Spread
from tools.planner.costs.layercost import MeasuredCosts
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts, Latent
from tools.planner.inputs.profile_schema import DeviceProfile, LayerTiming, Profile

GPU = "A100-40"


def model(**changes: object) -> Model:
    return Model.model_validate(WIDE | {"vocab_size": 8192, "global_batch_size": 16} | changes)


def timing(layer: str, forward_s: float, **changes: object) -> LayerTiming:
    kept = 0 if layer == "embedding" else 1 << 20
    made = LayerTiming(layer, 1, 1, 1024, forward_s, 2 * forward_s, 1e-4, 1000, kept, 1 << 21)  # type: ignore[arg-type]
    return replace(made, **changes)  # type: ignore[arg-type]


def costs(of: Model, *layers: LayerTiming) -> MeasuredCosts:
    ends = [timing(kind, 1e-4, tp=tp) for kind in ("embedding", "head") for tp in {t.tp for t in layers}]
    profile = Profile(of.profiled, [DeviceProfile(GPU, 40 << 30, 8, [*ends, *layers])])
    return MeasuredCosts(of, profile, Cluster(nodes=(NodeGroup(gpu=GPU, count=1, gpus_per_node=8),)).gpu)


def test_a_pass_has_a_cost_of_its_own() -> None:
    """10 ms for a layer, of which 2 ms come once per pass: three layers take 26 ms, in three chunks 30 ms."""
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=2e-3, fixed_backward_s=6e-3))
    cluster = Cluster(nodes=(NodeGroup(gpu=GPU, count=1, gpus_per_node=8),))
    unit = Estimator(cluster, found.model, found).unit(0, 1, 1, "none")
    assert unit is not None
    assert unit.forward_s(3, False, False) == pytest.approx(26e-3)
    assert unit.backward_s(3, False, False) == pytest.approx(48e-3)
    assert unit.both_s(3, False, False) == pytest.approx(74e-3)
    assert unit.forward_s(3, False, False, chunks=3) == pytest.approx(30e-3)
    assert unit.chunks_s([1, 2], False, False, back=False) == pytest.approx([10e-3, 18e-3])


def test_more_chunks_take_longer() -> None:
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=4e-3))
    estimator = Estimator(Cluster(nodes=(NodeGroup(gpu=GPU, count=1, gpus_per_node=8),)), found.model, found)
    stages = (Stage(4, (Group(0, 1, 1),)), Stage(4, (Group(0, 1, 1),)))
    busy = []
    for chunks in (1, 2, 4):
        estimate = estimator.estimate(Candidate(stages, 1, schedule="interleaved", chunks=chunks))
        assert estimate is not None
        busy.append(estimate.busy_s)
    assert busy[1] - busy[0] == pytest.approx(16 * 4e-3)
    assert busy[2] - busy[1] == pytest.approx(2 * 16 * 4e-3)


def test_layers_with_and_without_experts_are_averaged() -> None:
    of = model(experts=Experts(count=4, top_k=2, ffn_hidden_size=1024, dense_layers=2))
    found = costs(of, timing("layer", 8e-3, parameters=4000), timing("dense", 4e-3, workspace_bytes=77))
    layer = found.cost(GPU, "layer", 1, 1, "none")
    assert layer.forward_s == pytest.approx(7e-3)
    assert layer.parameters == 3250
    assert layer.workspace_bytes >= 77


def test_layers_with_and_without_a_window_are_averaged() -> None:
    of = model(attention_window=128, windowed_layers=0.75)
    found = costs(of, timing("layer", 8e-3), timing("layer", 4e-3, windowed=True))
    assert found.cost(GPU, "layer", 1, 1, "none").forward_s == pytest.approx(5e-3)
    with pytest.raises(PlannerError, match="with a sliding window"):
        costs(of, timing("layer", 8e-3)).cost(GPU, "layer", 1, 1, "none")


def test_divided_experts_cost_what_was_measured_or_are_scaled() -> None:
    of = model(experts=Experts(count=4, top_k=2, ffn_hidden_size=1024))
    whole, half = timing("layer", 8e-3, tp=2), timing("layer", 6e-3, tp=2, ep=2)
    measured = costs(of, whole, half)
    assert measured.cost(GPU, "layer", 1, 2, "none").forward_s == pytest.approx(8e-3)
    assert measured.cost(GPU, "layer", 1, 2, "none", Spread(ep=2)).forward_s == pytest.approx(6e-3)
    scaled = costs(of, whole)
    ratio = [scaled.analytic.cost(GPU, "layer", 1, 2, "none", Spread(ep=n)).forward_s for n in (1, 2)]
    found = scaled.cost(GPU, "layer", 1, 2, "none", Spread(ep=2)).forward_s
    assert found == pytest.approx(8e-3 * ratio[1] / ratio[0])
    assert found != pytest.approx(8e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("experts", {"experts": Experts(count=4, top_k=2, ffn_hidden_size=1024)}),
        ("latent", {"latent": Latent(query_rank=64, key_value_rank=64, nope_size=32, rope_size=32, value_size=64)}),
        ("window", {"attention_window": 128, "windowed_layers": 1.0}),
    ],
)
def test_a_profile_of_other_layers_is_refused(key: str, changes: dict[str, object]) -> None:
    with pytest.raises(PlannerError, match=f"model.{key}"):
        model(**changes).check_profile(model().profiled, "profile.json")
