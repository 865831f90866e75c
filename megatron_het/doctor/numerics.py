"""Three iterations of a tiny model under the plan's topology, compared with one process on every kind of device.

The run uses the training's entry, with the real groups, schedule, transfers and features; only the model is
tiny.  In addition one device of every kind trains the same model alone, which distinguishes errors of a kind of device
from errors of the topology.  Every device also trains a fixed model whose correct losses are stored.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, dtype_of
from megatron_het.doctor.participant import hear
from megatron_het.features.registry import check_plan_alone, layer_flags, shrunk
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.plan.validate import check_plan
from megatron_het.store import free_port

# Three steps of a fixed tiny model on one device, whose losses are stored here.
#
# It uses neither random numbers nor Megatron.  So a device, a driver or a library that computes wrongly is found on
# its rank, even if all kinds of devices of the job are wrong in the same way.

LOSSES = (2.988096077980702, 1.921796714504176, 1.542753363577767)  # in double precision
_ROWS, _COLUMNS, _STEP = 48, 32, 0.1
_SCALE = 2.5  # scale of the weights: large enough that the loss depends on all computations


def fixed_model_losses(device: Any, dtype: Any) -> list[float]:
    """Losses of causal attention and an MLP, computed in ``dtype``, with plain gradient descent in at least fp32."""
    import torch

    kept = torch.promote_types(dtype, torch.float32)

    def fixed(rows: int, columns: int, turn: float) -> torch.Tensor:
        """Pseudo-random numbers that are equal on all devices: computed on the host in double precision."""
        return torch.sin(turn * torch.arange(1, rows * columns + 1, dtype=torch.float64) ** 1.3).reshape(rows, columns)

    inputs, target = (fixed(_ROWS, _COLUMNS, turn).to(device, kept) for turn in (0.7, 1.9))
    shapes = ((_COLUMNS, 3 * _COLUMNS), (_COLUMNS, 2 * _COLUMNS), (2 * _COLUMNS, _COLUMNS))
    weights = [
        (fixed(rows, columns, 0.3 + i) * _SCALE / math.sqrt(rows)).to(device, kept).requires_grad_()
        for i, (rows, columns) in enumerate(shapes)
    ]
    future = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=device).triu(1)
    found = []
    for _ in LOSSES:
        qkv, up, down = (weight.to(dtype) for weight in weights)
        query, key, value = (inputs.to(dtype) @ qkv).chunk(3, dim=1)
        scores = (query @ key.T / math.sqrt(_COLUMNS)).to(kept).masked_fill(future, -math.inf)
        attended = scores.softmax(dim=1).to(dtype) @ value
        out = torch.nn.functional.silu(attended @ up) @ down
        loss = (out.to(kept) - target).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(_STEP * gradient)
        found.append(loss.item())
    return found


# A tiny model for three iterations under the topology of a plan, and the same model in one process.
#
# Stages, replicas, ranks, schedule and its parameters are the plan's; sizes are small.  Weights are drawn by name,
# so that both start from the same weights under any plan.

ITERATIONS = 3
_HEAD_DIM, _VOCABULARY = 8, 250
_MOST_LAYERS = 2  # of a chunk
_TOKENS = 8  # of a slice of a rank, at least


def tiny_plan(plan: Plan) -> Plan:
    """The plan with a tiny dense model, and with as few microbatches as its schedule and its routes allow."""

    def few(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(n, _MOST_LAYERS) for n in layers)

    sizes = math.lcm(*(r.tp for s in plan.stages for r in s.replicas))
    slices = build(plan)[False].shape.slices
    parts = math.lcm(*(r.cp for s in plan.stages for r in s.replicas))
    stages = tuple(
        replace(
            s,
            layers=few(s.layers),
            replicas=tuple(replace(r, ep=1, recompute_layers=few(r.recompute_layers)) for r in s.replicas),
        )
        for s in plan.stages
    )
    heads = sizes * parts * (2 if sizes * parts < 4 else 1)
    length = slices * parts * sizes * _TOKENS
    model = ModelShape(
        num_layers=sum(n for s in stages for n in s.layers),
        hidden_size=heads * _HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=heads,
        seq_length=length,
        ffn_hidden_size=heads * _HEAD_DIM * 2,
        tied_embeddings=plan.model.tied_embeddings,
    )
    whole = replace(plan, model=shrunk(model, plan.model), stages=stages, predicted=None, notes="")
    if plan.training.micro_batch_sizes:
        return whole
    most = plan.num_microbatches
    whole = replace(whole, training=replace(plan.training, micro_batch_size=1, global_batch_size=most))
    # The shortest prefix of the microbatches in which every replica has one.
    kept = max(max(min(r.microbatches, default=0) for r in s.replicas) for s in plan.stages) + 1
    while kept < most:
        try:
            found = whole.first_microbatches(kept)
            check_plan(found)
            check_plan_alone(found)
            build(found)
            return found
        except PlanError:
            kept *= 2
    return whole


def one_process(plan: Plan) -> Plan:
    """The model of a tiny plan on one rank, without any feature of plans."""
    training = plan.training
    alone = TrainingShape(
        1 if not training.micro_batch_sizes else training.micro_batch_size,
        training.global_batch_size,
        precision=training.precision,
        micro_batch_sizes=training.micro_batch_sizes,
    )
    replica = Replica((0,), tuple(range(plan.num_microbatches)))
    return Plan(plan.model, alone, (Stage((plan.model.num_layers,), (replica,)),), ScheduleSpec("1f1b"))


def flags_of(plan: Plan, machine: Sequence[str]) -> list[str]:
    """Megatron's flags for a tiny plan on synthetic data.

    Args:
        plan: A tiny plan.
        machine: The flags that the machines of the job need.
    """
    model = plan.model
    text = f"""
        --num-layers {model.num_layers} --hidden-size {model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}
        --num-attention-heads {model.num_attention_heads} --seq-length {model.seq_length}
        --max-position-embeddings {model.seq_length} --position-embedding-type rope --normalization RMSNorm --swiglu
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
        --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --make-vocab-size-divisible-by 32 --mock-data
        --split 90,10,0 --calculate-per-token-loss --lr 1e-3 --lr-decay-style constant --clip-grad 1.0
        --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234
        --distributed-timeout-minutes 1 --dist-ckpt-optim-fully-reshardable
        """
    words = text.split()
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    for flag, value in layer_flags(model).items():
        words += [f"--{flag}", str(value)]
    if plan.training.precision in ("bf16", "fp16"):
        words.append(f"--{plan.training.precision}")
    return [*words, *machine]


TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""Largest relative difference of a loss that counts as rounding, by precision."""
_POLL_S = 0.1


@dataclass
class Numerics(Check):
    """Losses of the tiny training."""

    name: str = field(default="numerics", init=False)
    limit_s: float = field(default=75.0, init=False)
    needs_all: bool = field(default=True, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Returns this rank's losses, and those of a single process if this rank is the first of its kind."""
        platform = seat.platform()
        machine = _common_flags(seat, [list(f.words) for f in platform.flags() if f.required])
        plan = tiny_plan(seat.plan)
        # Processes end early enough to report their own logs, before this rank counts as lost.
        deadline_s = time.monotonic() + self.limit_s - 8.0
        if seat.rank == 0:
            seat.store.put("port", free_port())  # on its host, where the tiny training meets
        port = int(hear(seat.store, "port", 20.0))
        runs = {"plan": _start("plan", plan, machine, seat=seat, port=port, rank=seat.rank, world_size=len(seat.hosts))}
        alike = [r for s in seat.plan.stages for q in s.replicas for r in q.ranks if q.device_of(r) == seat.kind]
        if seat.rank == min(alike):  # one rank per kind of device trains alone
            runs["alone"] = _start(
                "alone", one_process(plan), machine, seat=seat, port=free_port(), rank=0, world_size=1
            )
        codes = _wait(runs, deadline_s)
        if codes["plan"] != 0:
            raise RuntimeError(_failure("plan", codes["plan"], seat.folder))
        precision = plan.training.precision
        answer = {"losses": _losses(seat.folder / "plan", seat.rank), "precision": precision}
        answer["stored"] = fixed_model_losses(platform.device, dtype_of(plan))
        if "alone" in runs:
            problem = _failure("alone", codes["alone"], seat.folder) if codes["alone"] != 0 else ""
            answer |= {"alone": _losses(seat.folder / "alone", 0), "problem": problem}
        return answer

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Compares kinds of devices with each other, and the plan's run with them."""
        precision = next(iter(answers.values()))["precision"]
        bound = TOLERANCE[precision]
        alone = {rank: a["alone"] for rank, a in answers.items() if a.get("alone")}
        found = [
            self.fault(names.of([rank]), f"the tiny model alone: {a['problem']}")
            for rank, a in answers.items()
            if a.get("problem")
        ]
        farthest, wrong = self._judge_stored(answers, names, bound)
        found += wrong
        planned = {rank: a["losses"] for rank, a in answers.items() if a["losses"]}
        if not planned or not alone:
            return found or [self.fault("all ranks", "no rank has seen a loss")]
        reference_rank, reference = next(iter(alone.items()))
        text = f"{ITERATIONS} iterations of a tiny model, {precision}"
        worst = 0.0
        for what, losses in (("alone", alone), ("under the plan", planned)):
            for rank, values in losses.items():
                error = difference(values, reference)
                worst = max(worst, error)
                if not error <= bound:  # NaN as well
                    where = f"{names.of([rank])}"
                    detail = f"{text}: losses {what} {_in_words(values)}, alone on {names.of([reference_rank])} "
                    found.append(self.fault(where, f"{detail}{_in_words(reference)}: {error:.1e} apart"))
        if not found:
            kinds = f"{len(alone)} kind(s) of devices alone, and the plan's topology"
            agree = f"losses agree within {worst:.1e}, and each device's with stored ones within {farthest:.1e}"
            found.append(self.ok("all ranks", f"{text}: {kinds}: {agree} (bound {bound:.0e})"))
        return found

    def _judge_stored(self, answers: Answers, names: Names, bound: float) -> tuple[float, list[Finding]]:
        """The largest difference from the stored losses, and the ranks that are beyond the bound."""
        errors = {rank: difference(answer["stored"], LOSSES) for rank, answer in answers.items()}
        found = []
        for rank, error in errors.items():
            if not error <= bound:  # NaN as well
                text = f"a fixed model's losses are {_in_words(answers[rank]['stored'])}, and should be "
                hint = "This device, its driver or its libraries compute wrongly"
                found.append(self.fault(names.of([rank]), f"{text}{_in_words(LOSSES)}: {error:.1e} apart", hint))
        return max(errors.values()), found


def difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite when one is shorter."""
    if len(values) != len(reference):
        return float("inf")
    errors = [abs(a - b) / abs(b) for a, b in zip(values, reference)]
    return float("nan") if any(e != e for e in errors) else max(errors, default=float("inf"))


def _in_words(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _common_flags(seat: Seat, mine: list[list[str]]) -> list[str]:
    """The flags that any rank's machine needs: a common run can only use what all nodes have."""
    seat.store.put(f"flags/{seat.rank}", mine)
    if seat.rank == 0:
        ranks = range(len(seat.hosts))
        found = {words[0]: words for rank in ranks for words in hear(seat.store, f"flags/{rank}", 30.0)}
        seat.store.put("flags", [word for words in found.values() for word in words])
    return list(hear(seat.store, "flags", 40.0))


def _start(
    name: str, plan: Plan, machine: Sequence[str], seat: Seat, port: int, rank: int, world_size: int
) -> subprocess.Popen[bytes]:
    """Starts a separate process, because a run leaves state in Megatron, and has to be ended if it hangs."""
    folder = seat.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / f"plan-{rank}.json")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1") if world_size > 1 else "127.0.0.1"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(seat.local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    words = [*flags_of(plan, machine), "--het-plan", str(folder / f"plan-{rank}.json"), "--het-report", str(folder)]
    if world_size > 1 and seat.transport != "auto":
        words += ["--het-transport", seat.transport]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.gpt_training", *words]
    with (seat.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait(runs: Mapping[str, subprocess.Popen[bytes]], deadline_s: float) -> dict[str, int | None]:
    """Exit codes; None for a process that had to be ended."""
    while time.monotonic() < deadline_s and any(run.poll() is None for run in runs.values()):
        time.sleep(_POLL_S)
    codes = {name: run.poll() for name, run in runs.items()}
    for run in runs.values():
        if run.poll() is None:
            run.kill()
            run.wait()
    return codes


def _failure(name: str, code: int | None, folder: Path) -> str:
    """Returns how a run ended, with the end of its log."""
    said = [line.strip() for line in (folder / f"{name}.log").read_text(errors="replace").splitlines()]
    lines = [line for line in said if line and not line.startswith(("WARNING", "het: plan "))]  # which give no reason
    slow = "is slow or stuck, not done in time (a larger --limit-s gives it more)"
    words = slow if code is None else f"ended with exit code {code}"
    told = [line for line in lines if line.startswith(("megatron_het:", "het:")) or "Error" in line]
    return f"the tiny training {words}: {(told or lines or ['it gave no reason'])[-1]}"


def _losses(folder: Path, rank: int) -> list[float]:
    """Losses in a rank's report; empty if there are none."""
    path = folder / f"rank-{rank}.json"
    if not path.is_file():
        return []
    return [float(loss) for _, loss in json.loads(path.read_text(encoding="utf-8"))["losses"]]
