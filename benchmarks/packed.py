"""Compares packed documents in slices of equal length and of equal work, and the same batch without document masks.

``python -m benchmarks.packed --json OUT``.  Two and four stages of one small model whose attention takes most of the
time.  Costs are fitted to a traced run of whole sequences on two stages; they give the keys that cost as much as a
token, and the simulated figures.  Two ranks also share the sequences of one stage, with documents cut at fixed
positions and with whole ones (``ranks``).  Every side counts by the median over alternating rounds of the time of
all its iterations, which have the same documents on all sides.

``speedup_over_equal_slices`` compares both ways to cut, ``speedup_over_unpacked`` tokens per second with and without
documents.  With fewer cores than stages processes take turns on a core: one uses the time in which another waits, and
a measured speedup does not apply to pipelines; ``measured`` is then left out.
"""

import argparse
import itertools
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, scratch, write_report
from benchmarks.slimpipe_runs import Model, Setting, fitted_costs, job, program_for
from megatron_het.plan.placement import CUT, WHOLE
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.cutting import Cutting, Starts
from megatron_het.schedule.simulate import simulate
from testing.runner import Job, Runner, words
from tools.planner.inputs.model_parts import shared as shared_by

MODEL = Model(layers=4, hidden=128, ffn=352, heads=4, groups=1)
_STAGES, _MICROBATCHES, _SLICES, _WARMUP, _MANY = (2, 4), 1, 4, 1, 4
_TYPICAL, _DOCUMENTS, _DATA_SEED = 48, 3000, 11
_MASKED = words("--dataloader-inter-document-masking --reset-position-ids")
Documents = list[list[list[Starts]]]  # where documents begin: of every iteration, microbatch and sequence


class Bench:
    """Runs of one data set."""

    def __init__(self, runner: Runner, folder: Path, options: argparse.Namespace) -> None:
        self._runner, self._folder, self._options = runner, folder, options
        self._prefix = folder / "data" / "documents"
        self._prefix.parent.mkdir()
        data = {"prefix": str(self._prefix), "vocab_size": MODEL.vocabulary, "documents": _DOCUMENTS}
        data |= {"seed": _DATA_SEED, "long_tailed": True, "typical": _TYPICAL, "longest": options.tokens}
        write = ("testing.probe:write_dataset", data)
        runner.run(Job("dataset", 1, (), self._prefix.parent, "testing.probe:nothing", write))

    def setting(self, stages: int, *flags: str) -> Setting:
        """A run of the model."""
        return Setting("slimpipe", stages, self._options.tokens, _MICROBATCHES, _SLICES, flags=flags)

    def run(self, name: str, setting: Setting, *more: str, ranks: int = 0) -> list[dict[str, Any]]:
        """Run a setting, on one rank per stage or on so many; returns the results of each rank."""
        ranks = ranks or setting.stages
        target = self._folder / name
        target.mkdir(parents=True)
        data = ("--data-path", str(self._prefix), "--data-cache-path", str(self._prefix.parent / "cache"), *more)
        made = job(setting, MODEL, target, iterations=_WARMUP + self._options.iterations, memory=False, more=data)
        setup = ("testing.watches:watch_documents", {"out": str(target)})
        flags = tuple(flag for flag in made.argv if flag != "--mock-data")
        self._runner.run(replace(made, world_size=ranks, argv=flags, setup=setup))
        found = []
        for rank in range(ranks):
            parts = [json.loads((target / f"{part}-{rank}.json").read_text()) for part in ("watch", "packed")]
            found.append({**parts[0], **parts[1]})
        return found

    def costs(self) -> Costs:
        """Returns the costs of one stage of two, from a traced run of whole sequences; all stages are equal."""
        setting, report = self.setting(2), self._folder / "report"
        flags = ("--het-report", str(report), "--het-trace", str(report), "--het-trace-iteration", "2")
        self.run("traced", setting, *flags)
        return fitted_costs(setting, program_for(setting, MODEL), report)[0]

    def measured(self, name: str, setting: Setting, ranks: int = 0) -> dict[str, Any]:
        """Returns the seconds of all counted iterations, their documents, and the bytes of pools and between ranks."""
        found = self.run(name, setting, ranks=ranks)
        by_rank = [rank["iterations_s"][_WARMUP:] for rank in found]
        return {
            "seconds": sum(max(times) for times in zip(*by_rank, strict=True)),
            "documents": found[0]["documents"][_WARMUP:],
            "pool_bytes": sum(rank["pool_bytes"] for rank in found),
            "sent_bytes": sum(rank["sent_bytes"] for rank in found),
        }


def keys_per_token(costs: Costs, tokens: int) -> float:
    """Returns the number of keys whose attention takes a query as long as the rest of its layers."""
    rest = sum(map(sum, (*costs.forward_s, *costs.backward_s))) / tokens
    attention = sum(map(sum, (*costs.attention_forward_s, *costs.attention_backward_s)))
    return rest / (attention / (tokens * (tokens + 1) / 2))


def simulated_s(costs: Costs, setting: Setting, cutting: Cutting, documents: Documents) -> float:
    """Returns the simulated seconds of iterations on as many devices as stages."""
    stages = setting.stages

    def spread(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return ((sum(map(sum, table)) / stages,),) * stages

    whole = replace(
        costs,
        forward_s=spread(costs.forward_s),
        backward_s=spread(costs.backward_s),
        attention_forward_s=spread(costs.attention_forward_s),
        attention_backward_s=spread(costs.attention_backward_s),
    )
    program, found = program_for(setting, MODEL), 0.0
    for iteration in documents:
        parts = tuple(cutting.parts([tuple(starts) for starts in sequences]) for sequences in iteration)
        found += simulate(program, replace(whole, parts=parts)).makespan_s
    return found


def compare(bench: Bench, stages: int, costs: Costs, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one number of stages."""
    keys = keys_per_token(costs, options.tokens)
    work = words(f"--het-slice-lengths work --het-slice-keys-per-token {keys:.1f}")
    sides = {"unpacked": (), "equal": _MASKED, "work": (*_MASKED, *work)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    enough = len(os.sched_getaffinity(0)) >= stages
    for index in range(options.rounds if enough else 1):
        for name, flags in sides.items():
            runs[name].append(bench.measured(f"{stages}-{name}-{index}", bench.setting(stages, *flags)))
            print(f"{stages} stages, round {index}, {name}: {runs[name][-1]['seconds']:.2f} s", flush=True)
    documents = runs["work"][0]["documents"]
    whole: Documents = [[[(0,)]] * _MICROBATCHES] * options.iterations
    lengths = Cutting(options.tokens, _SLICES)
    simulated = {
        "unpacked": simulated_s(costs, bench.setting(stages), lengths, whole),
        "equal": simulated_s(costs, bench.setting(stages), lengths, documents),
        "work": simulated_s(costs, bench.setting(stages), replace(lengths, keys_per_token=keys), documents),
    }
    seconds = {name: statistics.median(found["seconds"] for found in rows) for name, rows in runs.items()}
    tokens = options.tokens * _MICROBATCHES * options.iterations
    report: dict[str, Any] = {
        "simulated": _ratios(simulated, tokens),
        "pool_bytes": {name: rows[0]["pool_bytes"] for name, rows in runs.items()},
        "documents_per_sequence": statistics.mean(len(s) for i in documents for m in i for s in m),
    }
    if enough:
        report |= {"measured": _ratios(seconds, tokens), "runs_s": {n: [r["seconds"] for r in runs[n]] for n in runs}}
    return report


def compare_ranks(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Compare documents cut at fixed positions with whole ones: measured on two ranks, and counted for more ranks."""
    shared = words("--context-parallel-size 2 --het-cp-documents")
    runs: dict[str, list[dict[str, Any]]] = {CUT: [], WHOLE: []}
    for index in range(options.rounds):
        for way, rows in runs.items():
            setting = replace(bench.setting(1, *_MASKED, *shared, way), schedule="1f1b", microbatches=_MANY)
            rows.append(bench.measured(f"ranks-{way}-{index}", setting, ranks=2))
            print(f"two ranks, round {index}, {way}: {rows[-1]['seconds']:.2f} s", flush=True)
    seconds = {way: statistics.median(row["seconds"] for row in rows) for way, rows in runs.items()}
    starts = [s for i in runs[CUT][0]["documents"] for m in i for s in m]
    lengths = tuple(b - a for s in starts for a, b in itertools.pairwise((*s, options.tokens)))
    width = MODEL.hidden * (1 + MODEL.groups / MODEL.heads)
    keys = width + 1.5 * MODEL.ffn  # multiplications of the rest of a layer over those of a key
    return {
        "speedup_over_cut": seconds[CUT] / seconds[WHOLE],
        "sent_bytes": {way: rows[0]["sent_bytes"] for way, rows in runs.items()},
        "runs_s": {way: [row["seconds"] for row in rows] for way, rows in runs.items()},
        "counted": {
            f"cp{cp}-n{slices}": {
                way: shared_by(lengths, options.tokens, cp, slices, None, own)._asdict()
                for way, own in ((CUT, None), (WHOLE, keys))
            }
            for cp in (2, 4, 8)
            for slices in (1, _SLICES)
        },
    }


def _ratios(seconds: dict[str, float], tokens: int) -> dict[str, Any]:
    return {
        "speedup_over_equal_slices": seconds["equal"] / seconds["work"],
        "speedup_over_unpacked": seconds["unpacked"] / seconds["work"],
        "tokens_per_s": {name: tokens / value for name, value in seconds.items()},
    }


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.packed", __doc__)
    parser.add_argument("--tokens", type=int, default=6144, help="per sequence")
    parser.add_argument("--iterations", type=int, default=4, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=2, help="how often each side runs")
    parser.add_argument(
        "--stages", type=int, nargs="*", default=list(_STAGES), help="none: only two ranks of one stage"
    )
    return parser.parse_args()


def main() -> int:
    """Command line."""
    options = _options()
    with scratch("packed-") as folder, Runner() as runner:
        bench = Bench(runner, folder, options)
        report = {"tokens": options.tokens, "ranks": compare_ranks(bench, options)}
        if options.stages:
            costs = bench.costs()
            found = {stages: compare(bench, stages, costs, options) for stages in options.stages}
            first = found[options.stages[0]]
            report |= {
                "speedup_over_equal_slices": first.get("measured", first["simulated"])["speedup_over_equal_slices"],
                "by_stages": found,
                "keys_per_token": keys_per_token(costs, options.tokens),
            }
    write_report(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
