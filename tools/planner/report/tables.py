"""Figures of plans as JSON values and as tables."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any

from megatron_het.plan.placement import DOCUMENTS

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import schedule_of
from ..search.outcome import Found, Goal, SearchResult
from ..search.overlap import blocking_ratio

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2.0**30
ROUNDING = 1e-9  # share of an iteration below which a difference of two sums counts as 0
DATASHEETS = "GPU figures are from datasheets, network figures the cluster file's or defaults; '{} profile' measures."
NOTATION = (
    "How to read a plan: v chunks per stage, n slices per sequence, mb sequences per\n"
    "microbatch, cp and ep ranks that share a sequence and experts, offload what is in\n"
    "main memory while nobody needs it; then the stages, divided by /. 8L 3xA100.tp2+2xT4\n"
    "is 8 layers on 3 replicas of 2 A100 (TP 2) and 2 replicas of one T4; @ names the zone\n"
    "of a kind that is in several; (4 times) is 4 such stages one after the other.\n"
    "1x[1xA100:70%|1xT4:30%] is a replica of both, with so much of every sequence on each."
)
WORTH_SAYING = 0.3  # gaps to the bound above this share are not printed
PARTLY = "partly recomputed"
HARDLY = 0.005  # change of an iteration that is printed as none
_MEMORY = {"optimizer": "optimizer state", "workspace": "temporaries", "reserved": "CUDA and NCCL"}
"""Labels of parts of memory whose field names are no labels."""
_SETTINGS = ("schedule", "chunks", "slices", "micro_batch_size", "recompute", "zero_stage", "offload")
MOST_ROWS = 100  # rows of a table of stages: laying out thousands takes seconds


def say(value: Any, options: Any, *tables: Any) -> None:
    """Print JSON or tables, by ``--json``."""
    if options.json:
        json.dump(value, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    console = Console()
    for table in tables:
        if isinstance(table, str):  # commands to copy are not wrapped
            sys.stdout.write(table + "\n")
            sys.stdout.flush()
        else:
            console.print(table, crop=False)


@contextmanager
def shown_progress(text: str | Callable[[], str], options: Any, every_s: float = 10.0) -> Iterator[None]:
    """Show progress: a line on a terminal; elsewhere a line on stderr every ten seconds."""
    done, start_s = threading.Event(), time.monotonic()
    is_watched = sys.stderr.isatty() and not options.json

    def now() -> str:
        return text if isinstance(text, str) else text()

    def show(update: Callable[[str], None]) -> None:
        while not done.wait(0.25 if is_watched else every_s):
            update(now())

    def line(what: str) -> None:
        with suppress(OSError):  # the reader of the pipe has gone
            sys.stderr.write(f"{time.monotonic() - start_s:.0f} s: {what}\n")

    with ExitStack() as stack:
        update: Callable[[str], None] = line
        if is_watched:
            from rich.console import Console

            update = stack.enter_context(Console(stderr=True).status(now())).update
        thread = threading.Thread(target=show, args=(update,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(1.0)


def table(title: str, *columns: str) -> "Table":
    """An empty rich table; the first column, and one of sentences, "what", are left-aligned.

    No column gets narrower than the longest word of its head, and long text of a cell wraps into the next
    line: nothing is cut off at 80 columns.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    for i, column in enumerate(columns):
        least = max(map(len, column.split()), default=1)
        left = i == 0 or column == "what"
        out.add_column(column, justify="left" if left else "right", overflow="fold", min_width=least)
    return out


def stages_of(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> list[dict[str, Any]]:
    """One row per stage and kind of replica."""
    groups = [
        (m, estimator.cluster.nodes[m.group.pool], s, g, share, portion if g.parts else None)
        for s, stage in enumerate(candidate.stages)
        for g, share, of in zip(stage.groups, estimate.microbatches[s], estimate.memory_of(candidate, s), strict=True)
        for m, (_, portion) in zip(of, candidate.parts_of(g), strict=True)
    ]
    return [
        {
            "stage": s,
            "gpu": node.gpu,
            "zone": node.zone,
            "place": estimator.cluster.place(node),
            "replicas": g.count,
            "tp": g.tp,
            "cp": candidate.cp,
            "layers": candidate.stages[s].layers,
            "recomputed": round((1 - g.kept) * candidate.stages[s].layers) * (candidate.recompute == "full"),
            "microbatches_per_replica": share,
            **({} if portion is None else {"part_of_sequences": portion}),
            "busy_s": estimate.stage_busy_s[s],
            "state_share": m.state_share,
            "memory_bytes": {
                "parameters": m.parameter_bytes,
                "gradients": m.gradient_bytes,
                "optimizer": m.optimizer_bytes,
                "activations": m.activation_bytes,
                "workspace": m.workspace_bytes,
                "reserved": m.reserved_bytes,
            },
            "total_bytes": m.total_bytes,
            "capacity_bytes": m.capacity_bytes,
            "fits": m.total_bytes <= estimator.memory_margin * m.capacity_bytes,
        }
        for m, node, s, g, share, portion in groups
    ]


def part_in_words(row: dict[str, Any]) -> str:
    """Returns a GPU's part of every sequence, if context-parallel ranks have unequal parts."""
    part = row.get("part_of_sequences")
    return "" if part is None else f"; each has {100 * part:.0f} % of every sequence"


def state_in_words(row: dict[str, Any]) -> str:
    """Returns a GPU's share of the state of its stage, if its pool has unequal shares."""
    share = row["state_share"]
    return "" if share is None else f"; each keeps {100 * share:.0f} % of the state"


def summary(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, simulated_s: float | None
) -> dict[str, Any]:
    """Returns all reported figures of a plan."""
    model = estimator.model
    found = Found(candidate, estimate, simulated_s)
    seconds = found.iteration_s
    tokens = model.global_batch_size * model.seq_length
    used = [(n, estimator.cluster.gpu(estimator.cluster.nodes[p].gpu)) for p, n in candidate.gpus().items()]
    peak = sum(n * gpu.peak(model.precision) for n, gpu in used)
    apart = estimator.cluster.vendors_problem(candidate.gpus())
    blocking = blocking_ratio(estimator, candidate, estimate)
    uncertainty = estimator.uncertainty(candidate)
    nodes = [estimator.cluster.nodes[p] for p in sorted(candidate.gpus())]
    catalog_prices = {n.gpu: estimator.cluster.gpu(n.gpu).usd_per_hour for n in nodes if n.usd_per_gpu_hour is None}
    watts = [n * gpu.power_w for n, gpu in used if gpu.power_w is not None]
    joules = seconds * sum(watts) if len(watts) == len(used) else None
    return {
        "iteration_s": seconds,
        "closed_form_s": estimate.iteration_s,
        "simulated_s": simulated_s,
        "uncertainty": uncertainty.error,
        "uncertainty_of": {"runs": uncertainty.runs, "of": uncertainty.of},
        "runtime": estimator.runtime.name,
        "blocking_transfers_s": None if blocking is None else seconds * blocking,
        "by_cause_s": {
            "compute": estimate.busy_s,
            "fill_and_drain": estimate.fill_s if estimate.fill_s > ROUNDING * estimate.iteration_s else 0.0,
            "gather": estimate.gather_s,
            "gradient_reduction": estimate.sync_s,
            "update": estimate.update_s,
        },
        "tokens_per_s": tokens / seconds,
        "model_tflops": model.iteration_flops / seconds / 1e12,
        "model_flops_utilisation": model.iteration_flops / seconds / peak if peak else None,
        "usd_per_iteration": found.usd_per_iteration,
        "gpus_without_price": unpriced(estimator, candidate),
        # USD per GPU hour of the kinds in use whose price the cluster file does not give, but the catalog does
        "catalog_prices": {gpu: price for gpu, price in catalog_prices.items() if price is not None},
        "usd_per_billion_tokens": found.usd_per_iteration / tokens * 1e9,
        "egress_bytes_per_iteration": estimate.egress_bytes,
        "energy_joules_per_iteration": joules,
        "gpus": _by_place(estimator, candidate.gpus()),
        "idle_gpus": _by_place(estimator, candidate.gpus(), idle=True),
        "not_run": model.not_run,
        "precision": model.precision,
        "model_notes": [*model.notes, *([f"priced only: {apart}"] if apart else [])],
        "host_memory": offloaded(estimator, estimate),
        "documents": _documents(estimator, candidate, estimate),
        **{name: getattr(candidate, name) for name in _SETTINGS},
        "extras": extras_in_words(candidate),
        "stages": stages_of(estimator, candidate, estimate),
    }


def offloaded(estimator: Estimator, estimate: Estimate) -> list[dict[str, Any]]:
    """Lists the plan's bytes in the nodes' main memory, and the available bytes (None: unknown)."""
    return [
        {
            "gpu": estimator.cluster.nodes[pool].gpu,
            "place": estimator.cluster.place(estimator.cluster.nodes[pool]),
            "bytes_per_node": held,
            "limit_bytes": None if (most := estimator.host_limits[pool]) == inf else most,
            "is_assumed": estimator.cluster.nodes[pool].host_memory_bytes is None,
        }
        for pool, held in estimator.host_memory(estimate)
    ]


def _documents(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> dict[str, float] | None:
    """Returns the gain of whole documents over cut ones; None if the plan does not place documents whole."""
    if DOCUMENTS not in schedule_of(candidate).cut(estimator, candidate):
        return None
    whole, cut = (estimator.model.shared(candidate.cp, candidate.slices, cut=is_cut) for is_cut in (False, True))
    other = estimator.estimate(candidate.with_(cuts_documents=True))
    return {
        "queries_sent": whole.sent,
        "queries_sent_if_cut": cut.sent,
        "most_attention": whole.most,
        "most_attention_if_cut": cut.most,
        "sooner": 0.0 if other is None else other.iteration_s / estimate.iteration_s - 1,
    }


def host_memory_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per group of nodes that offloads."""
    lines = []
    for row in rows:
        known = f", of {row['limit_bytes'] / GIB:.0f} GiB" if row["limit_bytes"] else ""
        if row["is_assumed"]:
            known += f"{known and ' that are assumed'}; give host_memory_bytes in the cluster file"
        lines.append(f"{row['place']}: offloads {row['bytes_per_node'] / GIB:.0f} GiB to main memory per node{known}")
    return lines


def unpriced(estimator: Estimator, candidate: Candidate) -> list[str]:
    """Kinds of GPUs in use that have a price neither in the cluster file nor in the catalog."""
    nodes = [estimator.cluster.nodes[p] for p in candidate.gpus()]
    return sorted(
        {n.gpu for n in nodes if n.usd_per_gpu_hour is None and estimator.cluster.gpu(n.gpu).usd_per_hour is None}
    )


def _by_place(estimator: Estimator, used: Mapping[int, int], idle: bool = False) -> dict[str, int]:
    """Returns GPUs in use, or idle ones, by kind and zone, summed over pools."""
    out: Counter[str] = Counter()
    for pool, node in enumerate(estimator.cluster.nodes):
        out[estimator.cluster.place(node)] += node.quota - used.get(pool, 0) if idle else used.get(pool, 0)
    return {name: count for name, count in out.items() if count > 0}


def price_lines(body: dict[str, Any]) -> list[str]:
    """Returns lines with the cost of an iteration, and the sources of prices."""
    known, without = body["catalog_prices"], ", ".join(body["gpus_without_price"])
    lines = []
    if body["usd_per_iteration"]:
        each = f"{body['usd_per_iteration']:.4g} per iteration, {body['usd_per_billion_tokens']:.4g} per billion tokens"
        lines.append(f"USD {'at least ' if without else ''}{each}")
    if known:
        rates = ", ".join(f"{gpu} {price:g}" for gpu, price in known.items())
        lines.append(f"prices of the catalog, not yours: USD per GPU hour {rates}; give usd_per_gpu_hour")
    if without:
        lines.append(f"no price is known of {without}, whose hours are not counted; give usd_per_gpu_hour")
    if body["egress_bytes_per_iteration"]:
        lines.append(f"egress {body['egress_bytes_per_iteration'] / 1e9:.4g} GB per iteration")
    return lines


def summary_tables(body: dict[str, Any]) -> list[Any]:
    """Returns the summary as tables and lines."""
    causes = table("Iteration", "cause", "seconds", "share")
    for cause, seconds in body["by_cause_s"].items():
        if seconds > 0:
            causes.add_row(cause.replace("_", " "), f"{seconds:.4g}", f"{100 * seconds / body['closed_form_s']:.1f} %")
    causes.add_row("together, by formula", f"{body['closed_form_s']:.4g}", "")
    if body["simulated_s"] is not None:
        causes.add_row("simulated (this counts)", f"{body['simulated_s']:.4g}", "")
    sizes = ("tp", "cp") if any(row["cp"] > 1 for row in body["stages"]) else ("tp",)
    again = ("recomputed",) if PARTLY in body["extras"] else ()
    where = table(
        "Stages", "stage", "GPUs", *(s.upper() for s in sizes), "replicas", "layers", *again, "microbatches", "busy"
    )
    memory = table("Memory, GiB", "stage", "GPUs", "needed", "of", "largest part")
    for row in body["stages"][:MOST_ROWS]:
        parts = sorted(row["memory_bytes"].items(), key=lambda item: -item[1])
        name = row["place"] + part_in_words(row)
        counts = (row[key] for key in (*sizes, "replicas", "layers", *again, "microbatches_per_replica"))
        busy = f"{100 * row['busy_s'] / body['iteration_s']:.0f} %"
        where.add_row(str(row["stage"]), name, *map(str, counts), busy)
        memory.add_row(
            str(row["stage"]),
            row["gpu"],
            f"{row['total_bytes'] / GIB:.2f}" + ("" if row["fits"] else " TOO MUCH"),
            f"{row['capacity_bytes'] / GIB:.1f}",
            f"{_MEMORY.get(parts[0][0], parts[0][0])} {parts[0][1] / GIB:.1f}" + state_in_words(row),
        )
    utilisation = body["model_flops_utilisation"]
    seen = body["uncertainty_of"]
    precision = "" if body["precision"] == "bf16" else f", {body['precision']}"
    lines = [
        schedule_in_words(body, f", ZeRO-{body['zero_stage']}{precision}"),
        f"{body['iteration_s']:.4g} s per iteration, {body['tokens_per_s']:.4g} tokens/s",
        f"+-{100 * body['uncertainty']:.0f} %: of {seen['runs']} measured {seen['of']}, four in five were that near to "
        "their prediction",
        f"{body['model_tflops']:.4g} model TFLOP/s"
        + (f", MFU {100 * utilisation:.1f} %" if utilisation is not None else ""),
        *price_lines(body),
    ]
    if body["idle_gpus"]:
        lines.append("idle GPUs: " + ", ".join(f"{n} {kind}" for kind, n in body["idle_gpus"].items()))
    blocking = body["blocking_transfers_s"]
    if blocking is not None:
        lines.append(
            f"Transfers between stages run beside compute, over NCCL. If they did not: about {blocking:.4g} s "
            f"({100 * (blocking / body['iteration_s'] - 1):+.0f} %)"
        )
    lines += body["model_notes"]
    lines += host_memory_lines(body["host_memory"])
    if (own := body["documents"]) is not None:
        lines.append(
            f"Whole documents: {100 * own['queries_sent']:.1f} % of the queries go to another rank, and the rank "
            f"with most attention has {own['most_attention']:.2f} times the mean; cut by places "
            f"{100 * own['queries_sent_if_cut']:.1f} % and {own['most_attention_if_cut']:.2f} times, "
            f"{100 * own['sooner']:.1f} % later"
        )
    if body.get("bubble_fraction") is not None:
        lines.append(f"bubble {100 * body['bubble_fraction']:.1f} %: idle time over compute, mean of the replicas")
    more = len(body["stages"]) - MOST_ROWS
    return [*lines, causes, where, memory, *([f"and {more} rows more: --json prints all"] if more > 0 else [])]


def schedule_in_words(body: dict[str, Any], state: str = "") -> str:
    """Returns the schedule of a plan and its features as text; ``state`` comes after recomputation."""
    text = f"{body['schedule']}, micro batch {body['micro_batch_size']}, recompute {body['recompute']}{state}"
    for name, whole in (("chunks", "stage"), ("slices", "sequence")):
        text += f", {body[name]} {name} per {whole}" if body[name] > 1 else ""
    text += ", offload" if body["offload"] else ""
    return text + "".join(f", {name}" for name in body["extras"])


def plans_tables(title: str, what: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns a table of plans, and a line that describes each of them."""
    out = table(title, what, "s per iteration", "ratio", "USD per iteration", "GPUs")
    lines: list[Any] = []
    for i, row in enumerate(rows, 1):
        name = f"{i}: {row['what']}"
        if row["iteration_s"] is None:
            out.add_row(name, "no plan", "", "", "")
            lines += [f"{i}: no plan: {row['why']}"] if row.get("why") else []
            continue
        usd = "unknown" if row["gpus_without_price"] else f"{row['usd_per_iteration']:.4g}"
        out.add_row(name, f"{row['iteration_s']:.4g}", f"{row['ratio']:.2f}", usd, str(row["gpus"]))
        lines.append(f"{i}: {row['plan']}")
    return [out, *lines, *([NOTATION] if lines else [])]


def describe(estimator: Estimator, c: Candidate) -> str:
    """A candidate in one line (``NOTATION``)."""
    zones: dict[str, set[str]] = {}
    for node in estimator.cluster.nodes:
        zones.setdefault(node.gpu, set()).add(node.zone)

    def named(g: Group) -> str:
        if g.parts:
            alike = [(part, part.count // g.count, round(100 * portion)) for part, portion in c.parts_of(g)]
            parts = "|".join(f"{named(part._replace(count=n))}:{portion}%" for part, n, portion in alike)
            return f"{g.count}x[{parts}]"
        node = estimator.cluster.nodes[g.pool]
        tp = f".tp{g.tp}" if g.tp > 1 else ""
        return f"{g.count}x{node.gpu}{tp}" + (f"@{node.zone}" if len(zones[node.gpu]) > 1 else "")

    stages = [f"{s.layers}L " + "+".join(map(named, s.groups)) for s in c.stages]
    repeated = ((text, len(list(alike))) for text, alike in groupby(stages))
    extra = f" v{c.chunks}" if c.chunks > 1 else ""
    extra += f" n{c.slices}" if c.slices > 1 else ""
    extra += f" recompute {c.recompute}" if c.recompute != "none" and c == c.keeping() else ""
    extra += "".join(f" {name}" for name in [*["offload"] * c.offload, *extras_in_words(c)])
    shown = " / ".join(text + (f" ({count} times)" if count > 1 else "") for text, count in repeated)
    return f"{c.schedule}{extra} mb{c.micro_batch_size} {shown}"


def extras_in_words(c: Candidate) -> list[str]:
    """Returns the features of a plan besides its schedule."""
    out = [f"cp{c.cp}"] if c.cp > 1 else []
    out += [f"ep{c.ep}"] if c.ep > 1 else []
    out += ["split vocabulary"] if c.rows else []
    out += ["exchange"] if c.exchange else []
    out += [f"{100 * c.host_activations:.0f} % of activations offloaded"] if c.host_activations else []
    out += [PARTLY] if c != c.keeping() else []
    return out + (["passes of different sizes"] if c.sizes else [])


def bound_lines(outcome: SearchResult, goal: Goal) -> list[str]:
    """Returns lines with the gap to the lower bound, and with a faster plan that was passed over."""
    best, lines, gap = outcome.best, [], outcome.gap(goal)
    if gap is not None and best is not None:
        unit = "USD {:.4g}" if goal.objective == "cost" else "{:.4g} s"
        said = f"no plan on these GPUs takes less than {unit.format(outcome.bound)}"
        if gap <= WORTH_SAYING:
            lines.append(f"at most {100 * gap:.1f} % from the best possible: {said}")
        else:
            most, left_out_s = _left_out(outcome, best, goal)
            lines.append(f"{said}. That bound is loose: it leaves out {most} ({left_out_s:.3g} s of this plan)")
    if best is not None:
        lines += _passed_over_lines(outcome, best, goal.objective == "cost")
    for names, alone_s in outcome.other_vendors.items():
        alone = "there is no plan" if alone_s is None else f"the best plan takes {alone_s:.4g} s"
        lines.append(
            f"{names}: of another vendor, and no library of collectives joins them (docs/scale.md). On them alone "
            f"{alone}. --mix-vendors prices plans over all GPUs, which cannot run"
        )
    small: dict[str, list[str]] = {}
    for shift in outcome.shifts:
        if abs(shift.share) >= HARDLY:
            lines.append(f"if {shift.condition}: {100 * shift.share:+.0f} %")
        else:
            what, word = shift.condition.rsplit(maxsplit=1)
            small.setdefault(what, []).append(word)
    said = ", or if ".join(f"{what} {' or '.join(words)}" for what, words in small.items())
    return lines + ([f"less than 1 % of a difference if {said}"] if said else [])


def _left_out(outcome: SearchResult, best: Found, goal: Goal) -> tuple[str, float]:
    """Returns the largest cause of the gap between the plan and its bound, and its seconds."""
    e = best.estimate
    parts = {"fill and drain": e.fill_s, "sums of gradients": e.sync_s, "gathers of parameters": e.gather_s}
    if goal.objective != "cost":
        own_s = best.iteration_s - outcome.bound_in_use - sum(parts.values())
        parts["that GPUs stay idle"] = outcome.bound_in_use - outcome.bound
        parts["that replicas, passes and layers do not suit every GPU"] = own_s
    return max(parts.items(), key=lambda part: part[1])


def _passed_over_lines(outcome: SearchResult, best: Found, in_usd: bool) -> list[str]:
    """Returns lines on a faster or cheaper plan that was not taken, with the reason."""
    other, lines = outcome.passed_over, []

    def passed_over(seconds: float) -> str:
        share, shown = 1 - seconds / best.iteration_s, f"a {'cheaper ' if in_usd else ''}plan of {seconds:.4g} s"
        return f"{shown} ({100 * abs(share):.1f} % {'shorter' if share >= 0 else 'longer'}) was passed over"

    if other is not None and other.plan:
        lines.append(f"{passed_over(other.iteration_s)}, because it is less regular: {other.plan}")
    elif other is not None:
        lines.append(
            f"{passed_over(other.iteration_s)}, because it depends more on transfers beside compute: if they blocked, "
            f"it would take {other.blocking_s:.4g} s, and this plan {other.chosen_blocking_s:.4g} s"
        )
    if outcome.steadier_than_s:
        lines.append(f"{passed_over(outcome.steadier_than_s)}, because it loses more where figures are off")
    return lines


def search_body(outcome: SearchResult, goal: Goal) -> dict[str, Any]:
    """Facts about the search."""
    names = ("method", "cpu_s", "evaluations", "simulations", "exact", "interrupted", "bound")
    return {
        **{name: getattr(outcome, name) for name in names},
        "gap_to_bound": outcome.gap(goal),
        "passed_over": None if outcome.passed_over is None else asdict(outcome.passed_over),
        "steadier_than_s": outcome.steadier_than_s or None,
        "other_vendors": outcome.other_vendors,
        "if_figures_are_off": {shift.condition: shift.share for shift in outcome.shifts},
    }
