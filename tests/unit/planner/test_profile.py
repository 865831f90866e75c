"""Operating points, resuming, the search for the largest batch, and link fits."""

import dataclasses
import json
import resource
import socket
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testing.planner_cases import cluster_of, estimator_of
from tests.unit.planner.emit_plans import WIDE, make_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import MEGATRON_HET, OTHER_GPU, PROFILED, WITHOUT_TE, Spread
from tools.planner.costs.layercost import CatalogCosts, MeasuredCosts
from tools.planner.costs.unit import Unit
from tools.planner.emit.command import device_arguments
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts, Latent
from tools.planner.inputs.profile_schema import (
    DeviceProfile,
    LargestBatch,
    LayerKind,
    LayerTiming,
    LinkProfile,
    Profile,
    ProfiledExperts,
    ProfiledLatent,
    ProfiledModel,
    load_profile,
    profile_from_document,
    save_profile,
)
from tools.planner.profile.links import Seat
from tools.planner.profile.settings import (
    Point,
    ProfileSettings,
    check_same_model,
    check_settings,
    fit_line,
    largest,
    missing_points,
    parse_numbers,
    run_profile,
)
from tools.planner.profile.worker import _Run
from tools.planner.replay.replan import _slower, _slower_device

MODEL = ProfiledModel(64, 128, 4, 2, 96, 32, "fp32")


def settings(**changes: object) -> ProfileSettings:
    return dataclasses.replace(ProfileSettings(MODEL, "profile.json", ("cpu",)), **changes)  # type: ignore[arg-type]


def test_repeated_points_are_measured_once() -> None:
    points = settings(micro_batch_sizes=(1, 2), recompute=("none", "full")).points()
    assert len(points) == len(set(points)) == 2 * (2 + 2)  # embedding, head, and the layer twice
    assert Point("layer", 2, 1, 32, "full") in points
    assert Point("head", 2, 1, 32, "full") not in points


EXPERTS = dataclasses.replace(MODEL, experts=ProfiledExperts(4, 2, 64, dense=True))


def test_settings_survive_the_way_to_the_workers() -> None:
    one = settings(micro_batch_sizes=(1, 4), tp=(1, 2), kinds=("a", "b"))
    assert ProfileSettings.from_json(one.to_json()) == one
    latent = dataclasses.replace(EXPERTS, latent=ProfiledLatent(16, 16, 16, 8, 16))
    assert ProfileSettings.from_json(settings(model=latent).to_json()).model == latent


def test_experts_are_measured_divided_and_beside_layers_without() -> None:
    found = {(p.layer, p.tp, p.ep) for p in settings(model=EXPERTS, tp=(1, 2), ep=(1, 2)).points()}
    assert {t for t in found if t[0] == "layer"} == {("layer", 1, 1), ("layer", 2, 1), ("layer", 2, 2)}
    assert {t for t in found if t[0] == "dense"} == {("dense", 1, 1), ("dense", 2, 1)}
    assert ("layer", 2, 2) not in {(p.layer, p.tp, p.ep) for p in settings(tp=(1, 2), ep=(1, 2)).points()}


def test_windows_are_measured_where_layers_have_them() -> None:
    some, all_of_them = (dataclasses.replace(MODEL, window=8, windowed=every) for every in (False, True))
    assert {p.windowed for p in settings(model=some).points() if p.layer == "layer"} == {False, True}
    assert {p.windowed for p in settings(model=all_of_them).points() if p.layer == "layer"} == {True}
    assert not any(p.windowed for p in settings(model=some).points() if p.layer != "layer")


def test_resuming_measures_only_what_a_kind_lacks() -> None:
    one = settings(micro_batch_sizes=(1, 2))
    done = one.points()[:4]
    timings = [LayerTiming(p.layer, p.micro_batch_size, p.tp, p.slice_tokens, 1.0, 2.0, 0.1, 10, 10, 10) for p in done]
    profile = Profile(MODEL, [DeviceProfile("a", 1, 1, timings), DeviceProfile("b", 1, 1, timings[:2])])
    assert missing_points(one, profile, ["a"]) == one.points()[4:]
    assert missing_points(one, profile, ["a", "b"]) == one.points()[2:]
    assert missing_points(one, None, ["a"]) == one.points()


def test_resuming_with_other_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the figures would be of Transformer Engine's layers, and half of Megatron's."""
    run = object.__new__(_Run)
    run.settings, run.seats, run.memory_bytes, run.reserved_bytes = settings(out="p.json"), [Seat(0, 0, "a")], [1], [0]
    monkeypatch.setattr("tools.planner.profile.layers.has_transformer_engine", lambda: True)
    stored = run._with_kinds(Profile(MODEL))
    assert run._with_kinds(stored) == stored
    monkeypatch.setattr("tools.planner.profile.layers.has_transformer_engine", lambda: False)
    assert run._with_kinds(stored) == stored  # on a processor: a file of before the field, which is True by default
    monkeypatch.setattr("tools.planner.profile.layers.on_gpu", lambda: True)
    with pytest.raises(PlannerError, match="transformer_engine = True: this run measures Megatron's layers on a"):
        run._with_kinds(stored)


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        ({"tp": (3,)}, 6, "num_attention_heads"),
        ({"tp": (4,)}, 2, "does not divide the 2 devices"),
        ({"slice_tokens": (5,)}, 1, "none of them divides the sequence length"),
        ({"kinds": ("a", "b")}, 3, "one per rank"),
        ({"recompute": ("some",)}, 1, "must be one of"),
        ({"ep": (2,), "tp": (1, 2)}, 2, "has no experts"),
        ({"model": EXPERTS, "ep": (3,), "tp": (1, 2)}, 2, "does not divide the 4 experts"),
        ({"model": EXPERTS, "ep": (4,), "tp": (1, 2)}, 4, "divides none of the TP sizes"),
        ({"devices_per_node": 2}, 3, "does not divide the 3 ranks"),
    ],
)
def test_settings_that_cannot_be_measured(changes: dict[str, object], world: int, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        check_settings(settings(**changes), world)


def test_slices_that_do_not_divide_are_left_out() -> None:
    length = MODEL.seq_length
    some = settings(slice_tokens=(length, length // 2, 5))
    check_settings(some, 1)
    assert {point.slice_tokens for point in some.points()} == {length, length // 2}
    assert f"--slice-tokens 5: left out, because slices of equal length must divide the sequence length {length}" in (
        some.left_out()
    )
    assert str(length // 4) in some.left_out().rpartition(":")[2]
    assert settings(slice_tokens=(length,)).left_out() == ""


def test_profiles_of_other_models_are_refused() -> None:
    other = dataclasses.replace(MODEL, precision="bf16", name="other")
    with pytest.raises(PlannerError, match=r"model\.precision = 'bf16'"):
        check_same_model(Profile(other), settings())
    check_same_model(Profile(dataclasses.replace(MODEL, name="other name")), settings())


def test_a_machine_without_loopback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=OSError(101, "Network is unreachable")))
    with pytest.raises(PlannerError, match="cannot reach each other there: Network is unreachable. Try 'ip link"):
        run_profile(settings(), 1)


def test_a_window_has_a_pass_and_finds_its_memory_touched() -> None:
    from tools.planner.profile.layers import _make_room, _repeat

    work = Mock()
    _repeat(0.0, work, None)  # as where another process had the core for a whole window
    assert work.call_count == 1
    _make_room()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = [torch.zeros(2 << 20, dtype=torch.uint8) for _ in range(64)]  # 32,768 pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


def test_numbers() -> None:
    assert parse_numbers("1, 2,4", "--tp") == (1, 2, 4)
    with pytest.raises(PlannerError, match="--tp"):
        parse_numbers("1,x", "--tp")


@given(st.integers(min_value=0, max_value=5000))
def test_largest_finds_the_border_in_few_runs(border: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= border

    assert largest(fits) == border
    assert len(tried) <= 2 * (border.bit_length() + 1)


def test_largest_stops_at_its_limit() -> None:
    assert largest(lambda size: True, limit=64) == 64


@given(st.floats(min_value=1e-6, max_value=1e-2), st.floats(min_value=1e6, max_value=1e12))
def test_an_exact_line_is_found(latency_s: float, bytes_per_s: float) -> None:
    samples = [(n, latency_s + n / bytes_per_s) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    found_latency_s, found_bytes_per_s = fit_line(samples)
    for n, seconds in samples:
        assert found_latency_s + n / found_bytes_per_s == pytest.approx(seconds, rel=1e-3)


def test_a_fit_never_has_a_negative_latency() -> None:
    latency_s, bytes_per_s = fit_line([(1000, 1e-4), (2000, 4e-4), (4000, 9e-4)])
    assert latency_s == 0.0 and bytes_per_s > 0
    assert fit_line([(1000, 2e-3), (4000, 1e-3)])[1] > 0
    with pytest.raises(ValueError, match="two message sizes"):
        fit_line([(1000, 1e-3), (1000, 2e-3)])


def example() -> Profile:
    model = ProfiledModel(64, 256, 4, 4, 512, 128, "fp32", "tiny")
    timing = LayerTiming("layer", 2, 1, 128, 0.01, 0.02, 0.001, 50_000, 1 << 20, 64 * 128 * 8)
    link = LinkProfile("network", "a", "b", "p2p", 2, 1e-5, 1e9, [(1024, 1.1e-5)])
    device = DeviceProfile("a", 1 << 30, 4, [timing], [LargestBatch(1, 1, 8)])
    return Profile(model, [device], [link])


def test_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(example(), path)
    assert load_profile(path) == example()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def test_other_points_of_the_same_layer_are_kept(tmp_path):
    document = json.loads(json.dumps(asdict(example())))
    timings = document["devices"][0]["timings"]
    for change in (
        {"tp": 2},
        {"micro_batch_size": 4},
        {"recompute": "full"},
        {"slice_tokens": 64, "context_tokens": 64},
    ):
        timings.append({**timings[0], **change})
    profile = profile_from_document({"format": "megatron_het.profile", "version": 1, **document}, "p.json")
    assert len(profile.devices[0].timings) == 5


# What layers cost by a profile: kinds of layers, divided experts, and what a pass costs besides its layers.

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


@pytest.mark.parametrize("has_te", [True, False])
def test_a_plan_is_priced_with_the_layers_that_emit_writes(has_te: bool) -> None:
    """Measured times hold for the measured layers: of Transformer Engine, or Megatron's own beside a V100."""
    of, cluster = model(precision="fp16"), cluster_of((GPU, 1, 8, 25e9), ("V100-32", 1, 8, 25e9))
    layers = [timing("embedding", 1e-4), timing("layer", 10e-3), timing("head", 1e-3)]
    measured = [DeviceProfile(gpu, 32 << 30, 8, layers, transformer_engine=has_te) for gpu in (GPU, "V100-32")]
    profile = Profile(of.profiled, measured)
    whole = estimator_of(cluster, of, profile)
    alone, mixed = whole.running([0]), whole.running([0, 1])
    assert (alone.runtime, mixed.runtime) == (MEGATRON_HET if has_te else WITHOUT_TE, WITHOUT_TE)
    times = [prices.unit(pool, 1, 1, "none").layer_f for prices, pool in ((alone, 0), (mixed, 0), (mixed, 1))]
    theirs = [
        CatalogCosts(of, cluster.gpu, runtime).cost(GPU, "layer", 1, 1, "none").forward_s
        for runtime in (WITHOUT_TE, MEGATRON_HET)
    ]
    assert times == pytest.approx([10e-3, 10e-3 * theirs[0] / theirs[1] if has_te else 10e-3, 10e-3])
    errors = [prices.costs.uncertainty_of([GPU], False) for prices in (alone, mixed)]
    assert errors == [PROFILED, OTHER_GPU if has_te else PROFILED]
    made = make_plan(((8,), [((0,), (0, 1, 2, 3), GPU)]))
    flags, _ = device_arguments(made, cluster.as_profiled(profile), [])
    assert bool(flags) is not alone.runtime.fused


def test_a_pass_has_a_cost_of_its_own() -> None:
    """10 ms for a layer, of which 2 ms come once per pass: three layers take 26 ms, in three chunks 30 ms."""
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=2e-3, fixed_backward_s=6e-3))
    cluster = Cluster(nodes=(NodeGroup(gpu=GPU, count=1, gpus_per_node=8),))
    unit = Estimator(cluster, found.model, found).unit(0, 1, 1, "none")
    assert unit.forward_s(3, False, False) == pytest.approx(26e-3)
    assert unit.backward_s(3, False, False) == pytest.approx(48e-3)
    assert unit.both_s(3, False, False) == pytest.approx(74e-3)
    assert unit.forward_s(3, False, False, chunks=3) == pytest.approx(30e-3)
    assert unit.chunks_s([1, 2], False, False, back=False) == pytest.approx([10e-3, 18e-3])


def test_more_chunks_take_longer() -> None:
    found = costs(model(), timing("layer", 10e-3, fixed_forward_s=4e-3))
    estimator = Estimator(Cluster(nodes=(NodeGroup(gpu=GPU, count=1, gpus_per_node=8),)), found.model, found)
    stages = (Stage(4, (Group(0, 1, 1),)), Stage(4, (Group(0, 1, 1),)))
    several = (Candidate(stages, 1, schedule="interleaved", chunks=chunks) for chunks in (1, 2, 4))
    busy = [estimator.estimate(one).busy_s for one in several]
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
        ("precision", {"precision": "fp16"}),
        ("experts", {"experts": Experts(count=4, top_k=2, ffn_hidden_size=1024)}),
        ("latent", {"latent": Latent(query_rank=64, key_value_rank=64, nope_size=32, rope_size=32, value_size=64)}),
        ("window", {"attention_window": 128, "windowed_layers": 1.0}),
    ],
)
def test_a_profile_of_other_layers_is_refused(key: str, changes: dict[str, object]) -> None:
    with pytest.raises(PlannerError, match=f"model.{key}"):
        model(**changes).check_profile(model().profiled, "profile.json")


def estimator(of: Model) -> Estimator:
    return estimator_of(Cluster(nodes=(NodeGroup(gpu="H100-SXM", count=1, gpus_per_node=8),)), of)


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


def test_parts_that_run_again_are_taken_from_the_catalog() -> None:
    found = costs(model(), timing("layer", 10e-3))
    (mine, again), (theirs, part) = (
        [c.cost(GPU, "layer", 1, 1, r) for r in ("none", "mlp")] for c in (found, found.analytic)
    )
    more = (part.backward_s - theirs.backward_s) / theirs.forward_s
    assert again.backward_s == pytest.approx(mine.backward_s + 10e-3 * more) and 0.2 < more < 0.6
    assert again.activation_bytes == pytest.approx((1 << 20) * part.activation_bytes / theirs.activation_bytes)
    assert again.activation_bytes + again.workspace_bytes == mine.activation_bytes + mine.workspace_bytes


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


@pytest.mark.parametrize(
    ("changes", "least", "most"), [({}, 1.5, 99.0), ({"attention": "unfused", "seq_length": 16384}, 0.1, 0.6)]
)
def test_a_profile_of_one_micro_batch_goes_by_the_catalog_on_gpus(
    changes: dict[str, object], least: float, most: float
) -> None:
    """Scaled as the whole layer compares: a slow device is slow at slices as well, which keep no matrices anywhere."""
    of = model(**changes)
    slow = 3 * CatalogCosts(of, lambda name: catalog()[name]).cost(GPU, "layer", 1, 1, "none").forward_s
    found = costs(of, timing("layer", slow, backward_s=2.4 * slow, slice_tokens=of.seq_length))
    ratios = []
    for costs_of in (found, found.analytic):
        whole = costs_of.cost(GPU, "layer", 1, 1, "none")
        cut = costs_of.cost(GPU, "layer", 1, 1, "none", Spread(slices=8))
        ratios.append((cut.forward_s + cut.backward_s) / (whole.forward_s + whole.backward_s))
        assert cut.attention_backward_s < cut.backward_s
    assert ratios[0] == pytest.approx(ratios[1]) and least < ratios[0] < most


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
