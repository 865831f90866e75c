"""Checkpoints do not depend on the plan: any plan, or stock Megatron, loads what another saved."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, ScheduleSpec, save_plan
from testing.cases import MICROBATCHES, Weights, common_flags
from testing.compare import reported_losses
from testing.lab import Lab
from testing.runner import Finished, Job
from testing.zorse_cases import with_shares
from tests.functional.selected import new_case, tiers

STEPS, SAVED_AT = 6, 3
BAR = 1e-5
SCALE_BITS = 20


def plan(name: str, sizes: list[list[int]], layers: list[Any], **more: Any) -> Plan:
    return new_case(name, sizes, layers, **{"even_routing": False, **more}).plan


@dataclass(frozen=True)
class Kind:
    """Two plans of one kind of training: what is saved under one is loaded under the other."""

    first: Plan
    second: Plan
    family: str = "llama"

    @property
    def weights(self) -> Weights:
        model = self.first.model
        return Weights(self.first.training.precision, model.tied_embeddings, model.num_layers, self.family)


def _kind(first: tuple[list, list], second: tuple[list, list], **more: Any) -> Kind:
    return Kind(plan("first", *first, **more), plan("second", *second, **more))


def with_ministages(under: Plan, layers: tuple[tuple[int, ...], ...], **window: Any) -> Plan:
    """The plan with every stage cut into ministages, under a parameter window."""
    stages = tuple(replace(s, layers=cut) for s, cut in zip(under.stages, layers, strict=True))
    return replace(under, stages=stages, schedule=windowed(**window))


def windowed(**window: Any) -> ScheduleSpec:
    return ScheduleSpec("ministage", {"window": True, **window})


DIVIDED: dict[str, Any] = {"distributed_optimizer": True}
TIED: dict[str, Any] = {"tied": True, **DIVIDED}
TP: dict[str, Any] = {"sequence_parallel": True, **DIVIDED}
SLICED = ScheduleSpec("slimpipe", {"slices": 4, "vocabulary": True})
SHARED = windowed(offload=True, update="undo", vocabulary=True, vocabulary_shares=[1, 3])
OTHER_SHARES = ScheduleSpec("1f1b", {"vocabulary": True, "vocabulary_shares": [5, 2]})
OFFLOADED = windowed(offload=True, offload_optimizer=True, update="undo")
KINDS = {
    # Ranks of TP 1 write their rows as two parts, each as large as one of TP 2.
    "split-vocabulary": Kind(
        plan("first", [[1], [2, 1]], [2, 3], schedule=SLICED, **TIED), plan("second", [[1], [1]], [4, 1], **TIED)
    ),
    # Stages with other numbers of rows, and under a window.
    "vocabulary-shares": Kind(
        plan("first", [[1], [2, 1]], [(1, 1), (2, 1)], schedule=SHARED, **DIVIDED),
        plan("second", [[1], [1, 1]], [3, 2], schedule=OTHER_SHARES, **DIVIDED),
    ),
    "tied": _kind(([[1], [2, 1]], [2, 3]), ([[2, 1], [1], [1]], [1, 2, 2]), tied=True),
    # The offsets, one number per head, are padded, and tied embeddings are in a bucket after an odd number of them.
    "padded-bucket": replace(_kind(([[1], [2, 1]], [1, 4]), ([[1], [1]], [3, 2]), **TIED), family="softmax-offset"),
    "distributed-optimizer": _kind(([[1, 1], [2, 1]], [2, 3]), ([[1], [4], [1, 1]], [1, 3, 1]), **TP),
    "bf16": _kind(([[1], [2, 1]], [2, 3]), ([[2], [1, 1]], [4, 1]), precision="bf16", **DIVIDED),
    # Both copies of the tied weights are on rank 0, in two chunks.
    "chunks-in-a-v": Kind(
        plan("first", [[2, 1], [1]], [(1, 2), (0, 2)], schedule=ScheduleSpec("zb-v"), **TIED),
        plan("second", [[1], [1, 1]], [2, 3], **TIED),
    ),
    # Dense layers and layers of experts, with biases that Megatron moves apart from the optimizer.  Experts are halves
    # or quarters of a replica's ranks, or on every rank.
    "experts": Kind(
        plan("first", [[1], [2, 1]], [2, 3], ep=[[1], [2, 1]], **TP),
        plan("second", [[4], [1, 1]], [3, 2], ep=[[4], [1, 1]], **TP),
        family="deepseek",
    ),
    # Experts have another optimizer than all other weights on the ranks of one stage, and on no rank of the other plan.
    "experts-over-replicas": Kind(
        plan("first", [[1, 1], [1]], [3, 2], ep=[[2, 2], [1]], even_routing=True, **DIVIDED),
        plan("second", [[2], [1]], [2, 3], ep=[[2], [1]], **TP),
        family="deepseek",
    ),
    "experts-in-a-window": Kind(
        plan(
            "first", [[1, 1], [1]], [(2, 1), (1, 1)], ep=[[2, 2], [1]], even_routing=True, schedule=OFFLOADED, **DIVIDED
        ),
        plan("second", [[1], [1, 1]], [2, 3], ep=[[1], [2, 2]], even_routing=True, **DIVIDED),
        family="deepseek",
    ),
    "experts-undivided": Kind(
        plan("first", [[1, 1], [1]], [3, 2], ep=[[2, 2], [1]], even_routing=True),
        plan("second", [[2], [1]], [2, 3], ep=[[2], [1]], sequence_parallel=True),
        family="deepseek",
    ),
    # The last stage has a copy of the embedding, and no table of an output layer.
    "later-tokens": replace(
        _kind(([[1], [2, 1]], [2, 3]), ([[2, 1], [1], [1]], [1, 2, 2]), family="later-tokens", **TIED),
        family="later-tokens",
    ),
    # Rank 0, which writes what is common, keeps no state; the replica of TP 2 has a copy of its own.
    "ministages": Kind(
        with_shares(
            plan("first", [[1, 2, 1], [1]], [(2, 1), (1, 1)], schedule=OFFLOADED, **DIVIDED), ((0, 2, 1), (1,))
        ),
        plan("second", [[1], [1, 1]], [2, 3], **DIVIDED),
    ),
}
FULL = {
    "split-vocabulary",
    "experts-over-replicas",
    "experts-in-a-window",
    "padded-bucket",
    "chunks-in-a-v",
    "later-tokens",
}


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    finished: Finished
    checkpoints: Path
    losses: dict[int, float]

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07}"


Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains under a plan, or with None in one stock process, and saves every SAVED_AT iterations."""

    def train(
        under: Plan | None,
        weights: Weights,
        *more: str | Path,
        load: Path | None = None,
        steps: int = STEPS,
        decay_steps: int = STEPS,
        save_interval: int = SAVED_AT,
        start: bool = True,
    ) -> Run:
        folder = tmp_path_factory.mktemp("run")
        flags = [*common_flags(weights, by_samples=True, steps=steps), *lab.data_flags()]
        # A null tokenizer reads no vocabulary file, but with one Megatron compares more flags with a checkpoint's.
        flags += ["--lr-decay-samples", str(decay_steps * MICROBATCHES), "--vocab-file", "not-read"]
        flags += ["--save", str(folder / "checkpoints"), "--save-interval", str(save_interval)]
        flags += [str(word) for word in more]
        if load is not None:
            flags += ["--load", str(load)]
        elif start:
            flags += lab.start_flags(weights)
        if under is not None:
            save_plan(under, folder / "plan.json")
            flags += ["--het-plan", str(folder / "plan.json"), "--het-report", str(folder)]
        finished = lab.runner.run(
            Job(
                "checkpoint",
                under.world_size if under else 1,
                tuple(flags),
                folder,
                setup=("testing.probe:observe", {"out": str(folder)}),
                timeout_s=300.0,
            )
        )
        return Run(finished, folder / "checkpoints", losses_of(folder, under, steps))

    return train


def losses_of(folder: Path, under: Plan | None, steps: int = STEPS) -> dict[int, float]:
    if under is not None:
        return reported_losses(folder)
    path = folder / "losses-0.json"
    kept = json.loads(path.read_text())["losses"] if path.exists() else []
    return {steps - len(kept) + 1 + i: loss for i, loss in enumerate(kept)}


def assert_same(lab: Lab, first: Path, second: Path, folder: Path) -> None:
    found = lab.compare_checkpoints(first, second, folder)
    assert found["missing"] == [] and found["different"] == {}
    assert any(key.startswith("decoder.layers.4.") for key in found["keys"]), found["keys"]
    assert any("exp_avg_sq" in key and "layers.4." in key for key in found["keys"]), found["keys"]


def assert_agree(found: dict[int, float], whole: dict[int, float], bar: float = BAR) -> None:
    assert found == pytest.approx({iteration: whole[iteration] for iteration in found}, rel=bar, abs=0.0)


def assert_goes_on(resumed: Run, whole: Run, bar: float = BAR) -> None:
    """The iterations after the checkpoint have the losses of the run that saved it; bit for bit with a bar of 0."""
    assert sorted(resumed.losses) == list(range(SAVED_AT + 1, STEPS + 1))
    assert_agree(resumed.losses, whole.losses, bar)


@pytest.fixture(scope="module", params=tiers(KINDS, FULL))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def whole(train: Train, kind: Kind) -> Run:
    return train(kind.first, kind.weights)


def stock_flags(kind: Kind) -> list[str]:
    return ["--use-distributed-optimizer"] if kind.first.training.distributed_optimizer else []


# Loading without training in between; less training than the schedule of the checkpoint was made for.
AGAIN: dict[str, Any] = {"steps": SAVED_AT, "save_interval": SAVED_AT - 1}
STEP = ("--ckpt-step", str(SAVED_AT), "--override-opt-param-scheduler")


def test_saved_by_stock_megatron_and_back(lab: Lab, train: Train, kind: Kind, whole: Run, tmp_path: Path):
    """Loading and saving again without a step in between changes no bit."""
    stock = train(None, kind.weights, *STEP, *stock_flags(kind), load=whole.checkpoints, **AGAIN)
    assert_same(lab, whole.checkpoint(SAVED_AT), stock.checkpoint(SAVED_AT), tmp_path / "a")
    back = train(kind.first, kind.weights, *STEP, load=stock.checkpoints, **AGAIN)
    assert_same(lab, whole.checkpoint(SAVED_AT), back.checkpoint(SAVED_AT), tmp_path / "b")


@pytest.mark.full
def test_saved_under_another_plan(lab: Lab, train: Train, kind: Kind, whole: Run, tmp_path: Path):
    second = train(kind.second, kind.weights, *STEP, load=whole.checkpoints, **AGAIN)
    assert_same(lab, whole.checkpoint(SAVED_AT), second.checkpoint(SAVED_AT), tmp_path)


@pytest.mark.parametrize("under", tiers(["second plan", "stock Megatron"], ["stock Megatron"]))
def test_resuming_elsewhere_continues_the_losses(train: Train, kind: Kind, whole: Run, under: str):
    chosen = kind.second if under == "second plan" else None
    flags = ["--ckpt-step", str(SAVED_AT), "--ckpt-fully-parallel-load", *([] if chosen else stock_flags(kind))]
    resumed = train(chosen, kind.weights, *flags, load=whole.checkpoints)
    assert_goes_on(resumed, whole, 2e-3 if kind.weights.precision == "bf16" else BAR)


@pytest.mark.full
def test_stock_checkpoint_resumes_under_a_plan(train: Train):
    kind = KINDS["distributed-optimizer"]
    stock = train(None, kind.weights, *stock_flags(kind))
    assert_goes_on(train(kind.second, kind.weights, "--ckpt-step", str(SAVED_AT), load=stock.checkpoints), stock)


def test_resumes_bit_for_bit_under_unequal_shares(lab: Lab, train: Train, tmp_path: Path):
    """The state is gathered for a checkpoint either over the group that trains, or on the first rank."""
    kind = KINDS["ministages"]
    whole = train(kind.first, kind.weights)
    more = ("--ckpt-step", str(SAVED_AT), "--distrib-optim-fully-reshardable-mem-efficient")
    resumed = train(kind.first, kind.weights, *more, load=whole.checkpoints)
    assert_goes_on(resumed, whole, bar=0.0)
    assert_same(lab, whole.checkpoint(STEPS), resumed.checkpoint(STEPS), tmp_path)


def test_slices_resume_bit_for_bit(train: Train):
    """Three microbatches per replica and iteration: iterations of a run must not alternate in how they round."""
    base = plan("slices", [[1, 1], [1, 1]], [2, 3], even_routing=True)
    under = replace(base, schedule=ScheduleSpec("slimpipe", {"slices": 4}))
    whole = train(under, Weights())
    assert_goes_on(train(under, Weights(), "--ckpt-step", str(SAVED_AT), load=whole.checkpoints), whole, bar=0.0)


DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")


def test_dropout_resumes_bit_for_bit_under_the_same_topology(train: Train):
    """Random states come back per rank, also under another routing; moments do, though they are not saved again."""
    kind = KINDS["distributed-optimizer"]
    whole = train(kind.first, kind.weights, *DROPOUT)
    step = ("--ckpt-step", str(SAVED_AT), "--no-save-optim")
    resumed = train(kind.first, kind.weights, *DROPOUT, *step, load=whole.checkpoints)
    assert_goes_on(resumed, whole, bar=0.0)
    fresh = train(kind.first, kind.weights, *DROPOUT, *step, "--no-load-rng", load=whole.checkpoints)
    assert fresh.losses != resumed.losses, "dropout does not depend on the random-number state"


@pytest.mark.full
def test_dropout_resumes_from_a_non_persistent_checkpoint(train: Train):
    """Megatron loads iteration 5, although 2 is asked for; the random-number states are those of 5, too."""
    kind = KINDS["distributed-optimizer"]
    flags = (*DROPOUT, "--non-persistent-save-interval", "5", "--non-persistent-ckpt-type", "global")
    whole = train(kind.first, kind.weights, *flags, save_interval=2)
    resumed = train(kind.first, kind.weights, *flags, "--ckpt-step", "2", load=whole.checkpoints)
    assert sorted(resumed.losses) == [6]
    assert resumed.losses == {i: whole.losses[i] for i in resumed.losses}


def test_replicas_start_alike_without_a_checkpoint(train: Train):
    """What one replica saves goes on like all of them, of different TP and with tied embeddings."""
    kind = KINDS["tied"]
    whole = train(kind.first, kind.weights, start=False)
    assert_goes_on(train(None, kind.weights, "--ckpt-step", str(SAVED_AT), load=whole.checkpoints), whole)


@pytest.mark.parametrize("distributed", tiers([False, True], [True]))
def test_saved_before_the_first_update(train: Train, distributed: bool):
    """An fp16 run that has only skipped iterations has an optimizer without moments."""
    made = plan("scale", [[1], [1]], [3, 2], precision="fp16", distributed_optimizer=distributed)
    weights = Weights("fp16")
    scaling = ("--hysteresis", "1", "--initial-loss-scale", str(2.0**SCALE_BITS))
    alone = ("--loss-scale", "16", *(["--use-distributed-optimizer"] if distributed else []))
    resume: dict[str, Any] = {"save_interval": STEPS + 1}
    whole = train(made, weights, *scaling, save_interval=1)
    skipped = skips(whole)
    assert skipped[0] == "1" and "0" in skipped
    step = ("--ckpt-step", "1")
    assert skips(train(made, weights, *scaling, *step, load=whole.checkpoints, **resume)) == skipped[1:]
    assert set(skips(train(None, weights, *alone, *step, load=whole.checkpoints, **resume))) == {"0"}
    if not distributed:  # which stock Megatron cannot even save
        stock = train(None, weights, *scaling, "--initial-loss-scale", str(2.0**40), steps=2, save_interval=2)
        assert "0" not in skips(stock)
        more = ("--loss-scale", "16", "--override-opt_param-scheduler")
        assert set(skips(train(made, weights, *more, load=stock.checkpoints, **resume))) == {"0"}


def skips(run: Run) -> list[str]:
    return re.findall(r"skipped iterations: +(\d+)", run.finished.log())
