"""Compares memory, FLOPs and messages of dry runs with real runs, and their memory with the planner's prediction.

``python -m benchmarks.dry_run --json OUT``.  Small plans of every schedule and feature run for real over gloo, counted
by the tracker of dry runs, and every rank of them as a dry run.  ``bytes_difference`` is the largest difference of any
figure: bytes of every category at the peak, bytes to every peer and of every collective; ``flops_difference`` likewise.

Big plans of dense models run dry with fused kernels: one rank of the first, the middle
and the last kind (``--kinds``: of every kind).  ``planner_memory_error`` is the largest relative difference between
the planner's prediction for a rank, without its reserve for allocator and libraries, and the peak of the rank's dry
run.  ``seconds_per_rank_kind`` is the processor time of the longest dry run, without the import of Megatron;
``wall_seconds_per_rank_kind`` is its wall time, which is longer where other work has the processor.

Ranks of an existing ``OUT`` that are not run again are kept, so that partial runs add up.
"""

import fnmatch
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, save, scratch, write_report
from benchmarks.published.calibrate import SIZES
from megatron_het.plan import Plan, save_plan
from testing.cases import Case, build_plan, common_flags, with_schedule
from testing.feature_cases import with_sizes, zero_case
from testing.runner import Job, JobError, Runner
from testing.slimpipe_cases import PLAIN, sliced_case
from testing.zorse_cases import with_shares
from tools.planner.cli.dry_run import rank_flags, rank_kinds
from tools.planner.costs import build
from tools.planner.costs.candidate import Candidate, Group, GroupMemory, Stage
from tools.planner.costs.estimate import estimator_of
from tools.planner.costs.layer import MEGATRON_HET, WITHOUT_TE
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster
from tools.planner.inputs.model import Model, load_model

# Big plans, whose memory the planner predicts and dry runs count.


_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "2B": (18, 2048, 16384, 8, 1, 256128),
    "7B": (32, 4096, 11008, 32, 32, 32000),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "13B": (40, 5120, 13824, 40, 40, 32000),
    "34B": (48, 8192, 22016, 64, 8, 32000),
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
    "8x7B": (32, 4096, 14336, 32, 8, 32000),
    "8x22B": (56, 6144, 16384, 48, 8, 32768),
}
# Experts, and how many of them a token goes to; each is as wide as the MLP above.
_EXPERTS: dict[str, tuple[int, int]] = {"8x7B": (8, 2), "8x22B": (8, 2)}


_GPU = "H100-SXM"  # others run without Transformer Engine here


@dataclass(frozen=True)
class BigPlan:
    """A model on a cluster of one kind of GPU."""

    model: str
    tokens: int
    layers: tuple[int, ...]
    tp: int
    replicas: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    offload: bool = False
    zero: int = 1
    micro_batch_size: int = 1
    gpu: str = _GPU
    tied: bool = False
    kept: int = 0  # layers of each stage that full recomputation keeps
    flag: str = ""  # Megatron's, of gradients

    @property
    def name(self) -> str:
        """The plan's readable name."""
        parts = [self.model, f"{self.tokens // 1024}k", self.schedule, f"{len(self.layers)} stages", f"TP {self.tp}"]
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [self.gpu] if self.gpu != _GPU else []
        parts += [f"{self.kept} kept"] * bool(self.kept) + [self.flag] * bool(self.flag)
        return ", ".join(parts + ["offload"] * self.offload + ["tied"] * self.tied)

    @property
    def world_size(self) -> int:
        """GPUs."""
        return len(self.layers) * self.replicas * self.tp

    def model_file(self) -> dict[str, Any]:
        """The model as a model file has it."""
        shape = dict(zip(SIZES, _SHAPES[self.model], strict=True))
        assert sum(self.layers) == shape["num_layers"], self.name
        experts = {}
        if self.model in _EXPERTS:
            count, top_k = _EXPERTS[self.model]
            experts = {"experts": {"count": count, "top_k": top_k, "ffn_hidden_size": shape["ffn_hidden_size"]}}
        return {**experts, **shape} | {
            "name": self.model,
            "precision": "fp16" if self.gpu.startswith("V100") else "bf16",
            "tied_embeddings": self.tied,
            "seq_length": self.tokens,
            "global_batch_size": self.replicas * self.microbatches * self.micro_batch_size,
            "distributed_optimizer": self.zero >= 1,
            "sequence_parallel": self.sequence_parallel and self.tp > 1,
            "recompute": [self.recompute],
            "flags": {self.flag: True} if self.flag else {},
        }

    def candidate(self) -> Candidate:
        """The point of the search space."""
        stages = tuple(Stage(count, (Group(0, self.tp, self.replicas),)) for count in self.layers)
        sizes = self.chunks, self.slices, self.zero
        whole = Candidate(stages, self.micro_batch_size, self.recompute, self.schedule, *sizes, self.offload)
        return whole.keeping([[self.kept / count] for count in self.layers]) if self.kept else whole

    def planned(self) -> tuple[Plan, list[GroupMemory]]:
        """The plan, and the predicted memory of every stage."""
        nodes = -(-self.world_size // 8)
        node = {"gpu": self.gpu, "count": nodes, "gpus_per_node": 8, "zone": "here", "network_bytes_per_s": 50e9}
        cluster = Cluster.model_validate({"name": "big", "nodes": [node]})
        runtime = MEGATRON_HET if self.gpu == _GPU else WITHOUT_TE
        estimator = estimator_of(cluster, Model.model_validate(self.model_file()), None, runtime)
        candidate = self.candidate()
        estimate = estimator.estimate(candidate)
        if estimate is None:
            raise PlannerError("benchmark", "plan", self.name, "no estimate")
        plan = build.build_plan(estimator, candidate, estimate)
        priced = estimator.estimate(build.candidate_of(plan, cluster)[0])
        return plan, list(priced.memory if priced is not None else ())

    def write(self, folder: Path) -> Plan:
        """Write ``plan.json`` and ``model.yaml`` into a folder."""
        import yaml

        folder.mkdir(parents=True, exist_ok=True)
        plan, _ = self.planned()
        save_plan(plan, folder / "plan.json")
        (folder / "model.yaml").write_text(yaml.safe_dump(self.model_file()), encoding="utf-8")
        return plan


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple((s + 1) * layers // stages - s * layers // stages for s in range(stages))


def big_plans() -> list[BigPlan]:
    """All of them."""
    return [
        BigPlan("7B", 8192, _even(32, 4), 2, replicas=2),
        BigPlan("7B", 8192, _even(32, 2), 1, replicas=4, recompute="full", microbatches=2),
        BigPlan("7B", 8192, (9, 8, 8, 7), 1, replicas=2, zero=0),
        BigPlan("7B", 32768, _even(32, 4), 4, recompute="full"),
        BigPlan("8B", 8192, _even(32, 4), 2, replicas=2, microbatches=4),
        BigPlan("8B", 131072, _even(32, 4), 8, schedule="slimpipe", slices=8, microbatches=1),
        BigPlan("8B", 32768, _even(32, 2), 4, schedule="slimpipe", slices=8),
        BigPlan("8B", 8192, (10, 6, 8, 8), 2, schedule="interleaved", chunks=4, microbatches=8),
        BigPlan("8B", 4096, _even(32, 2), 1, replicas=4, schedule="ministage", chunks=4),
        BigPlan("8B", 4096, (24, 8), 2, replicas=2, schedule="ministage", chunks=8, recompute="full", offload=True),
        BigPlan("8B", 1048576, _even(32, 4), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
        BigPlan("13B", 8192, _even(40, 4), 4, replicas=2),
        BigPlan("13B", 8192, _even(40, 8), 1, replicas=2, microbatches=8),
        BigPlan("13B", 8192, _even(40, 2), 2, replicas=4, schedule="ministage", chunks=4, recompute="full"),
        BigPlan("34B", 8192, _even(48, 4), 4, replicas=2, sequence_parallel=False),
        BigPlan("34B", 16384, _even(48, 8), 4, microbatches=8),
        BigPlan("34B", 8192, _even(48, 4), 4, schedule="interleaved", chunks=3, microbatches=8),
        BigPlan("70B", 8192, _even(80, 8), 8, replicas=2, microbatches=8),
        BigPlan("70B", 8192, _even(80, 16), 4, replicas=2, microbatches=16),
        BigPlan("70B", 8192, _even(80, 4), 8, recompute="selective", microbatches=4),
        BigPlan("70B", 32768, _even(80, 8), 8, recompute="full", microbatches=8),
        BigPlan("70B", 131072, _even(80, 8), 8, schedule="slimpipe", slices=16, microbatches=1),
        BigPlan("405B", 8192, _even(126, 16), 8, replicas=8, microbatches=16),
        BigPlan("405B", 131072, _even(126, 16), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
        BigPlan("7B", 4096, _even(32, 4), 2, schedule="zb-h1", microbatches=8),
        BigPlan("8B", 4096, _even(32, 4), 4, schedule="zb-h1", microbatches=8, recompute="full"),
        BigPlan("8B", 4096, _even(32, 4), 4, schedule="zb-v", chunks=2, microbatches=8, recompute="selective"),
        BigPlan("8x7B", 4096, _even(32, 4), 4, schedule="v-half", chunks=2, microbatches=8, recompute="full"),
        BigPlan("8x7B", 8192, _even(32, 4), 4, replicas=2),
        BigPlan("8x7B", 32768, _even(32, 4), 8, recompute="full"),
        BigPlan("8x7B", 8192, _even(32, 2), 4, replicas=2, schedule="ministage", chunks=4, recompute="full"),
        BigPlan("8x22B", 8192, _even(56, 8), 8, replicas=2, microbatches=8),
        BigPlan("8x22B", 131072, _even(56, 8), 8, schedule="slimpipe", slices=16, microbatches=1, recompute="full"),
        BigPlan("2B", 2048, _even(18, 2), 1, replicas=2, recompute="full", tied=True),
        BigPlan("7B", 2048, _even(32, 8), 2, gpu="V100-32", zero=0),
        BigPlan("7B", 4096, _even(32, 8), 4, gpu="V100-32", recompute="selective", microbatches=8),
        BigPlan("7B", 8192, _even(32, 4), 8, gpu="V100-32", recompute="full"),
        BigPlan("8B", 4096, _even(32, 4), 8, gpu="V100-32", schedule="interleaved", chunks=2, microbatches=8),
        BigPlan("8B", 2048, _even(32, 4), 4, gpu="V100-32", replicas=2, tied=True),
        BigPlan("7B", 4096, _even(32, 4), 4, gpu="A100-80", microbatches=8),
        BigPlan("13B", 4096, _even(40, 4), 4, gpu="A100-80", replicas=2, recompute="selective"),
        BigPlan("8B", 4096, _even(32, 4), 2, gpu="A100-80", replicas=2, recompute="full", tied=True),
        BigPlan("2B", 2048, (18,), 1, replicas=2, tied=True),
        BigPlan("8B", 8192, _even(32, 4), 2, replicas=2, recompute="mlp"),
        BigPlan("8B", 131072, _even(32, 4), 8, schedule="slimpipe", slices=8, microbatches=1, recompute="mlp"),
        BigPlan("7B", 4096, _even(32, 8), 4, gpu="V100-32", recompute="mlp", microbatches=8),
        BigPlan("8B", 8192, (32,), 1, microbatches=1, schedule="ministage", chunks=8, recompute="mlp", offload=True),
        BigPlan("8B", 4096, _even(32, 4), 4, gpu="A100-80", recompute="full", kept=4),
        BigPlan("8B", 4096, _even(32, 4), 2, replicas=2, flag="grad-reduce-in-bf16"),
        BigPlan("7B", 2048, _even(32, 4), 4, gpu="V100-32", flag="accumulate-allreduce-grads-in-fp32"),
        BigPlan(
            "7B", 2048, _even(32, 2), 4, gpu="A100-80", schedule="ministage", chunks=4, recompute="full", offload=True
        ),
        BigPlan(
            "7B", 2048, _even(32, 2), 4, gpu="V100-32", schedule="ministage", chunks=4, recompute="full", offload=True
        ),
        BigPlan(
            "7B", 2048, _even(32, 2), 4, replicas=2, gpu="V100-32", schedule="ministage", chunks=4, recompute="full"
        ),
        BigPlan("7B", 2048, _even(32, 4), 8, gpu="V100-32", schedule="slimpipe", slices=4),
    ]


_EXCHANGE = {"context_exchange": True, "exchange_idle": True, "exchange_keep": True}
_SLICED_CASES: dict[str, dict[str, Any]] = {
    "slimpipe": {"distributed_optimizer": True},
    "slimpipe exchange, vocabulary, offload": {"exchange": _EXCHANGE, "slices": 8, "vocabulary": True, "offload": 0.5},
    "slimpipe chunks, TP 2, thrifty layers": {"chunks": 2, "tp": 2, "thrifty": True, "recompute": "selective"},
    "context parallel 2": {"schedule": "1f1b", "slices": 1, "cp": 2},
    "1f1b vocabulary": {"schedule": "1f1b", "slices": 1, "vocabulary": True, "tied": True},
}


def _plain(sizes: list[list[int]], layers: list[int], **training: Any) -> Case:
    return Case("", build_plan(sizes, layers, random.Random(1), **training))


def _window(sizes: list[list[int]], layers: list[int], **parameters: Any) -> Case:
    case = _plain(sizes, layers, distributed_optimizer=True, recompute="full", precision="bf16")
    return with_schedule(case, "ministage", 2, {"window": True, **parameters})


def _unequal() -> dict[str, Case]:
    """Cases with unequal microbatches, depths, shares of the state and ZeRO stages, which Megatron does not have."""
    rng = random.Random(3)
    sizes = with_sizes(_plain([[1, 1], [1]], [2, 2], distributed_optimizer=True), (1, 3, 2), rng)
    depths = with_schedule(_plain([[1], [1], [1]], [1, 1, 1]), "1f1b", 1, {"depths": [2, 1]})
    shares = _window([[1, 1], [1]], [1, 1], per_layer=False)
    found = {
        "1f1b, unequal microbatches": sizes,
        "1f1b, depths, messages over host memory": replace(depths, transport="staged"),
        "ministage, unequal shares of the state": replace(shares, plan=with_shares(shares.plan, ((3, 1), (1,)))),
        "data-parallel, ZeRO-3, all offloaded": zero_case(
            (1, 1), 3, 2, {"window": {"offload": True, "offload_optimizer": True}}, rng
        ),
    }
    return found | {f"data-parallel, ZeRO-{zero}": zero_case((1, 1), zero, 2, {}, rng) for zero in range(4)}


def _experts() -> dict[str, Case]:
    """Cases with experts, each of which gets every token, so that a dry run knows the number of tokens."""
    plain = {
        "1f1b, experts, mixed TP in a stage": _plain([[1], [2, 1]], [2, 3], sequence_parallel=True),
        "ministage with a window, experts": _window([[1, 1], [1]], [1, 1]),
        "zero-bubble, experts, full recompute": with_schedule(_plain([[1], [1]], [2, 2]), "zb-h1", 1, {}),
    }
    sliced = sliced_case({**PLAIN, "slices": 4}, "", random.Random(4))
    return {
        name: replace(case, family="every-expert") for name, case in ({**plain, "slimpipe, experts": sliced}).items()
    }


def dry_run_cases() -> list[Case]:
    """Returns all cases, with unique names."""
    mixed = _plain([[1], [2, 1]], [2, 3], sequence_parallel=True, tied=True, even_routing=False)
    found = {
        "1f1b, TP by stage": _plain([[1], [2], [1]], [1, 2, 2]),
        "1f1b, distributed optimizer, bf16": _plain(
            [[1, 1], [1, 1]], [2, 3], distributed_optimizer=True, precision="bf16", recompute="full"
        ),
        "1f1b, mixed TP in a stage": mixed,
        "1f1b, selective recompute, fp16": _plain([[2], [2]], [2, 2], precision="fp16", recompute="selective"),
        "gpipe": with_schedule(_plain([[1], [1]], [2, 2]), "gpipe", 1, {}),
        "interleaved": with_schedule(_plain([[1], [1]], [1, 1], distributed_optimizer=True), "interleaved", 2, {}),
        "zero-bubble": with_schedule(_plain([[1], [2], [1]], [1, 1, 1]), "zb-h1", 1, {}),
        "zero-bubble in a V": with_schedule(_plain([[1, 1], [2]], [1, 1], tied=True), "zb-v", 2, {}),
        "v-half": with_schedule(_plain([[1], [1], [1]], [1, 1, 1]), "v-half", 2, {}),
        "ministage without a window": with_schedule(_plain([[1], [1]], [1, 1]), "ministage", 2, {"window": False}),
        "ministage with a window": _window([[1, 1], [1]], [1, 1]),
        "ministage with a window, split vocabulary": _window(
            [[1, 1], [2]], [1, 1], vocabulary=True, vocabulary_shares=[3, 1], update="undo"
        ),
        "ministage, all offloaded": _window(
            [[1, 1]], [2], offload=True, offload_optimizer=True, offload_activations=0.5
        ),
    }
    cases = [replace(case, name=name) for name, case in (found | _unequal() | _experts()).items()]
    rng = random.Random(2)
    return cases + [sliced_case({**PLAIN, **row}, name, rng) for name, row in _SLICED_CASES.items()]


def flags_of(case: Case) -> tuple[str, ...]:
    """Returns the flags of a run of the case, without the plan and without data."""
    return (
        *common_flags(*case.reference),
        *case.plan_flags(),
        "--distributed-timeout-minutes",
        "10",
        "--initial-loss-scale",
        "1",
    )


BYTES_BAR, MEMORY_BAR, SECONDS_BAR = 0, 0.03, 120.0

_ENTRY = "megatron_het.dry_run.__main__:main"
_CASE_S = 600.0


def jobs_of(case: Case, folder: Path, ranks: Sequence[int]) -> list[Job]:
    """Returns the job of a case's real run, and the jobs of dry runs of some of its ranks."""
    folder.mkdir(parents=True)
    save_plan(case.plan, folder / "plan.json")
    flags = (*flags_of(case), "--het-plan", str(folder / "plan.json"))
    real = ("--measured", "--kernels", "cpu", "--out", str(folder / "real-{rank}.json"), "--", *flags)
    jobs = [Job(case.name, case.plan.world_size, real, folder, _ENTRY, timeout_s=_CASE_S)]
    for rank in ranks:
        dry = ("--kernels", "cpu", "--rank", str(rank), "--out", str(folder / f"dry-{rank}.json"), "--", *flags)
        jobs.append(Job(f"{case.name}, dry rank {rank}", 1, dry, folder / f"dry-{rank}", _ENTRY, timeout_s=_CASE_S))
    return jobs


def difference(real: dict[str, Any], dry: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of one rank that differ between real and dry run; empty if all are equal."""
    found: dict[str, float] = {}
    for part in ("by_category", "category_peaks"):
        for name in real["memory"][part]:
            found[f"{part} {name}"] = real["memory"][part][name] - dry["memory"][part][name]
    for name in ("total_bytes", "start_bytes"):
        found[name] = real["memory"][name] - dry["memory"][name]
    sent = [{(e["what"], tuple(e["ranks"])): e for e in run["traffic"]} for run in (real, dry)]
    for key in sent[0].keys() | sent[1].keys():
        for what in ("payload_bytes", "calls"):
            found[f"{what} {key}"] = sent[0].get(key, {}).get(what, 0) - sent[1].get(key, {}).get(what, 0)
    for kind in real["flops"].keys() | dry["flops"].keys():
        found[f"flops {kind}"] = real["flops"].get(kind, 0) - dry["flops"].get(kind, 0)
    return {name: value for name, value in found.items() if value}


def compare(runner: Runner, case: Case, folder: Path, ranks: Sequence[int]) -> dict[str, Any]:
    """Run a case for real and dry; returns its figures."""
    entry: dict[str, Any] = {"name": case.name, "world_size": case.plan.world_size, "ranks": list(ranks)}
    try:
        for job in jobs_of(case, folder, ranks):
            runner.run(job)
    except JobError as error:
        return entry | {"error": str(error)}
    differences = {}
    for rank in ranks:
        real, dry = (json.loads((folder / f"{kind}-{rank}.json").read_text("utf-8")) for kind in ("real", "dry"))
        differences[rank] = difference(real, dry)
    return entry | {"differences": differences}


def small_plans(chosen: Sequence[Case], folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """Run all small plans, real and dry, one after the other."""
    with Runner() as runner:
        for number, case in enumerate(chosen):
            last = case.plan.world_size - 1
            ranks = {"first": [0], "last": [last]}.get(which, list(range(last + 1)))
            yield compare(runner, case, folder / str(number), ranks)


def big_plan(runner: Runner, big: BigPlan, folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """Dry-run a big plan's ranks; returns their memory beside the planner's prediction."""
    plan, memory = big.write(folder), {m.stage: m for m in big.planned()[1]}
    flags = rank_flags(plan, load_model(folder / "model.yaml"), str(folder / "plan.json"), [])
    kinds = rank_kinds(plan)
    chosen = {"first": kinds[:1], "last": kinds[-1:], "some": [kinds[0], kinds[len(kinds) // 2], kinds[-1]]}
    for kind in dict.fromkeys(chosen.get(which, kinds)):
        rank = kind[0]
        out = folder / f"rank-{rank}.json"
        kernels = () if big.gpu == _GPU else ("--kernels", "local")
        words = (*kernels, "--rank", str(rank), "--out", str(out), "--", *flags)
        entry: dict[str, Any] = {"name": big.name, "world_size": plan.world_size, "rank": rank}
        try:
            runner.run(Job(f"{big.name}, rank {rank}", 1, words, folder / f"log-{rank}", _ENTRY, timeout_s=_CASE_S))
        except JobError as error:
            yield entry | {"error": str(error)}
            continue
        found = json.loads(out.read_text("utf-8"))
        said = memory[found["stage"]]
        predicted, peak = said.total_bytes - said.reserved_bytes, found["memory"]["total_bytes"]
        entry |= {"stage": found["stage"], "dry_run_bytes": peak, "planner_bytes": predicted}
        entry |= {"error_of_planner": predicted / peak - 1}
        entry |= {"seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"]}
        yield entry | {"by_category": found["memory"]["by_category"], "peak_at": found["memory"]["label"]}


def big_parts(chosen: Sequence[BigPlan], folder: Path, which: str) -> Iterator[dict[str, Any]]:
    """Yields the ranks of all big plans, one after the other."""
    with Runner() as runner:
        for number, big in enumerate(chosen):
            yield from big_plan(runner, big, folder / f"big-{number}", which)


def largest(entries: Sequence[dict[str, Any]], flops: bool) -> float:
    """The largest difference of bytes (and calls), or of FLOPs."""
    values = [
        abs(value)
        for entry in entries
        for found in entry.get("differences", {}).values()
        for name, value in found.items()
        if name.startswith("flops") == flops
    ]
    return max(values, default=0)


def report_of(small: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all plans together."""
    ran = [entry for entry in ranks if "error" not in entry]
    return {
        "bytes_difference": largest(small, flops=False),
        "flops_difference": largest(small, flops=True),
        "planner_memory_error": max((abs(entry["error_of_planner"]) for entry in ran), default=None),
        "seconds_per_rank_kind": max((entry["cpu_seconds"] for entry in ran), default=None),
        "wall_seconds_per_rank_kind": max((entry["seconds"] for entry in ran), default=None),
        "plans": len(small),
        "big_plans": len({entry["name"] for entry in ran}),
        "failed": [entry["name"] for entry in [*small, *ranks] if "error" in entry],
        "cases": list(small),
        "big": list(ranks),
    }


def kept(path: Path, part: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The entries of an existing file, by plan and rank."""
    entries = json.loads(path.read_text("utf-8"))[part] if path.exists() else []
    return {_key(entry): entry for entry in entries}


def _key(entry: dict[str, Any]) -> tuple[str, int]:
    return entry["name"], entry.get("rank", -1)


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.dry_run", __doc__)
    parser.add_argument("--only", metavar="NAME", default="*", help="plans by name; * stands for anything")
    parser.add_argument("--part", choices=("small", "big", "all"), default="all", help="which plans (default: all)")
    ranks = parser.add_mutually_exclusive_group()
    for which, text in (("first", "the first rank"), ("last", "the last rank"), ("kinds", "every kind of rank")):
        ranks.add_argument(f"--{which}", dest="which", action="store_const", const=which, help=f"{text} of every plan")
    parser.set_defaults(which="some")
    parser.add_argument("--keep", type=Path, help="keep logs and figures in this folder")
    options = parser.parse_args()
    chosen = [case for case in dry_run_cases() if fnmatch.fnmatchcase(case.name, options.only)]
    big = [plan for plan in big_plans() if fnmatch.fnmatchcase(plan.name, options.only)]
    chosen, big = chosen if options.part != "big" else [], big if options.part != "small" else []
    if not chosen and not big:
        parser.error(f"--only {options.only}: no such plan")
    entries = {part: kept(options.json, part) for part in ("cases", "big")}
    with scratch("dry-run-", options.keep) as folder:
        steps = [("cases", small_plans(chosen, folder, options.which))] if chosen else []
        steps += [("big", big_parts(big, folder, options.which))] if big else []
        for part, made in steps:
            for entry in made:
                print(json.dumps(entry), flush=True)
                entries[part][_key(entry)] = entry
                report = report_of(*(list(found.values()) for found in entries.values()))
                save(options.json, report)
    write_report(options.json, report, unprinted=("cases", "big"))
    differs = report["bytes_difference"] > BYTES_BAR or report["flops_difference"] > 0
    off = (report["planner_memory_error"] or 0) > MEMORY_BAR or (report["seconds_per_rank_kind"] or 0) > SECONDS_BAR
    return int(bool(report["failed"]) or differs or off)


if __name__ == "__main__":
    raise SystemExit(main())
