"""The demo's devices, its simulation of shared cores, and its planning."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from examples.llama.contention import simulate_shared
from examples.llama.demo import QUICK, Demo
from examples.llama.devices import CpuDevice, mixed_devices, pinning
from examples.llama.pinned import cores_of
from examples.llama.planning import (
    Draft,
    Speeds,
    best,
    bound_s,
    candidates,
    devices_in_rank_order,
    estimate,
    even_splits,
    groupings,
    shortlist,
    spread,
    to_plan,
)
from examples.llama.screen import Screen
from megatron_het.plan import ModelShape, TrainingShape
from megatron_het.plan.validate import check_plan
from megatron_het.schedule import Kind, Op, Shape, generate
from tools.planner.inputs.profile_schema import DeviceProfile, LayerTiming, LinkProfile, Profile, ProfiledModel

MODEL = ModelShape(6, 64, 4, 2, 32, ffn_hidden_size=128)


def profile(sharing_cost: float = 2.0) -> Profile:
    """A layer takes 1 ms forward and 2 ms backward on a core of its own."""

    def timings(slow_down: float) -> list[LayerTiming]:
        rows = (("embedding", 0.01, 100), ("layer", 1.0, 1000), ("head", 0.3, 100))
        return [
            LayerTiming(
                kind,
                1,
                1,
                32,
                1e-3 * work * slow_down,
                2e-3 * work * slow_down,
                1e-4 * work,
                parameters,
                activation_bytes=1000 if kind == "layer" else 100,
                output_bytes=512,
                workspace_bytes=50,
            )
            for kind, work, parameters in rows
        ]

    return Profile(
        ProfiledModel(64, 128, 4, 2, 96, 32, "fp32"),
        [DeviceProfile("fast", 1, 1, timings(1.0)), DeviceProfile("slow", 1, 1, timings(sharing_cost))],
        [
            LinkProfile("network", "fast", "slow", "p2p", 2, 1e-6, 1e9),
            LinkProfile("network", "fast", "slow", "all_reduce", 2, 1e-6, 1e9),
        ],
    )


DEVICES = mixed_devices([0, 1])
SPEEDS = Speeds(profile(), DEVICES)


def test_a_pass_costs_something_once() -> None:
    """Of a layer's 1 ms, 0.2 ms come once per pass: three layers take 2.6 ms of a core, shared or not."""
    one = profile()
    for device in one.devices:
        slow = 2 if device.kind == "slow" else 1
        device.timings[:] = [
            dataclasses.replace(t, fixed_forward_s=2e-4 * slow, fixed_backward_s=5e-4 * slow)
            if t.layer == "layer"
            else t
            for t in device.timings
        ]
    speeds = Speeds(one, DEVICES)
    for device in range(3):
        assert speeds.work_s(device, [("layer", 3)], backward=False) == pytest.approx(2.6e-3)
        assert speeds.work_s(device, [("layer", 3), ("head", 1)], backward=True) == pytest.approx(5.6e-3)


# -- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "kinds", "used"),
    [
        ([7], ["slow", "slow"], [7, 7]),
        ([0, 1], ["fast", "slow", "slow"], [0, 1, 1]),
        ([0, 2, 5], ["fast", "fast", "slow", "slow"], [0, 2, 5, 5]),
        ([0, 1, 2, 3, 4, 5], ["fast", "fast", "slow", "slow", "slow", "slow"], [0, 1, 2, 2, 3, 3]),
    ],
)
def test_devices(cores: list[int], kinds: list[str], used: list[int]) -> None:
    devices = mixed_devices(cores)
    assert [d.kind for d in devices] == kinds
    assert [d.core for d in devices] == used
    assert all(sum(o.core == d.core for o in devices) == d.sharers for d in devices)


def test_pinning_round_trip() -> None:
    value = pinning(DEVICES)
    assert [cores_of(i, value) for i in range(3)] == [{0}, {1}, {1}]
    with pytest.raises(ValueError, match="local rank 3"):
        cores_of(3, value)
    with pytest.raises(ValueError, match="not a list of core numbers"):
        cores_of(0, "x;1")


# -- shared cores --------------------------------------------------------------------------------


def shared(route: tuple[tuple[int, ...], ...], replicas: tuple[int, ...], core: list[int], forward_s: float = 1.0):  # type: ignore[no-untyped-def]
    shape = Shape(layers=tuple((1,) for _ in replicas), route=route, replicas=replicas)
    program = generate("1f1b", shape)

    def work_s(device: int, op: Op) -> float:
        return forward_s if op.kind == Kind.FORWARD else 2 * forward_s

    return simulate_shared(program, work_s, core)


def test_two_busy_processes_share_a_core_and_then_one_has_it() -> None:
    # Replica 0 has one microbatch, replica 1 two: 3 s of work each way for the first, 6 for the second.
    result = shared(((0, 1, 1),), (2,), core=[0, 0])
    assert result.device_end_s[0] == pytest.approx(6.0)  # 3 s of work at half speed
    assert result.makespan_s == pytest.approx(9.0)  # all the work of one core, never idle
    apart = shared(((0, 1, 1),), (2,), core=[0, 1])
    assert apart.device_end_s == pytest.approx((3.0, 6.0))


def test_without_sharing_it_is_an_ordinary_pipeline() -> None:
    # 1F1B with p stages and m microbatches of 1 + 2 seconds: (m + p - 1) * 3.
    for stages, count in itertools.product((1, 2, 3), (3, 5)):
        route = tuple((0,) * count for _ in range(stages))
        result = shared(route, (1,) * stages, core=list(range(stages)))
        assert result.makespan_s == pytest.approx((count + stages - 1) * 3.0)


def test_a_transfer_delays_the_other_side() -> None:
    shape = Shape(layers=((1,), (1,)), route=((0,), (0,)), replicas=(1, 1))
    result = simulate_shared(generate("1f1b", shape), lambda d, op: 1.0, [0, 1], lambda a, b: 0.25)
    assert result.makespan_s == pytest.approx(4.5)


# -- planning ------------------------------------------------------------------------------------


def test_spread_deals_evenly() -> None:
    assert spread((4, 2)) == (0, 1, 0, 0, 1, 0)
    route = spread((7, 3, 2))
    assert [route.count(i) for i in range(3)] == [7, 3, 2]


def test_groupings_are_the_different_ones() -> None:
    found = [[[DEVICES[d].kind[0] for d in g] for g in groups] for groups in groupings(DEVICES)]
    texts = sorted("|".join("".join(sorted(g)) for g in groups) for groups in found)
    assert texts == sorted(["fss", "f|ss", "ss|f", "fs|s", "s|fs", "f|s|s", "s|f|s", "s|s|f"])


def test_candidates_are_valid_plans_and_keep_their_bound() -> None:
    count = 0
    for candidate in candidates(DEVICES, 4, 5):
        result = estimate(candidate, SPEEDS)
        plan = to_plan(result, SPEEDS, ModelShape(4, 64, 4, 2, 32), TrainingShape(1, 5))
        check_plan(plan)
        assert bound_s(candidate, SPEEDS) <= result.iteration_s * (1 + 1e-9)
        assert len(devices_in_rank_order(result, DEVICES)) == plan.world_size == 3
        count += 1
    assert count == 42


def test_best_is_the_best_of_all() -> None:
    everything = [estimate(c, SPEEDS).iteration_s for c in candidates(DEVICES, 6, 6)]
    assert best(DEVICES, SPEEDS, 6, 6)[0].iteration_s == pytest.approx(min(everything))


def test_speeds_decide() -> None:
    evens = [estimate(c, SPEEDS) for c in even_splits(DEVICES, 6, 12)]
    chosen = best(DEVICES, SPEEDS, 6, 12)[0]
    # Two cores' work over two cores against the slow core's two thirds of it: at most 4 / 3.
    speedup = min(e.iteration_s for e in evens) / chosen.iteration_s
    assert 1.15 < speedup < 4 / 3 + 0.01
    fast_share = sum(
        d.layers * m
        for d in chosen.candidate
        for i, m in zip(d.devices, d.microbatches, strict=True)
        if DEVICES[i].kind == "fast"
    ) / (6 * 12)
    assert 0.4 < fast_share < 0.6


def test_the_shortlist_has_the_best_of_each_grouping_that_is_near() -> None:
    ranked = best(DEVICES, SPEEDS, 6, 8, within=10.0)
    kinds = [[tuple(sorted(DEVICES[d].kind for d in s.devices)) for s in e.candidate] for e in ranked]
    wide = shortlist(ranked, DEVICES, within=10.0, count=100)
    firsts = [e for i, e in enumerate(ranked) if kinds.index(kinds[i]) == i]
    assert len(firsts) > 1 and wide == firsts
    assert shortlist(ranked, DEVICES, within=10.0, count=2) == firsts[:2]
    near = ranked[0].iteration_s * 1.02
    assert shortlist(ranked, DEVICES, 0.02, 100) == [e for e in firsts if e.iteration_s <= near]


def test_even_splits_are_even() -> None:
    for candidate in even_splits(DEVICES, 6, 12):
        assert len({s.layers for s in candidate}) == 1
        assert len({m for s in candidate for m in s.microbatches}) == 1
    with pytest.raises(ValueError, match="evenly"):
        even_splits(DEVICES, 5, 4)


def test_equal_devices_have_nothing_to_gain() -> None:
    devices = [CpuDevice("slow-0", "slow", 0, 2), CpuDevice("slow-1", "slow", 0, 2)]
    speeds = Speeds(profile(), devices)
    even = min(estimate(c, speeds).iteration_s for c in even_splits(devices, 6, 12))
    assert best(devices, speeds, 6, 12)[0].iteration_s == pytest.approx(even, rel=0.02)


def test_memory_follows_the_microbatches_in_flight() -> None:
    chosen = estimate((Draft(2, (0,), (6,)), Draft(4, (1,), (6,))), SPEEDS)
    plan = to_plan(chosen, SPEEDS, MODEL, TrainingShape(1, 6))
    assert plan.predicted is not None
    first, last = plan.predicted.per_rank
    # 1F1B: stage 0 of 2 holds two microbatches, the last stage one.
    assert first.activation_bytes == 2 * (2 * 1000 + 100) + 50
    assert last.activation_bytes == 4 * 1000 + 100 + 50
    assert first.parameter_bytes == 4 * (2 * 1000 + 100)
    assert first.optimizer_bytes == 2 * first.parameter_bytes


@pytest.mark.parametrize(
    ("errors", "profiles"),
    [
        ([[-0.28, -0.27]], 2),  # all candidates are faster than predicted
        ([[0.2]], 2),
        ([[0.2], [0.2]], 2),  # once more, and no more than that
        ([[-0.28, 0.02]], 1),  # one prediction is wrong
        ([[0.3, -0.3]], 1),
        ([[0.05, 0.1]], 1),
    ],
)
def test_a_profile_of_another_speed_is_made_again(errors: list[list[float]], profiles: int, tmp_path: Path) -> None:
    made: list[Profile] = []

    class Tried(Demo):
        def _profile(self, devices: Any) -> Profile:
            made.append(profile())
            return made[-1]

        def _try_out(self, finalists: Any, speeds: Speeds, devices: Any, data: Any) -> Any:
            assert speeds.profile is made[-1]
            return finalists[0], errors[len(made) - 1] if len(made) <= len(errors) else [0.0]

    demo = Tried(argparse.Namespace(out=tmp_path), dataclasses.replace(QUICK, profiles=2), Screen())
    speeds, winner = demo._choose(DEVICES, None)  # type: ignore[arg-type]
    assert len(made) == profiles
    assert speeds.profile is made[-1]
    assert winner.iteration_s > 0


def test_a_core_is_faster_while_the_others_wait() -> None:
    """Two stages on two cores, one microbatch: nothing overlaps, so each operation takes 0.8 of its work."""
    program = generate("1f1b", Shape(layers=((1,), (1,)), route=((0,), (0,)), replicas=(1, 1)))
    alone = simulate_shared(program, lambda d, op: 1.0, [0, 1], alone=[0.8, 0.8])
    assert alone.makespan_s == pytest.approx(4 * 0.8)
    assert simulate_shared(program, lambda d, op: 1.0, [0, 1]).makespan_s == pytest.approx(4.0)
    # Four replicas of one stage are busy all the time: no core is ever alone.
    busy = generate("1f1b", Shape(layers=((1,),), route=((0, 1, 2, 3),), replicas=(4,)))
    together = simulate_shared(busy, lambda d, op: 1.0, [0, 1, 2, 3], alone=[0.8] * 4)
    assert together.makespan_s == pytest.approx(2.0)
