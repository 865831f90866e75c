"""What the answers of all ranks mean: every check's judgement on data that people can check by hand."""

import json
from unittest import mock

import pytest

from megatron_het import planner
from megatron_het.doctor import devices as checked_devices
from megatron_het.doctor import flags as checked_flags
from megatron_het.doctor import software as checked_software
from megatron_het.doctor.check import (
    Expectations,
    LayerExpectation,
    LayerModel,
    LinkExpectation,
    Names,
    Seat,
    Status,
    load_expectations,
)
from megatron_het.doctor.devices import Devices, operating_point, parse, reasons_in
from megatron_het.doctor.flags import Flags
from megatron_het.doctor.links import Links, pairs_of, rounds_of
from megatron_het.doctor.software import Disk, Software, _has_kernels
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape

NAMES = Names(("a", "a", "b", "b"), ("new", "new", "old", "old"))


def rows(findings, status):
    return [(f.where, f.what) for f in findings if f.status is status]


def software(**changes):
    """Answers of four equal ranks; ``changes`` maps ``rank_key`` to a value."""
    answers = {}
    for rank in range(4):
        kind = "H100" if rank < 2 else "A100"
        answers[rank] = {
            "versions": {"torch": "2.6", "numpy": "2.0", "nccl": "2.21"},
            "device": {"name": kind, "capability": 9, "driver": "550"},
            "environment": {"OMP_NUM_THREADS": "1"},
            "wanted": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            "misplaced": (),
        }
    for where, value in changes.items():
        rank, part, key = where.removeprefix("r").split("__")
        if value is None:
            del answers[int(rank)][part][key]
        else:
            answers[int(rank)][part][key] = value
    return Software().judge(answers, NAMES)


def test_equal_software_is_fine():
    found = software()
    assert {f.status for f in found} == {Status.OK}
    assert rows(found, Status.OK)[0] == ("all ranks", "torch 2.6, numpy 2.0, nccl 2.21")


def test_builds_of_pytorch_without_kernels_for_a_device():
    new, old = ["sm_75", "sm_80", "sm_90"], ["sm_60", "sm_70", "sm_80", "sm_90"]
    devices = {f"r{r}__device__architecture": "sm_90" if r < 2 else "sm_70" for r in range(4)}
    both = {f"r{r}__device__built_for": new for r in range(4)}
    found = [f for f in software(**devices, **both) if f.status is Status.FAULT]
    assert [(f.where, f.what) for f in found] == [
        ("ranks 2-3 (b)", "PyTorch has no kernels for sm_70, only sm_75 sm_80 sm_90")
    ]
    mixed = both | {"r0__device__built_for": old}
    (fault,) = [f for f in software(**devices, **mixed) if f.status is Status.FAULT]
    assert "rank 0" in fault.hint and "every device" in fault.hint
    each = {f"r{r}__device__built_for": new if r < 2 else old for r in range(4)}
    assert not [f for f in software(**devices, **each) if f.status is Status.FAULT]


@pytest.mark.parametrize(
    ("device", "built_for", "fits"),
    [
        ("sm_89", ["sm_86"], True),
        ("sm_86", ["sm_89"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_120", ["sm_90"], False),
        ("gfx942", ["gfx90a", "gfx942"], True),
        ("gfx950", ["gfx942"], False),
    ],
)
def test_which_builds_serve_a_device(device, built_for, fits):
    assert _has_kernels(device, built_for) == fits


def test_versions_that_differ():
    found = software(r3__versions__torch="2.7", r3__versions__numpy="1.9")
    assert rows(found, Status.FAULT) == [("rank 3 (b)", "torch: 2.6 on ranks 0-1 (a), rank 2 (b); 2.7 on rank 3 (b)")]
    assert rows(found, Status.WARNING) == [("rank 3 (b)", "numpy: 2.0 on ranks 0-1 (a), rank 2 (b); 1.9 on rank 3 (b)")]


def test_variables_that_are_missing_or_differ():
    found = software(r2__environment__OMP_NUM_THREADS=None)
    assert rows(found, Status.WARNING)[0][0] == "rank 2 (b)" and "is not set" in rows(found, Status.WARNING)[0][1]
    found = software(r2__environment__NCCL_ALGO="Ring")
    assert rows(found, Status.FAULT)[0][0] == "ranks 0-1 (a), rank 3 (b)"
    names = {f"r{r}__environment__NCCL_SOCKET_IFNAME": "eth0" if r < 2 else "ib0" for r in range(4)}
    assert not rows(software(**names), Status.WARNING)
    found = software(r1__environment__CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert any("needs 1" in what for _, what in rows(found, Status.FAULT))


def test_a_rank_on_the_wrong_kind_of_node():
    found = software(r1__device__name="A100")
    assert rows(found, Status.FAULT) == [
        ("ranks 0-1 (a)", "devices of the kind new are different models: H100 on rank 0 (a); A100 on rank 1 (a)")
    ]
    assert len(rows(software(r3__device__driver="535"), Status.WARNING)) == 1


def test_a_node_with_two_kinds(monkeypatch, tmp_path):
    """Devices are compared with their own kind, and a rank on the other kind of its node is named."""
    names = Names(("a",) * 4, ("A100-40", "A100-40", "V100-16", "V100-16"))
    stages = [Stage((2,), (Replica(ranks, (0, 1), names.kinds[ranks[0]]),)) for ranks in ((0, 1), (2, 3))]
    plan = Plan(ModelShape(4, 32, 4, 2, 32), TrainingShape(1, 2), tuple(stages))
    found, _ = devices((1.0, 1.1, 4.0, 4.1), names=names)
    assert not rows(found, Status.FAULT)
    found, _ = devices((1.0, 1.1, 4.0, 9.0), names=names)
    assert [where for where, _ in rows(found, Status.FAULT)] == ["rank 3 (a)"]
    for order, faults in (("AAVV", []), ("VVAA", ["ranks 0-1 (a)", "ranks 2-3 (a)"])):
        cards = [{"A": "NVIDIA A100-SXM4-40GB", "V": "Tesla V100-SXM2-16GB"}[letter] for letter in order]
        monkeypatch.setattr(checked_software, "_device", lambda rank, cards=cards: {"name": cards[rank]})
        seats = [Seat(r, r, names.hosts, plan, None, Expectations(), None, tmp_path) for r in range(4)]
        found = Software().judge({seat.rank: Software().measure(seat) for seat in seats}, names)
        assert [where for where, _ in rows(found, Status.FAULT)] == faults


@pytest.mark.parametrize("flag", ["--data-path", "--valid-data-path"])
def test_data_that_a_machine_does_not_have(tmp_path, monkeypatch, flag):
    (tmp_path / "here.idx").touch()
    words = (flag, "0.3", f"{tmp_path}/here", "0.7", f"{tmp_path}/gone", "--lr", "/1")
    stages = tuple(Stage((1,), (Replica((rank,), (0, 1)),)) for rank in range(3))
    plan = Plan(ModelShape(3, 32, 4, 2, 32), TrainingShape(1, 2), stages)
    monkeypatch.setattr(checked_flags, "problems_of", lambda *_: ({}, []))
    for rank, told in ((0, [f"{flag}: there is no {tmp_path}/gone.idx"]), (1, [])):
        seat = Seat(rank, rank, ("a",) * 3, plan, words, Expectations(), None, tmp_path)
        assert Flags().measure(seat)["problems"] == told


def test_flags_by_rank():
    need = {"--x": "--x (no TE)"}
    answers = {r: {"needed": need, "missing": {}, "problems": [], "given": True} for r in range(4)}
    assert rows(Flags().judge(answers, NAMES), Status.OK)
    answers[2] = answers[2] | {"missing": need}
    answers[3] = answers[3] | {"missing": need, "problems": ["--y = 1: refused"]}
    found = Flags().judge(answers, NAMES)
    assert rows(found, Status.FAULT) == [("ranks 2-3 (b)", "missing: --x (no TE)"), ("rank 3 (b)", "--y = 1: refused")]
    answers = {r: {"needed": need if r == 1 else {}, "missing": {}, "problems": [], "given": False} for r in range(4)}
    assert rows(Flags().judge(answers, NAMES), Status.WARNING)[0][0] == "rank 1 (a)"


def test_disk():
    answers = {r: {"bytes": 10**9, "seconds": 2.0, "free_bytes": 10**11, "shared": True} for r in range(4)}
    assert [f.status for f in Disk("/x", 10**10).judge(answers, NAMES)] == [Status.OK]
    assert rows(Disk("/x", 10**12).judge(answers, NAMES), Status.FAULT)  # no room
    assert rows(Disk("/x", 4 * 10**10, most_s=10).judge(answers, NAMES), Status.WARNING)  # 20 s
    answers[3]["shared"] = False
    assert rows(Disk("/x").judge(answers, NAMES), Status.FAULT)[0][0] == "rank 3 (b)"
    assert rows(Disk("").judge({0: {}}, NAMES), Status.WARNING)


def devices(layers, gemm=(1e-3,) * 4, expected=None, spread=1.0, names=NAMES):
    answers = {
        r: {"gemm_s": gemm[r], "layer_s": layers[r], "note": "", "unloaded": ""}
        | {"spread": spread, "load": 7.5, "cores": 2}
        | {"throttling": {"faults": [], "warnings": []}}
        | ({"expected_s": expected[r]} if expected else {})
        for r in range(4)
    }
    return Devices().judge(answers, names), answers


def test_a_slow_device_of_a_kind():
    found, _ = devices((1.0, 1.1, 3.0, 2.0))
    assert [where for where, _ in rows(found, Status.FAULT)] == ["rank 2 (b)"]
    found, _ = devices((1.0, 1.1, 2.0, 2.1))  # kinds differ, and may
    assert not rows(found, Status.FAULT)
    found, _ = devices((None, 1.0, 1.0, 1.0), gemm=(2.0, 1.0, 1.0, 1.0))  # no layer: the GEMM decides
    assert [where for where, _ in rows(found, Status.FAULT)] == ["rank 0 (a)"]


def test_devices_against_the_profile():
    found, _ = devices((1.0, 1.0, 2.0, 2.0), expected=(1.0, 1.0, 1.0, 1.0))
    assert [where for where, _ in rows(found, Status.FAULT)] == ["ranks 2-3 (b)"]
    found, _ = devices((1.0, 1.0, 0.5, 0.5), expected=(1.0, 1.0, 1.0, 1.0))
    assert [where for where, _ in rows(found, Status.WARNING)] == ["ranks 2-3 (b)"]


def test_figures_of_a_busy_machine_are_not_trusted():
    """Slowness within what repeats differ by is a warning; more than that is a fault."""
    for times, expected in (((1.0, 1.1, 3.0, 2.0), None), ((1.0, 1.0, 1.4, 1.4), (1.0,) * 4)):
        found, _ = devices(times, expected=expected, spread=1.5)
        assert not rows(found, Status.FAULT)
        ((where, _),) = rows(found, Status.WARNING)
        assert "rank" in where
        hint = next(f.hint for f in found if f.status is Status.WARNING)
        assert "not to be trusted" in hint and "load of 7.5 on 2 cores" in hint
    found, _ = devices((1.0, 1.1, 4.0, 2.0), spread=1.5)
    assert [where for where, _ in rows(found, Status.FAULT)] == ["rank 2 (b)"]


def test_a_library_that_cannot_be_loaded_is_named():
    _, answers = devices((None, 1.0, 1.0, 1.0))
    answers[0]["unloaded"] = "libcudnn_graph.so.9: cannot open shared object file"
    (found,) = rows(Devices().judge(answers, NAMES), Status.FAULT)
    assert found[0] == "rank 0 (a)" and "libcudnn_graph.so.9" in found[1]


@pytest.mark.parametrize(
    ("error", "survives"),
    [
        (OSError("libcublas.so.13: cannot open shared object file"), True),
        (ImportError("transformer_engine: undefined symbol"), True),
        (RuntimeError("Unable to load any of {libcudnn_graph.so.9.1.0}"), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
    ],
)
def test_times_are_measured_without_a_library(monkeypatch, error, survives):
    def fail(*_unused):
        raise error

    monkeypatch.setattr(checked_devices, "_layer", fail)
    monkeypatch.setattr(checked_devices, "gemm_seconds", lambda *_: 1.0)
    point = {"flops": 1.0, "measured_as": "plan"}
    monkeypatch.setattr(checked_devices, "operating_point", lambda *_: (None, point))
    seat = mock.Mock(local_rank=0, hosts=("a",))
    seat.platform.return_value.device.index = None
    seat.expectations.layer.return_value = None
    if not survives:
        with pytest.raises(RuntimeError, match="illegal"):
            Devices().measure(seat)
        return
    found = Devices().measure(seat)
    assert found["unloaded"] == str(error) and found["layer_s"] is None and found["gemm_s"] == 1.0


def test_throttling_is_a_fault():
    _, answers = devices((1.0,) * 4)
    answers[1]["throttling"]["faults"] = ["hardware thermal slowdown"]
    assert rows(Devices().judge(answers, NAMES), Status.FAULT)[0][0] == "rank 1 (a)"


def test_what_nvidia_smi_says():
    facts = parse("550.54, 84, 1200, 1980, 0x0000000000000040, 0, 300.1, 700.0, 12\n")
    assert reasons_in(facts) == ["hardware thermal slowdown (84 C, 1200 of 1980 MHz)"]
    assert not reasons_in(facts | {"clocks_throttle_reasons.active": "0x4"})  # the power limit, a little
    assert reasons_in(facts | {"clocks_throttle_reasons.active": "0x4", "clocks.sm": "600"})
    assert parse("nonsense") == {} and reasons_in({"clocks_throttle_reasons.active": "[N/A]"}) == []


def links(*pairs, transport="nccl", wanted=None, promised=()):
    check = Links(1.5, Expectations(links=tuple(promised)))
    answers = {r: {"pairs": {}, "transport": transport, "wanted": wanted or len(pairs)} for r in range(4)}
    for first, second, result in pairs:
        answers[first]["pairs"][f"{first}-{second}"] = result
    return check.judge(answers, NAMES)


def test_links_against_the_cluster_file():
    good = {"latency_s": 1e-5, "bytes_per_s": 1e10}
    promise = [LinkExpectation(0, 2, 1e-5, 1.2e10), LinkExpectation(1, 3, 1e-5, 2e10)]
    found = links((0, 2, good), (1, 3, good), promised=promise)
    assert rows(found, Status.FAULT) == [("rank 1 (a) - rank 3 (b)", "10 GB/s, and the cluster file promises 20 GB/s")]
    assert len(rows(found, Status.OK)) == 1
    fast = LinkExpectation(0, 2, 1e-5, 1e9)
    assert rows(links((0, 2, good), promised=[fast]), Status.WARNING)
    slow = good | {"latency_s": 1e-3}
    assert "latency" in rows(links((0, 2, slow), promised=promise), Status.WARNING)[0][1]


def test_a_pair_that_cannot_connect():
    found = links((0, 2, {"error": "timed out"}), (1, 3, {"latency_s": 1e-5, "bytes_per_s": 1e10}), wanted=3)
    assert rows(found, Status.FAULT) == [("rank 0 (a) - rank 2 (b)", "no transfer: timed out")]
    assert rows(found, Status.WARNING)[0][1].startswith("1 pairs were not measured")


def test_rounds_use_a_host_once():
    hosts = ("a", "a", "b", "b", "c", "d")
    pairs = [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5)]
    rounds = rounds_of(pairs, hosts)
    assert sorted(p for r in rounds for p in r) == pairs
    for members in rounds:
        used = [host for pair in members for host in {hosts[rank] for rank in pair}]
        assert len(used) == len(set(used))
    flat = [p for r in rounds for p in r]
    assert flat.index((1, 3)) > flat.index((2, 4))  # a and b are known from 0 - 2


PLAN = Plan(
    ModelShape(4, 64, 4, 2, 32),
    TrainingShape(1, 4),
    (
        Stage((1,), (Replica((0,), (0, 1, 2, 3), "new"),)),
        Stage((3,), (Replica((1, 2), (0, 1, 3), "new"), Replica((3,), (2,), "old"))),
    ),
)


def test_pairs_are_neighbours():
    assert pairs_of(PLAN) == [(0, 1), (0, 2), (0, 3)]


def test_operating_point_follows_the_profile():
    class Seat:
        plan = PLAN
        expectations = Expectations(
            layers=(LayerExpectation("new", 2, 32, "none", 1.0, 2.0),), model=LayerModel(64, 128, 4, 2, 256, 32, "fp32")
        )

    model, point = operating_point(Seat, Seat.expectations.layer("new"))
    assert (point["batch"], point["measured_as"], model.ffn_hidden_size) == (2, "the profile", 128)
    model, point = operating_point(Seat, Seat.expectations.layer("old"))
    assert (point["batch"], point["measured_as"], model.ffn_hidden_size) == (1, "plan", 256)


def test_the_planner_is_found():
    assert planner("inputs.profile_schema").PROFILE_VERSION


def test_expectations_file(tmp_path):
    given = Expectations(
        "abc",
        (LinkExpectation(0, 1, 0.0, 1e9),),
        (LayerExpectation("new", 1, 32, "none", 1.0, 2.0),),
        LayerModel(64, 128, 4, 2, 256, 32, "fp32"),
    )
    (tmp_path / "e.json").write_text(json.dumps(given.to_json()))
    assert load_expectations(tmp_path / "e.json") == given
    assert given.link(1, 0) == given.links[0] and given.link(0, 2) is None
