"""Profiling real layers over gloo: TP 1 and 2, links, the largest batch, and going on after an interruption."""

import dataclasses
from pathlib import Path

import pytest

from tools.planner.errors import PlannerError
from tools.planner.inputs.profile_schema import (
    LayerTiming,
    Profile,
    ProfiledExperts,
    ProfiledLatent,
    ProfiledModel,
    load_profile,
    save_profile,
)
from tools.planner.profile.settings import ProfileSettings, point_of, run_profile

MODEL = ProfiledModel(64, 128, 4, 2, 96, 32, "fp32", name="tiny")


def settings(out: Path) -> ProfileSettings:
    return ProfileSettings(
        MODEL,
        str(out),
        ("cpu",),
        micro_batch_sizes=(1, 2),
        tp=(1, 2),
        recompute=("none", "full"),
        window_s=0.05,
        windows=2,
        largest_batch_layers=2,
        link_bytes=(1 << 10, 1 << 18),
        timeout_s=120.0,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    return out, run_profile(settings(out), processes=2)


def test_every_point_is_there(measured: tuple[Path, Profile]) -> None:
    out, profile = measured
    device = profile.device("cpu")
    assert profile.complete and device is not None
    assert {point_of(t) for t in device.timings} == set(settings(out).points())
    by_point = {point_of(t): t for t in device.timings}
    for point, timing in by_point.items():
        assert timing.forward_s > 0 and timing.backward_s > 0 and timing.update_s > 0
        assert (timing.alone_s > 0) == (timing.layer == "layer" and timing.tp == 1)
        if point.layer != "embedding" and point.recompute == "none":
            double = by_point.get(point._replace(micro_batch_size=2))
            if point.micro_batch_size == 1:
                assert double.activation_bytes == pytest.approx(2 * timing.activation_bytes, rel=0.05)


def test_parameters_of_a_layer_and_of_its_half(measured: tuple[Path, Profile]) -> None:
    device = measured[1].device("cpu")
    count = {(t.layer, t.tp): t.parameters for t in device.timings}
    h, f, kv = 64, 128, 32
    matrices = h * (h + 2 * kv) + h * h + 3 * h * f
    assert count["layer", 1] == matrices + 2 * h
    assert count["layer", 2] == matrices // 2 + 2 * h
    assert count["embedding", 1] == 96 * h and count["embedding", 2] == 48 * h
    assert count["head", 1] == 96 * h + h


def test_recompute_keeps_less(measured: tuple[Path, Profile]) -> None:
    device = measured[1].device("cpu")
    kept = {(t.tp, t.micro_batch_size, t.recompute): t.activation_bytes for t in device.timings if t.layer == "layer"}
    # With full recompute only the layer's input [s, b, h] is kept (and the random-number state).
    assert 32 * 2 * 64 * 4 <= kept[1, 2, "full"] < kept[1, 2, "none"] / 4


def test_links_and_largest_batches(measured: tuple[Path, Profile]) -> None:
    profile = measured[1]
    assert {(k.scope, k.operation, k.participants) for k in profile.links} == {
        ("node", op, 2) for op in ("p2p", "all_reduce", "all_gather", "reduce_scatter")
    }
    device = profile.device("cpu")
    found = {(b.tp, b.recompute): b.micro_batch_size for b in device.largest_batches}
    assert set(found) == {(tp, r) for tp in (1, 2) for r in ("none", "full")}
    assert found[1, "none"] < found[1, "full"] and found[1, "none"] < found[2, "none"]


def test_an_interrupted_profile_is_completed(measured: tuple[Path, Profile], tmp_path: Path) -> None:
    profile = measured[1]
    out = tmp_path / "profile.json"
    device = profile.devices[0]
    torn = dataclasses.replace(device, timings=device.timings[:-2])
    save_profile(dataclasses.replace(profile, devices=[torn], complete=False), out)
    lines: list[str] = []
    done = run_profile(dataclasses.replace(settings(out), largest_batch_layers=0), 2, on_line=lines.append)
    assert sum(line.startswith("[") and "/2]" in line for line in lines) == 2
    assert not any(line.startswith("link") for line in lines)
    assert done.complete and done.devices[0].timings[:-2] == torn.timings
    assert load_profile(out) == done


def test_another_model_is_refused_before_anything_starts(measured: tuple[Path, Profile]) -> None:
    out = measured[0]
    before = out.read_bytes()
    other = dataclasses.replace(settings(out), model=dataclasses.replace(MODEL, hidden_size=128))
    with pytest.raises(PlannerError, match=r"model\.hidden_size = 64"):
        run_profile(other, 2)
    assert out.read_bytes() == before


@pytest.mark.full
def test_experts_latent_attention_and_windows(tmp_path: Path) -> None:
    """Whole and divided experts of a TP group, layers without experts, and attention of both kinds."""
    model = dataclasses.replace(
        MODEL,
        num_query_groups=4,
        experts=ProfiledExperts(4, 2, 64, 32, dense=True),
        latent=ProfiledLatent(16, 16, 16, 8, 16),
        window=8,
        windowed=False,
        sequence_parallel=True,
    )
    wanted = ProfileSettings(
        model, str(tmp_path / "profile.json"), ("cpu",), tp=(2,), ep=(1, 2), window_s=0.02, windows=2, links=False
    )
    device = run_profile(wanted, processes=2).device("cpu")
    assert load_profile(wanted.out).model == model
    found: dict[tuple[str, int, bool], LayerTiming] = {(t.layer, t.ep, t.windowed): t for t in device.timings}
    layers = [("layer", ep, windowed) for ep in (1, 2) for windowed in (False, True)]
    assert set(found) == {*layers, ("dense", 1, False), ("dense", 1, True), ("embedding", 1, False), ("head", 1, False)}
    assert len({found[key].parameters for key in layers}) == 1
    assert found["layer", 1, False].parameters > found["dense", 1, False].parameters
    for timing in found.values():
        assert 0 <= timing.fixed_forward_s <= timing.forward_s / 2
        assert timing.layer == "head" or timing.output_bytes == 32 * 64 * 4
