"""Coordinator and participants over a real store, as threads: who fails, hangs or dies is named, and hides nothing."""

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.doctor import participant
from megatron_het.doctor.__main__ import _Rank
from megatron_het.doctor.check import Check, Names, Status
from megatron_het.doctor.numerics import (
    LOSSES,
    TOLERANCE,
    Numerics,
    _failure,
    difference,
    fixed_model_losses,
    flags_of,
    one_process,
    tiny_plan,
)
from megatron_het.features.experts.spec import check_expert_parallel
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, check_plan
from megatron_het.store import StoreServer
from testing.cases import with_replicas

WORLD = 3
NAMES = Names(("a", "a", "b"))


@dataclass
class Scripted(Check):
    """Every rank answers its number, unless the script says otherwise."""

    name: str = "scripted"
    script: dict[int, Any] = field(default_factory=dict)
    limit_s: float = 5.0
    needs_all: bool = False

    def measure(self, seat):
        return self.script.get(seat, lambda: {"rank": seat})()

    def judge(self, answers, names):
        assert all(answer == {"rank": rank} for rank, answer in answers.items())
        return [self.ok(names.of(answers), f"{len(answers)} answers")]


@pytest.fixture
def store():
    server = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    server.start()
    yield server
    server.close()


class Run:
    """The coordinator here, participants on threads; ranks of ``absent`` never come."""

    def __init__(self, store, checks, absent=(), limit_s=60.0, dies=None):
        self.left: list[int] = []
        self.codes: dict[int, int] = {}
        threads, hearts = [], []
        for rank in range(WORLD):
            if rank in absent:
                continue
            store.put(participant.Keys.here(rank), {"host": NAMES.hosts[rank]})
            hearts.append(participant.Heart(store, rank))
            if dies == rank:
                hearts.pop().stop()
                continue
            thread = threading.Thread(target=self.take_part, args=(store, checks, rank, limit_s), daemon=True)
            thread.start()
            threads.append(thread)
        leader = participant.Coordinator(store, checks, WORLD, limit_s)
        self.here = leader.meet(1.0)
        self.findings = leader.run(NAMES)
        leader.close(participant.exit_code(self.findings))
        self.lost = leader.lost
        for thread in threads:
            thread.join(timeout=20.0)
        for heart in hearts:
            heart.stop()

    def take_part(self, store, checks, rank, limit_s):
        one = participant.Participant(store, lambda index: rank, checks, rank, leave=self.left.append)
        self.codes[rank] = one.run(limit_s)

    def rows(self, name):
        return [(f.status, f.where, f.what) for f in self.findings if f.check == name]


def test_all_well(store):
    run = Run(store, [Scripted("one"), Scripted("two", needs_all=True)])
    assert run.rows("one") == run.rows("two") == [(Status.OK, "all ranks", "3 answers")]
    assert run.codes == {0: 0, 1: 0, 2: 0} and not run.lost
    assert participant.verdict(run.findings) == "fit"


def test_a_failing_check_hides_no_other(store):
    def fail():
        raise SystemExit("refused")

    run = Run(store, [Scripted("one", script={1: fail}), Scripted("two", needs_all=True)])
    assert run.rows("one") == [
        (Status.FAULT, "rank 1 (a)", "SystemExit: refused"),
        (Status.OK, "rank 0 (a), rank 2 (b)", "2 answers"),
    ]
    assert run.rows("two") == [(Status.OK, "all ranks", "3 answers")]
    assert run.codes == {0: 1, 1: 1, 2: 1}


def test_a_judgement_that_fails_hides_no_other(store):
    run = Run(store, [Scripted("one", script={1: lambda: {"rank": 7}}), Scripted("two")])
    assert run.rows("one")[0][0] is Status.FAULT and "cannot be judged" in run.rows("one")[0][2]
    assert run.rows("two") == [(Status.OK, "all ranks", "3 answers")]


def test_a_rank_that_hangs_is_named_with_the_place(store):
    def hang():
        while not store.has(participant.Keys.answer(0, 2)):  # until the watchdog has spoken
            time.sleep(0.01)
        return {"rank": 2}

    checks = [Scripted("one", script={2: hang}, limit_s=1.0), Scripted("two", needs_all=True), Scripted("three")]
    run = Run(store, checks)
    status, where, what = run.rows("one")[0]
    assert (status, where) == (Status.FAULT, "rank 2 (b)")
    assert what.startswith("slow or stuck") and "test_meeting.py" in what
    assert run.rows("two") == [(Status.NOT_RUN, "all ranks", "it needs all ranks, and rank 2 (b) gave no answer")]
    assert run.rows("three") == [(Status.OK, "ranks 0-1 (a)", "2 answers")]
    assert run.codes[0] == run.codes[1] == 1


def test_a_rank_that_dies_is_named(store, monkeypatch):
    monkeypatch.setattr(participant, "_SILENT_S", 1.5)
    run = Run(store, [Scripted("one", limit_s=30.0), Scripted("two")], dies=1)
    assert run.rows("one")[0][:2] == (Status.FAULT, "rank 1 (a)") and "has died" in run.rows("one")[0][2]
    assert run.rows("two") == [(Status.OK, "rank 0 (a), rank 2 (b)", "2 answers")]


def test_a_rank_that_never_comes_is_named(store):
    run = Run(store, [Scripted("one"), Scripted("two", needs_all=True)], absent=[2])
    assert sorted(run.here) == [0, 1]
    assert run.rows("ranks") == [(Status.FAULT, "rank 2 (b)", "did not start within 1 s")]
    assert run.rows("one") == [(Status.OK, "ranks 0-1 (a)", "2 answers")]
    assert run.rows("two")[0][0] is Status.NOT_RUN


def test_without_time_checks_are_not_run_and_say_so(store):
    run = Run(store, [Scripted("one")], limit_s=1.0)
    assert run.rows("one") == [(Status.NOT_RUN, "all ranks", "no time is left (--limit-s)")]
    assert participant.exit_code(run.findings) == 1


def test_the_launcher_ends_the_job(store):
    leader = participant.Coordinator(store, [Scripted("one")], 1, 60.0, is_ending=lambda: True)
    assert leader.run(NAMES)[0].what == "the launcher has ended the job"


def test_silence_of_rank_0_is_bounded(store):
    with pytest.raises(participant.MeetingError, match="rank 0"):
        participant.hear(store, "nothing", 0.2)


def test_table_shows_faults_first_and_bounds_rows():
    check = Scripted("links")
    rows = [check.ok("all ranks", "fine"), *[check.fault(f"rank {i}", "bad", "Mend it") for i in range(20)]]
    text = participant.table(rows, 7.0)
    lines = text.splitlines()
    assert "FAULT" in lines[2] and "9 more rows" in text
    assert lines[-1] == "verdict: NOT FIT: 20 fault(s) (7 s)"
    assert max(map(len, lines)) <= 80


class Closed:
    """A standard output whose reader has left."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


def test_the_verdict_reaches_all_when_nobody_reads_the_table(monkeypatch, tmp_path):
    codes: list[int] = []
    findings = [Scripted().fault("rank 0", "broken")]
    leader = SimpleNamespace(run=lambda names: findings, figures={}, close=codes.append)
    monkeypatch.setattr("sys.stdout", Closed())
    options = SimpleNamespace(limit_s=60.0, json=tmp_path / "doctor.json")
    _Rank(options, 0, WORLD)._coordinate(leader, NAMES)
    assert codes == [1] and (tmp_path / "doctor.json").is_file()


# The tiny model under a plan's topology, its flags, and what its losses are taken for.


def plan(schedule="1f1b", parameters=None, chunks=1, microbatches=64, tp=1, ep=1):
    layers = (8,) * chunks
    first = tuple(m for m in range(microbatches) if m % 3)
    second = tuple(m for m in range(microbatches) if m % 3 == 0)
    return Plan(
        ModelShape(16 * chunks, 4096, 32, 8, 4096, ffn_hidden_size=11008),
        TrainingShape(2, 2 * microbatches, precision="bf16", sequence_parallel=tp > 1, distributed_optimizer=True),
        (
            Stage(layers, (Replica(tuple(range(tp)), tuple(range(microbatches)), "new", ep=ep),)),
            Stage(layers, (Replica((tp,), first, "new"), Replica((tp + 1,), second, "old"))),
        ),
        ScheduleSpec(schedule, parameters or {}),
    )


@pytest.mark.parametrize(
    "given",
    [
        plan(),
        plan(tp=2, ep=2),
        plan("ministage", {"window": True}, chunks=2),
        plan("slimpipe", {"slices": 4}, microbatches=4),
        plan("zb-h1"),
        plan("zb-v", chunks=2),
    ],
    ids=lambda p: p.schedule.name,
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tiny_plans_are_sound_and_small(given, recompute):
    given = replace(given, training=replace(given.training, recompute=recompute))
    if recompute == "full":
        given = with_replicas(given, lambda s, _, r: replace(r, recompute_layers=given.stages[s].layers))
    check_plan(given)
    tiny = tiny_plan(given)
    check_plan(tiny)
    check_plan_alone(tiny)
    check_expert_parallel(tiny, 0)  # the tiny model is dense
    build(tiny)
    assert tiny.schedule == given.schedule and tiny.world_size == given.world_size
    assert tiny.num_microbatches <= 16 and tiny.model.num_layers <= 8 and tiny.model.hidden_size <= 128
    assert all(r.microbatches for s in tiny.stages for r in s.replicas)
    alone = one_process(tiny)
    check_plan(alone)
    assert alone.model == tiny.model and alone.training.global_batch_size == tiny.training.global_batch_size
    words = flags_of(tiny, ["--transformer-impl", "local"])
    assert words[words.index("--num-layers") + 1] == str(tiny.model.num_layers) and "--bf16" in words


def judged(*losses, alone=((5.5, 5.4, 5.3),), precision="fp32", own=()):
    answers = {r: {"losses": list(v), "precision": precision, "stored": [*LOSSES]} for r, v in enumerate(losses)}
    for r, values in own:
        answers[r]["stored"] = list(values)
    for r, values in enumerate(alone):
        answers[r] |= {"alone": list(values), "problem": ""}
    return Numerics().judge(answers, Names(tuple("ab"[: len(losses)])))


def test_losses_that_agree():
    assert [f.status for f in judged((), (5.5, 5.4, 5.30001))] == [Status.OK]
    assert [f.status for f in judged((), (5.5, 5.4, 5.31))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4, 5.31), precision="bf16")] == [Status.OK]
    assert [f.status for f in judged((), (5.5, float("nan"), 5.3))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4))] == [Status.FAULT]


def test_a_kind_that_computes_differently():
    found = judged((), (5.5, 5.4, 5.3), alone=((5.5, 5.4, 5.3), (5.5, 5.4, 5.2)))
    assert [(f.status, f.where) for f in found] == [(Status.FAULT, "rank 1 (b)")]
    assert "losses alone" in found[0].what


def test_a_device_that_computes_wrongly_like_all_others():
    """Its kind and the plan agree with it; the stored losses do not."""
    good, off = list(LOSSES), [LOSSES[0], LOSSES[1], 1.01 * LOSSES[2]]
    found = judged((), (5.5, 5.4, 5.3), own=((0, good), (1, off)))
    assert [(f.status, f.where) for f in found] == [(Status.FAULT, "rank 1 (b)")]
    assert "should be 2.9881, 1.9218, 1.54275" in found[0].what
    assert [f.status for f in judged((), (5.5, 5.4, 5.3), own=((1, [*LOSSES[:2], float("nan")]),))] == [Status.FAULT]
    assert [f.status for f in judged((), (5.5, 5.4, 5.3), own=((1, off),), precision="bf16")] == [Status.OK]


def test_stored_losses_are_those_of_this_machine_in_every_precision(monkeypatch):
    assert difference(fixed_model_losses("cpu", torch.float64), LOSSES) < 1e-9
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert 0 < difference(fixed_model_losses("cpu", dtype), LOSSES) < TOLERANCE[precision] / 3
    real = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim: 1.05 * real(scores, dim))
    assert difference(fixed_model_losses("cpu", torch.float32), LOSSES) > TOLERANCE["bf16"]


def test_difference():
    assert difference([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert difference([1.1], [1.0]) == pytest.approx(0.1)
    assert difference([], []) == float("inf")


def test_what_is_slow_is_not_said_to_hang(tmp_path: Path) -> None:
    """Its reason is the last line that matters, not an earlier one."""
    log, slow = "ValueError: first\nhet: waiting for rank 3\nlast words\n", "is slow or stuck, not done in time"
    for lines, reason in ((log, "het: waiting for rank 3"), ("first\nWARNING: no log\nhet: plan 3: 1f1b\n", "first")):
        (tmp_path / "plan.log").write_text(lines, encoding="utf-8")
        text = _failure("plan", None, tmp_path)
        assert text == f"the tiny training {slow} (a larger --limit-s gives it more): {reason}"
