"""Cases of the ministage schedule: stages and replicas, ministages, every option of the parameter window.

Besides losses and gradients, the parameters after the last step are compared, from checkpoints of the
case and of the reference.
"""

import json
import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan, Replica, ScheduleSpec
from testing.cases import LAYERS, STEPS, Case, build_plan, split_layers, with_replicas
from testing.lab import OBSERVE, Lab, reference_name
from testing.runner import Job, Runner

Row = dict[str, Any]


def _row(replicas: tuple[int, ...], ministages: int, clip: float, window: Row, **more: Any) -> Row:
    return {"replicas": replicas, "ministages": ministages, "clip": clip, "window": window, **more}


# Rows: replicas of each stage, TP, ministages, options of the window.
ROWS: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((1,), 1, 2, {}),
    ((2,), 1, 4, {}),
    ((3,), 1, 3, {"prefetch": 0}),
    ((4,), 1, 2, {"keep_at_turn": False}),
    ((2, 1), 1, 1, {}),
    ((2, 1), 1, 2, {"offload": True}),
    ((1, 3), 1, 4, {"per_layer": False}),
    ((2, 2), 1, 2, {"prefetch": 2}),
    ((1, 2), 2, 2, {}),
    ((2, 2), 1, 4, {"per_microbatch": True, "keep_at_turn": False}),
    ((1, 2, 1), 1, 2, {"offload": True, "per_layer": False}),
    ((2, 1, 1), 1, 2, {"keep_at_turn": False}),
    ((1, 1, 2, 1), 1, 2, {}),
    ((2, 2, 2, 2), 1, 1, {"offload": True, "keep_at_turn": False}),
    ((2, 2), 1, 2, {"update": "at-once"}),
    ((3,), 1, 4, {"update": "at-once", "offload": True}),
    ((1, 2), 2, 1, {"update": "at-once", "prefetch": 0}),
)
CLIP_SOME = 1.0
CLIPS = (1.0, 0.05)  # the second bound is below the gradient norms of all these models, so clipping is active
NO_WINDOW = (((1, 2), 1, 2), ((2,), 1, 3), ((1, 1, 1), 1, 2))
MORE: tuple[Row, ...] = (
    _row((2, 2), 2, 0.05, {"update": "undo"}),
    _row((3,), 4, 1.0, {"update": "undo", "offload": True}),
    _row((1, 2), 2, 0.05, {"update": "undo", "offload_optimizer": True}, tp=2),
    # With one ministage in one stage its norm is the global norm.
    _row((4,), 1, 0.05, {"update": "per-ministage"}),
    _row((2, 1), 2, 100.0, {"update": "per-ministage"}),
    _row((2, 1), 2, 1.0, {"offload": True, "offload_optimizer": True}),
    _row((3,), 2, 0.0, {"update": "at-once", "offload_optimizer": True}),
    # Two microbatches in four stages.
    _row((1, 1, 1, 1), 1, 1.0, {"offload": True}, micro_batch_size=3),
    _row((2, 1, 1), 2, 1.0, {}, micro_batch_size=3),
    _row((2, 1), 2, 0.05, {"update": "undo", "offload_optimizer": True}, precision="bf16"),
    _row((2, 1), 2, 1.0, {"offload": True, "offload_activations": 1.0}),
    _row((1, 2), 2, 1.0, {"offload_activations": 0.5}, tp=2, recompute="none"),
    _row((2,), 3, 0.05, {"update": "undo", "offload_activations": 1.0}),
    # Unequal shares of a stage's state.
    _row((2, 1), 2, 0.05, {}, shares=((3, 1), (1,))),
    _row((3,), 4, 1.0, {"offload": True, "offload_optimizer": True}, shares=((0, 2, 1),)),
    _row((4,), 2, 0.05, {"update": "undo"}, shares=((4, 2, 0, 1),)),
    _row((1, 2), 2, 0.05, {"keep_at_turn": False}, tp=2, shares=((1,), (1, 2.5))),
    _row((2, 2), 4, 0.0, {"update": "at-once", "offload": True}, shares=((1, 0), (1, 5))),
    _row((4,), 1, 0.05, {"update": "per-ministage"}, shares=((1, 2, 3, 4),)),
    _row((2, 2), 2, 1.0, {"per_microbatch": True, "per_layer": False}, shares=((2, 1), (1, 0))),
    _row((2, 1), 2, 0.05, {"update": "undo", "offload_optimizer": True}, precision="bf16", shares=((0, 1), (1,))),
    _row((1, 3), 2, 1.0, {"offload": True}, precision="bf16", shares=((1,), (1, 3, 2))),
    # Several ministages: the reference clips each group of parameters; CLIP_SOME is below only some of the norms.
    _row((2, 1), 2, CLIP_SOME, {"update": "per-ministage"}),
    _row((3,), 3, 0.05, {"update": "per-ministage", "offload": True}),
    _row((1, 2), 2, CLIP_SOME, {"update": "per-ministage", "offload_optimizer": True}, tp=2),
    # A split vocabulary: every stage has rows in its first and its last ministage.
    _row((2, 1), 2, 0.05, {"vocabulary": True, "update": "undo", "offload": True}),
    _row((1, 2), 3, 1.0, {"vocabulary": True, "prefetch": 0}, tp=2, shares=((1,), (2, 1))),
    _row(
        (1, 2, 1),
        2,
        0.0,
        {"vocabulary": True, "vocabulary_shares": [1, 4, 2], "update": "at-once", "prefetch": 2},
        recompute="none",
    ),
    _row((2, 1), 2, CLIP_SOME, {"vocabulary": True, "update": "per-ministage", "offload_optimizer": True}),
    # Tied embeddings: copies in the first and the last ministage, updated last; with a split vocabulary no copies.
    _row((2, 1), 2, 0.05, {"update": "undo", "offload": True}, tied=True),
    _row((1, 2), 2, 0.0, {"update": "at-once"}, tp=2, tied=True),
    _row((2, 1), 1, 0.05, {"vocabulary": True, "update": "per-ministage"}, tied=True),
    # Both copies on the ranks of the first or only stage.
    {"replicas": (2, 1), "tied": True, "layers": ((2, 1), (2,)), "window": {"offload": True}, "clip": 0.05},
    {"replicas": (2, 1), "tied": True, "layers": ((2, 1), (2,)), "window": {"update": "at-once"}, "clip": 0.0},
    _row((2,), 3, 0.05, {"update": "undo"}, tied=True, shares=((3, 1),)),
)
_LONELY = 1000  # one in this many elements of a parameter is left out: its first gradient may be zero up to rounding
_OPTIMIZER_BAR = 0.25  # optimizer tensors in bf16 differ by up to 0.06, exchanged tensors by 1.4


def ministage_cases(seed: int, quick: bool) -> list[Case]:
    """Cases in which every option is on and off, clipping active in half of them."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for i, (sizes, tp, chunks, options) in enumerate(ROWS):
        clip = 0.0 if options.get("update") == "at-once" else CLIPS[i % 2]
        recompute = ("none", "full")[i // 2 % 2]
        window = {"window": True, **options}
        rows.append(_row(sizes, chunks, clip, window, tp=tp, recompute=recompute, precision="fp32"))
    for sizes, tp, chunks in NO_WINDOW:
        rows.append(_row(sizes, chunks, 1.0, {}, tp=tp, recompute="none", precision="fp32"))
    rows += [{**rows[i], "precision": "bf16"} for i in (1, 5, 8)]
    for row in MORE:
        common = {"tp": 1, "recompute": "full", "precision": "fp32"}
        rows.append({**common, **row, "window": {"window": True, **row["window"]}})
    cases = [_case(row, f"{row['precision']}-{i:02}", rng) for i, row in enumerate(rows)]
    return cases[::3] if quick else cases


def _case(row: Row, name: str, rng: random.Random) -> Case:
    """The case of a row, with a stage's layers divided over its ministages, unevenly if needed, some empty."""
    stages = len(row["replicas"])
    plan = build_plan(
        [[row["tp"]] * count for count in row["replicas"]],
        split_layers(stages, False, rng),
        rng,
        even_routing="per_microbatch" in row["window"],  # replicas gather parameters together in each microbatch
        precision=row["precision"],
        sequence_parallel=row["tp"] > 1,
        recompute=row["recompute"],
        distributed_optimizer=True,
        tied=row.get("tied", False),
    )
    assert sum(sum(s.layers) for s in plan.stages) == LAYERS
    if "micro_batch_size" in row:
        plan = _with_larger_microbatches(plan, row["micro_batch_size"])
    layers = row.get("layers") or [divided(sum(s.layers), row["ministages"], rng) for s in plan.stages]
    plan = replace(
        plan,
        stages=tuple(replace(s, layers=cut) for s, cut in zip(plan.stages, layers, strict=True)),
        schedule=ScheduleSpec("ministage", dict(row["window"])),
    )
    if "shares" in row:
        plan = with_shares(plan, row["shares"])
    return Case(name, plan, clip=row["clip"], chosen=row)


def with_shares(plan: Plan, shares: Sequence[Sequence[float]]) -> Plan:
    """The plan with these shares of state, ``[stage][replica]``."""
    return with_replicas(plan, lambda s, q, replica: replace(replica, state_share=float(shares[s][q])))


def _with_larger_microbatches(plan: Plan, size: int) -> Plan:
    """The plan with the same batch in fewer microbatches of ``size`` sequences."""
    count = plan.training.global_batch_size // size

    def routed(s: int, q: int, replica: Replica) -> Replica:
        return replace(replica, microbatches=tuple(range(q, count, len(plan.stages[s].replicas))))

    return with_replicas(replace(plan, training=replace(plan.training, micro_batch_size=size)), routed)


def divided(layers: int, chunks: int, rng: random.Random) -> tuple[int, ...]:
    """Layers per chunk, equal up to the remainder, which goes to random chunks."""
    counts = [layers // chunks] * chunks
    for c in rng.sample(range(chunks), layers % chunks):
        counts[c] += 1
    return tuple(counts)


class MinistageLab(Lab):
    """A lab whose runs save a checkpoint after the last step."""

    def __init__(self, runner: Runner, folder: Path, *, steps: int = STEPS, shared: Path | None = None) -> None:
        super().__init__(runner, folder, steps=steps, shared=shared)
        self._folders: dict[str, Path] = {}

    def reference(self, case: Case) -> Path:
        """Folder of the reference, with a checkpoint after the last step, and clipped by ministages like the case."""
        plan = clipping_plan(case)
        folder = self.shared / reference_name("one-saved", *case.reference, self.steps, plan)
        setup: tuple[str, Row] = ("testing.probe:observe", {"out": str(folder), "gradients": True})
        if plan is not None:
            setup = ("testing.probe:observe_clipping_groups", {"out": str(folder), "plan": plan})
        return self.alone(case, folder, setup, *self._saving(folder), timeout_s=600)

    def _saving(self, folder: Path) -> tuple[str, ...]:
        return ("--save", str(folder / "checkpoint"), "--save-interval", str(self.steps))

    def job(self, case: Case, *more: str, observe: str = OBSERVE, **options: Any) -> Job:
        """The job of a case, with a checkpoint after the last step."""
        # With at-once updates no gradients exist at the end of the iteration.
        size = ("--micro-batch-size", str(case.plan.training.micro_batch_size))
        if case.chosen.get("window", {}).get("update") in ("at-once", "per-ministage"):
            more += ("--rerun-mode", "disabled")  # an update cannot be made twice
        job = super().job(case, *size, *more, observe=observe, **{"gradients": keeps_gradients(case), **options})
        self._folders[case.name] = job.log_dir
        return replace(job, argv=(*job.argv, *self._saving(job.log_dir)), timeout_s=600)

    def parameter_difference(self, case: Case) -> float:
        """Largest relative L2 difference of a parameter after the last step of the case's newest run."""
        return self._difference(self._folders[case.name], self.reference(case))

    def rounding_difference(self, case: Case) -> float:
        """Effect of rounding: the parameter difference of two references with initial weights one last digit apart.

        Both clip by the norm of all gradients.
        """
        folder = self.shared / reference_name("one-other-digits", *case.reference, self.steps)
        setup = ("testing.probe:observe_other_digits", {"out": str(folder)})
        self.alone(case, folder, setup, *self._saving(folder), timeout_s=600)
        return self._difference(folder, self.reference(case))

    def _difference(self, folder: Path, other: Path) -> float:
        """Largest relative L2 difference of a parameter after the last steps of two runs; written to ``folder``."""
        out, last = folder / "parameters.json", f"checkpoint/iter_{self.steps:07}"
        options = {"first": str(folder / last), "second": str(other / last), "out": str(out)}
        setup = ("testing.zorse_cases:compare_parameters", options)
        self.runner.run(Job("parameters", 1, (), folder / "comparison", "testing.probe:nothing", setup))
        return float(json.loads(out.read_text(encoding="utf-8"))["difference"])


def clipping_plan(case: Case) -> Row | None:
    """The plan as JSON values if gradients are clipped by their ministage's norm; None for the global norm."""
    by_ministage = case.chosen.get("window", {}).get("update") == "per-ministage"
    return case.plan.to_json() if by_ministage and case.clip > 0 else None


def keeps_gradients(case: Case) -> bool:
    """Whether the gradients of an iteration exist at its end."""
    return case.chosen.get("window", {}).get("update", "exact") == "exact"


def compare_parameters(*, rank: int, first: str, second: str, out: str) -> None:
    """Write the differences between the tensors of two checkpoints as JSON.

    ``difference`` is the largest relative L2 difference of a parameter, ``optimizer_difference`` that
    of a tensor of the optimizer; a large one means that a checkpoint exchanges tensors.

    Adam divides a gradient by its own size, so an element whose first gradient is zero up to rounding may move by
    the learning rate in either direction.  Of every parameter, the one in ``_LONELY`` elements that differ most are
    therefore left out of ``difference``.  ``linear_qkv.bias`` is also left out: the gradient of the keys' bias in it
    is zero apart from rounding, because the softmax does not depend on that bias.

    Raises:
        ValueError: A tensor is missing, or tensors of the optimizer differ too much.
    """
    from testing.probe import _plain_tensors

    a, b = (_plain_tensors(Path(folder)) for folder in (first, second))
    worst = {False: (-1.0, ""), True: (-1.0, "")}
    for key, expected in b.items():
        if not expected.is_floating_point() or not expected.numel() or key.endswith("linear_qkv.bias"):
            continue
        # The distributed optimizer names main parameters differently, and a chained optimizer adds a prefix.
        alone = re.sub(r"^chained_\d+\.", "", key)
        mine = next((name for name in (key, alone, alone.replace(".fp32_param.", ".param.")) if name in a), None)
        if mine is None:
            raise ValueError(f"{first} lacks {key}")
        of_optimizer = alone.startswith("optimizer")
        apart = (a[mine].double() - expected.double()).abs().flatten()
        if not of_optimizer:
            apart = apart.sort().values[: apart.numel() - ceil(apart.numel() / _LONELY)]
        difference = (apart.norm() / expected.double().norm().clamp(min=1e-30)).item()
        worst[of_optimizer] = max(worst[of_optimizer], (difference, key))
    report = {
        "difference": worst[False][0],
        "worst": worst[False][1],
        "optimizer_difference": worst[True][0],
        "optimizer_worst": worst[True][1],
    }
    Path(out).write_text(json.dumps(report), encoding="utf-8")
    if not 0 <= worst[True][0] < _OPTIMIZER_BAR:
        raise ValueError(f"{first}: {worst[True][1]} differs by {worst[True][0]} from {second}")


def die_in_update(*, rank: int, which: int, update: int, out: str | None = None) -> None:
    """Make rank ``which`` kill itself in its ``update``-th update of a ministage, counted from 0.

    By then the optimizer has stepped, and a part of its state has been copied to the host.
    """
    from testing.probe import observe

    observe(rank=rank, out=out)
    if rank != which:
        return
    from megatron_het.features.window.chunk import HostCopy
    from megatron_het.features.window.optimizer import ChunkedOptimizer

    step, store = ChunkedOptimizer._step, HostCopy.store
    updates: list[Any] = []
    stores: list[Any] = []

    def counted_step(self: Any, *positional: Any, **keywords: Any) -> None:
        updates.append(None)
        stores.clear()
        step(self, *positional, **keywords)

    def counted_store(self: Any, *positional: Any, **keywords: Any) -> None:
        stores.append(None)
        if len(updates) == update + 1 and len(stores) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        store(self, *positional, **keywords)

    ChunkedOptimizer._step = counted_step
    HostCopy.store = counted_store
