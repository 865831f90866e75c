"""Ministages and the parameter window train as stock Megatron in one process does.

``benchmarks/parity.py --schedule ministage`` has the combinations; here are a few that touch every part:
several stages, TP, offload, updates at the next opening and at once, checkpoints.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.lowering.programs import build
from megatron_het.plan import Placement, Plan, ScheduleSpec, Stage
from megatron_het.schedule.ir import Kind, Op
from testing.cases import Case, Weights, build_plan, common_flags, with_schedule
from testing.compare import compare
from testing.runner import Finished, Job
from testing.zorse_cases import MinistageLab, keeps_gradients, ministage_cases, with_shares
from tests.functional.selected import tiers

FP32_BAR = 1e-5
NAMES = ("fp32-05", "fp32-08", "fp32-12", "fp32-14", "fp32-26", "fp32-30", "fp32-36", "fp32-40")
NAMES += ("fp32-48", "fp32-49", "fp32-50", "fp32-51", "fp32-52", "fp32-53", "fp32-54")  # split vocabulary, ties
NAMES += ("fp32-55", "fp32-56", "fp32-57")  # both copies of tied embeddings on one stage
CASES = {case.name: case for case in ministage_cases(0, quick=False) if case.name in NAMES}
FULL = {"fp32-05", "fp32-08", "fp32-12", "fp32-14", "fp32-26", "fp32-30", "fp32-48", "fp32-53", "fp32-54"}


@pytest.fixture(scope="module")
def lab(lab_of: Callable[[type[MinistageLab]], MinistageLab]) -> MinistageLab:
    return lab_of(MinistageLab)


@pytest.mark.parametrize("name", tiers(NAMES, FULL))
def test_equals_one_process(name: str, lab: MinistageLab):
    case = CASES[name]
    lab.reference(case)
    done = lab.runner.run(lab.job(case))
    found = compare(done.job.log_dir, case.plan, lab.reference(case), gradients=keeps_gradients(case))
    assert max(found.loss, found.validation) <= FP32_BAR, found
    if keeps_gradients(case):
        assert found.gradient <= FP32_BAR, found
    assert lab.parameter_difference(case) <= FP32_BAR
    check_collectives(case, done.job.log_dir)


def check_collectives(case: Case, folder: Path) -> None:
    """The window ran exactly one collective per layer that the program gathers or reduces."""
    placement = Placement(case.plan)
    program = build(placement.plan)[False]
    for rank in range(case.plan.world_size):
        where = placement.locate(rank)
        window = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))["window"]
        ops = program.for_device(where.stage, where.replica)
        alone = len(case.plan.stages[where.stage].replicas) == 1
        for kind, figure in ((Kind.PARAM_GATHER, "gathers"), (Kind.GRAD_REDUCE, "reductions")):
            layers = [_buckets(case, where.stage, op) for op in ops if op.kind == kind]
            assert window[figure] == (0 if alone else sum(layers)), (rank, figure)


def _buckets(case: Case, stage: int, op: Op) -> int:
    """Layers that an operation covers; without layers there may be an embedding or an output layer."""
    chunks = case.plan.stages[stage].layers
    is_split = "vocabulary" in case.plan.schedule.parameters
    first = op.chunk == 0 and (is_split or stage == 0)
    last = op.chunk == len(chunks) - 1 and (is_split or (stage, op.chunk) == case.plan.path[-1])
    if not chunks[op.chunk]:
        return int(first or last)
    start, stop = (0, chunks[op.chunk]) if op.start < 0 else (op.start, op.stop)
    # Upstream gives a copy of tied embeddings a bucket of its own.
    has_copy = (first and start == 0) or (last and stop == chunks[op.chunk])
    return stop - start + (case.plan.model.tied_embeddings and not is_split and has_copy)


def test_from_flags(lab: MinistageLab, tmp_path: Path):
    """Without a plan file Megatron's own flags give the layout, and ours the window."""
    even = build_plan([[1, 1], [1, 1]], [2, 2], random.Random(0), distributed_optimizer=True)
    case = with_schedule(Case("like-flags", even), "ministage", 2, {"window": True, "offload": True})
    layout = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer"
    ours = "--het-schedule ministage --het-offload-parameters --dist-ckpt-optim-fully-reshardable"
    flags = (
        *common_flags(*case.reference, steps=lab.steps),
        *lab.start_flags(case.weights),
        *layout.split(),
        *ours.split(),
    )
    observe = ("testing.probe:observe", {"out": str(tmp_path), "gradients": True})
    report = ("--het-report", str(tmp_path))
    done = lab.runner.run(Job("flags", 4, (*flags, *report), tmp_path, setup=observe))
    found = compare(done.job.log_dir, case.plan, lab.reference(case))
    assert max(found.loss, found.validation, found.gradient) <= FP32_BAR, found
    window = json.loads((tmp_path / "rank-0.json").read_text(encoding="utf-8"))["window"]
    assert window["gathers"] > 0


# -- updates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", tiers(["at-once", "undo"], ["at-once"]))
def test_updates_come_early_where_stages_have_different_numbers_of_ministages(update: str, lab: MinistageLab):
    """The second stage updates its last ministage before its first one gives the other stage any gradient."""
    window = {"window": True, "update": update}
    plan = replace(under_window(**window), stages=_cut_into((3,), (1, 1)))
    clip = 0.0 if update == "at-once" else 1.0
    case = Case(f"fewer-ministages-{update}", plan, clip=clip, chosen={"window": window, "clip": clip})
    found = lab.differences(case, gradients=False)
    assert max(found.loss, found.validation) <= FP32_BAR, found
    assert lab.parameter_difference(case) <= FP32_BAR


STEPS, SAVED_AT = 6, 2
CLIP = "2.7"
_SHARDED = build_plan([[1, 1], [1]], [3, 2], random.Random(0), even_routing=False, distributed_optimizer=True)


def _cut_into(*layers: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(replace(s, layers=cut) for s, cut in zip(_SHARDED.stages, layers, strict=True))


def under_window(precision: str = "fp32", **window: Any) -> Plan:
    """Two ministages in each of two stages of 2 and 1 ranks."""
    return replace(
        _SHARDED,
        stages=_cut_into((2, 1), (1, 1)),
        training=replace(_SHARDED.training, precision=precision),
        schedule=ScheduleSpec("ministage", {"window": True, **window}),
    )


def train(
    lab: MinistageLab, plan: Plan, folder: Path, *more: str, setup: Any = None, check: bool = True, fresh: bool = False
) -> Finished:
    """A short training that saves every SAVED_AT iterations; ``fresh`` from random weights."""
    if "--load" not in more and not fresh:
        more = (*more, *lab.start_flags(Weights()))
    options = {"precision": plan.training.precision, "setup": setup, "timeout_s": 240.0, "grace_s": 90.0}
    job = lab.training(plan, folder, *more, steps=STEPS, every=SAVED_AT, **options)
    return lab.runner.run(job, check=check)


def assert_equal_at_the_end(lab: MinistageLab, first: Path, second: Path, out: Path, within: float = 0.0) -> None:
    """Bit-equal parameters and optimizer states after the last step, or within an absolute difference."""
    last = f"checkpoints/iter_{STEPS:07}"
    found = lab.compare_checkpoints(first / last, second / last, out)
    assert found["missing"] == [] and max(found["different"].values(), default=0.0) <= within, found["different"]
    assert any("exp_avg_sq" in key for key in found["keys"])


@pytest.fixture(scope="module")
def exact(lab: MinistageLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with exact updates, clipping in some iterations."""
    folder = tmp_path_factory.mktemp("exact") / "run"
    log = train(lab, under_window(offload=True, offload_optimizer=True), folder, "--clip-grad", CLIP).log()
    norms = [float(norm) for norm in re.findall(r"grad norm: ([0-9.]+)", log)]
    assert len(norms) == STEPS and min(norms) < float(CLIP) < max(norms), norms
    return folder


def test_undone_updates_are_bit_equal_to_exact_ones(lab: MinistageLab, exact: Path, tmp_path: Path):
    plan = under_window(offload=True, offload_optimizer=True, update="undo")
    train(lab, plan, tmp_path / "undo", "--clip-grad", CLIP)
    assert_equal_at_the_end(lab, exact, tmp_path / "undo", tmp_path)


@pytest.mark.full
def test_killed_in_the_middle_of_an_update(lab: MinistageLab, exact: Path, tmp_path: Path):
    """The optimizer has stepped, half of its state has left: the last checkpoint goes on as if nothing was.

    It is loaded ministage by ministage.
    """
    # The second ministage's update of the fifth iteration, made in the sixth; two per iteration before.
    victim, update = 1, 9
    setup = ("testing.zorse_cases:die_in_update", {"which": victim, "update": update})
    plan = under_window(offload=True, offload_optimizer=True)
    killed = train(lab, plan, tmp_path / "killed", "--clip-grad", CLIP, setup=setup, check=False)
    assert killed.returncodes[victim] == -9
    assert all(code > 0 for rank, code in enumerate(killed.returncodes) if rank != victim)
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(2 * SAVED_AT)
    watch = ("testing.watches:watch_window", {"out": str(tmp_path)})
    train(lab, plan, tmp_path / "again", "--clip-grad", CLIP, "--load", str(checkpoints), setup=watch)
    assert_equal_at_the_end(lab, exact, tmp_path / "again", tmp_path)
    for rank in range(plan.world_size):
        loading = json.loads((tmp_path / f"watch-{rank}.json").read_text(encoding="utf-8"))["loading"]
        report = json.loads((tmp_path / "again" / f"rank-{rank}.json").read_text(encoding="utf-8"))
        assert_held_one_at_a_time(loading, report["window"])


def assert_held_one_at_a_time(loading: dict[str, int], training: dict[str, int]) -> None:
    """A stage of two ministages, both of which are open at the turn of an iteration, was loaded one after the other."""
    assert 0 < loading["peak_parameter_bytes"] < training["peak_parameter_bytes"]
    assert 0 < loading["peak_optimizer_bytes"] <= training["peak_optimizer_bytes"]
    assert loading["peak_bytes"] < training["peak_bytes"]


def test_start_and_save_never_hold_the_whole_stage(lab: MinistageLab, tmp_path: Path):
    """Ministages are built, wrapped, cut and stored one after the other; the optimizer opens one at a time.

    So does a checkpoint: parameters and state of one ministage are on the device while it is taken.
    """
    alone = build_plan([[1]], [5], random.Random(0), distributed_optimizer=True)
    stage = replace(alone.stages[0], layers=(1,) * 5)
    offloaded = {"window": True, "offload": True, "offload_optimizer": True, "offload_activations": 1.0}
    plan = replace(alone, stages=(stage,), schedule=ScheduleSpec("ministage", offloaded))
    setup = ("testing.watches:watch_window", {"out": str(tmp_path)})
    train(lab, plan, tmp_path / "run", setup=setup, fresh=True)
    watched = json.loads((tmp_path / "watch-0.json").read_text(encoding="utf-8"))
    window = json.loads((tmp_path / "run" / "rank-0.json").read_text(encoding="utf-8"))["window"]
    two_of_five = window["peak_parameter_bytes"]  # the first or the last one has a vocabulary besides
    assert two_of_five < watched["start_bytes"] < 2 * two_of_five
    assert watched["host_activation_bytes"] > 0
    saving = watched["saving"]
    assert 0 < saving["peak_parameter_bytes"] < two_of_five
    assert 0 < saving["peak_optimizer_bytes"] <= window["peak_optimizer_bytes"]
    assert saving["peak_bytes"] <= window["peak_bytes"]


@pytest.mark.parametrize("clip", ["0", CLIP])
def test_fp16_skips_and_clips_as_without_a_window(lab: MinistageLab, tmp_path: Path, clip: str):
    """The loss scale doubles every iteration until gradients overflow; then a step is skipped."""
    scale = 256 * under_window("fp16").loss_divisor
    flags = f"--fp16 --clip-grad {clip} --initial-loss-scale {scale} --loss-scale-window 1 --hysteresis 1".split()
    exact = under_window("fp16", offload=True)
    undo = under_window("fp16", offload=True, offload_optimizer=True, update="undo")
    plans = {
        "plain": replace(exact, schedule=ScheduleSpec("ministage", {})),
        "exact": with_shares(exact, ((0, 1), (1,))),
        "undo": with_shares(undo, ((3, 1), (1,))),
    }
    norms = {}
    for name, plan in plans.items():
        log = train(lab, plan, tmp_path / name, *flags, fresh=True).log()
        norms[name] = [float(norm) for norm in re.findall(r"grad norm: ([0-9.]+)", log)]
        skipped = re.findall(r"skipped iterations: +(\d+)", log)
        assert {"0", "1"} <= set(skipped), skipped
    # A window adds up the norm in another order: clipping by it may change a last bit of a weight in fp16, up to 0.25.
    within = 0.0 if clip == "0" else 2**-13
    for name in ("exact", "undo"):
        assert norms[name] == pytest.approx(norms["plain"], rel=1e-3)
        assert_equal_at_the_end(lab, tmp_path / "plain", tmp_path / name, tmp_path / f"{name}-compared", within)
