"""Commands of ``het-plan``: plan, simulate, check, explain, compare, report and support; calls profile and emit."""

import argparse
import dataclasses
import io
import json
import os
import platform
import stat
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

from megatron_het.plan import PlanError
from megatron_het.plan.validate import most_chunks
from megatron_het.safe_io import MAX_PASSES, shown, write_bytes

from ..costs.build import as_said, candidate_of, check_same_model, read_plan, rooms_of
from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from ..errors import PlannerError, command, plan_errors
from ..inputs.cluster import Cluster, load_cluster
from ..inputs.files import check_target, write_text
from ..inputs.model import Model, model_of
from ..inputs.packing import seat_replicas, strayed
from ..report.analysis import alternatives, binding, comparison, complete, one_more_node, row_of
from ..report.tables import (
    DATASHEETS,
    GIB,
    bound_lines,
    host_memory_lines,
    offloaded,
    plans_tables,
    say,
    search_body,
    shown_progress,
    summary,
    summary_tables,
    table,
)
from ..search.methods import search
from ..search.outcome import (
    Found,
    Goal,
    Progress,
    SearchResult,
    check_planned_precision,
    check_prices,
    collector_paused,
    cpu_limit,
    each_s,
    estimator_from,
    goal_from,
    left_s,
    nothing_found,
    searching_s,
)
from .dry_run import lines as verified_lines
from .dry_run import unverified_lines, verifier_of

# ``het-plan support``: the files for a bug report in one archive, without data, weights or tokens.


_PACKAGES = ("megatron-het", "megatron-core", "torch", "numpy", "transformer-engine", "scipy", "pydantic", "rich")
_TEXTS = (".json", ".yaml", ".yml", ".sh", ".sbatch", ".log", ".out", ".err")
_MOST_BYTES, _MOST_FILES = 1 << 20, 500


def support(options: argparse.Namespace) -> int:
    """Write the archive."""
    kept = [file for given in options.paths for file in _texts(given)][:_MOST_FILES]
    if os.path.lexists(options.out):
        raise PlannerError(str(options.out), "--out", None, "the file is there", "Name another one")
    check_target(options.out, "--out")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("versions.json", json.dumps(_versions(), indent=1))
        for number, file in enumerate(kept):
            with file.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MOST_BYTES))
                name = os.fsencode(file.name).decode(errors="backslashreplace")  # need not be valid Unicode
                archive.writestr(f"{number:03}-{name}", stream.read(_MOST_BYTES))
    write_bytes(options.out, packed.getvalue())
    sys.stdout.write(f"wrote {options.out}: versions and files: {len(kept)}. Look into it before you send it\n")
    return 0


def _texts(given: Path) -> Iterator[Path]:
    """Returns the regular files with a known ending in a folder and its subfolders."""
    if not given.exists():
        raise PlannerError(str(given), "(file)", None, "it is not there")
    found = sorted(given.rglob("*")) if given.is_dir() else [given]
    for file in found:
        is_text = file.suffix in _TEXTS and not any(part.startswith("iter_") for part in file.parts)
        if is_text and stat.S_ISREG(os.lstat(file).st_mode):
            yield file
        elif file == given:
            raise PlannerError(str(given), "(file)", None, f"is not packed: its name ends in none of {_TEXTS}")


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


# Advice if the limit on passes per iteration has excluded deep pipelines.


def larger_micro_batches(cluster: Cluster, model: Model, overfull: float) -> str:
    """Returns the advice to allow larger micro batches; empty if pipelines of all depths were searched.

    Every microbatch passes through every stage forwards and backwards, so the largest micro batch allows the most
    stages.  Layers and GPUs limit them too.

    Args:
        overfull: Memory that the fullest GPU would need at best, over what it has; so many times the stages are wanted.
    """
    largest, useful = max(model.batch_sizes), min(model.num_layers, cluster.total_gpus)
    stages = most_chunks(model.global_batch_size // largest, 1)
    if stages >= useful:
        return ""
    wanted = min(useful, max(stages + 1, ceil(stages * overfull)))
    enough = -(-model.global_batch_size // (MAX_PASSES // (2 * wanted)))
    room = "one stage" if stages == 1 else f"{stages} stages"
    return (
        f"allow micro_batch_sizes of {enough} or more, with which there may be {wanted} stages (those of {largest} "
        f"leave room for {room}, as a plan has at most {MAX_PASSES} passes per iteration)"
    )


def plan(options: argparse.Namespace) -> int:
    """Run ``plan``: search, write the plan and print it."""
    from megatron_het.plan import save_plan

    estimator, goal = estimator_from(options), goal_from(options)
    check_target(options.out, "--out")
    verifier = verifier_of(options, estimator)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    if not best.runnable:
        problem = f"the plan needs ZeRO-{best.candidate.zero_stage}, which the runtime has only as ministages"
        hint = "Allow them (--schedules ministage, distributed_optimizer: true in the model file, at least 2 layers), "
        hint += "use --search auto, or GPUs with more memory"
        raise PlannerError("command line", "--search", options.search, problem, hint)
    checked = None
    if verifier is not None and (options.verify or not outcome.by_hand):
        with shown_progress(lambda: verifier.progress, options):
            checked = verifier.verified(estimator, outcome, lambda tighter: run_search(tighter, goal, options))
        best = checked.found
    estimator = estimator.running(best.candidate.gpus())
    with collector_paused():
        notes = f"made by the planner, --search {options.search}"
        made = complete(estimator, best, notes, left_s(options, outcome.cpu_s))
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        save_plan(made, options.out)
    body = summary(estimator, best.candidate, best.estimate, best.simulated_s)
    body |= {"plan_file": options.out, "search": search_body(outcome, goal)}
    tables = [*summary_tables(body), *bound_lines(outcome, goal)]
    if made.predicted is not None and made.predicted.costs is None:
        tables.append("The plan is too large to price its operations in the time left: its run does not watch itself.")
    if checked is not None:
        body["verify"] = checked.as_json()
        tables += verified_lines(checked)
    else:
        tables += unverified_lines(options, estimator, outcome.by_hand)
    tight = best.candidate.recompute != "none" or max(g.tp for s in best.candidate.stages for g in s.groups) > 1
    if tight and not estimator.model.sequence_parallel:
        tables.append("sequence_parallel is false in the model: with true, plans with TP need less memory and time.")
    tables += [] if options.profile else [DATASHEETS.format(command())]
    ended = " and was interrupted: this is the best so far" if outcome.interrupted else ""
    say(body, options, *tables, f"wrote {options.out}; search took {outcome.cpu_s:.2f} s{ended}")
    return 0


def run_search(estimator: Estimator, goal: Goal, options: argparse.Namespace) -> SearchResult:
    """Search with a progress line on a terminal."""
    check_prices(estimator, goal, options.cluster)
    progress = Progress(limit_s=searching_s(options, estimator.cluster.total_gpus))

    def text() -> str:
        unit = "USD" if goal.objective == "cost" else "s"
        return progress.text + (f", best {progress.best:.4g} {unit}" if progress.best < float("inf") else "")

    with cpu_limit(progress, options.limit_s), shown_progress(text, options):
        outcome = search(options.search, estimator, goal, progress, options.robust is not False)
    outcome.by_hand = outcome.interrupted and not progress.spent
    if outcome.by_hand and outcome.best is None:
        raise KeyboardInterrupt
    return outcome


def require(outcome: SearchResult, estimator: Estimator, goal: Goal, options: argparse.Namespace) -> Found:
    """Returns the best plan; the error names the limiting constraint and the nearest feasible change."""
    if outcome.best is not None:
        return outcome.best
    if outcome.nearest is None and outcome.interrupted:
        raise nothing_found(options.limit_s)
    if outcome.nearest is None:
        problem = "no plan can be evaluated: no GPU kind has figures for this model"
        hint = "Check TP sizes and profile"
        raise PlannerError(options.cluster, "nodes", estimator.cluster.total_gpus, problem, hint)
    candidate, estimate = outcome.nearest
    limits = (
        ("--max-usd-per-iteration", goal.max_usd_per_iteration, estimate.usd_per_iteration),
        ("--max-gpus", goal.max_gpus, candidate.world_size),
    )
    if not estimator.fits(estimate):
        given = [f"{key} {limit:g}" for key, limit, _ in limits if limit is not None]
        problem = f"nothing fits within {' and '.join(given)}" if given else "the model fits nowhere"
        problem += ": at best"
        if estimate.fullest <= estimator.memory_margin:  # main memory is too small for the offloaded data
            rows = offloaded(estimator, estimate)
            rows = [row for row in rows if 0 < (row["limit_bytes"] or 0) < row["bytes_per_node"]]
            problem += " main memory is short. " + "; ".join(host_memory_lines(rows))
        else:
            worst = estimate.worst_memory
            usable, gpu = worst.capacity_bytes * estimator.memory_margin, estimator.cluster.nodes[worst.group.pool].gpu
            problem += f", stage {worst.stage} needs {worst.total_bytes / GIB:.1f} GiB of "
            problem += f"{usable / GIB:.1f} GiB usable on {gpu}"
        hint, layers = _memory_hint(estimator, estimate), estimator.model.num_layers
        hint = f"Raise the limit, or leave it out. {hint}" if given else hint
        raise PlannerError(options.model, "num_layers", layers, problem, hint)
    for key, limit, value in limits:
        if limit is not None and value > limit:
            hint = f"The nearest plan found needs {value:.6g}"
            raise PlannerError("command line", key, limit, "no plan meets it", hint)
    if goal.min_iterations_per_s is None or estimate.iteration_s * goal.min_iterations_per_s <= 1:
        problem = "no plan with these schedules was found for this model and cluster"
        hint = f"The nearest plan uses {candidate.schedule}: add it. Interleaved needs stages with equal numbers of "
        hint += "replicas and microbatches that divide by stages x replicas, "
        hint += "ministage needs distributed_optimizer: true"
        raise PlannerError("command line", "--schedules", ",".join(goal.schedules), problem, hint)
    hint = f"The nearest plan found reaches {1 / estimate.iteration_s:.6g}"
    raise PlannerError("command line", "--min-iterations-per-s", goal.min_iterations_per_s, "no plan meets it", hint)


def _memory_hint(estimator: Estimator, estimate: Estimate) -> str:
    model = estimator.model
    hints = []
    if "full" not in model.recompute:
        hints.append("allow recompute: [none, full]")
    if not model.distributed_optimizer:
        hints.append("set distributed_optimizer: true")
    worst = estimate.worst_memory
    overfull = worst.total_bytes / (estimator.memory_margin * worst.capacity_bytes)
    if passes := larger_micro_batches(estimator.cluster, model, overfull):
        hints.append(passes)
    elif min(model.batch_sizes) > 1:
        hints.append("allow micro_batch_sizes: [1]")
    over = sum(max(0.0, m.total_bytes - estimator.memory_margin * m.capacity_bytes) * m.ranks for m in estimate.memory)
    nodes = estimator.cluster.nodes
    largest = max(
        {m.group.pool for m in estimate.memory}, key=lambda p: estimator.cluster.gpu(nodes[p].gpu).memory_bytes
    )
    gpu = estimator.cluster.gpu(nodes[largest].gpu)
    room = estimator.memory_margin * gpu.memory_bytes - gpu.reserved_bytes
    if estimator.short_of_host_memory(estimate):
        hints.append(
            "more main memory (host_memory_bytes in the cluster file; without it, twice that of the GPUs counts)"
        )
    if over and room > 0:
        more = f"{ceil(over / room)} {nodes[largest].gpu}"
        hints.append(f"add about {more} (by the missing memory), or GPUs with more memory")
    elif over:
        hints.append("GPUs with more memory, or a larger --memory-margin")
    return "Nearest changes: " + "; ".join(hints)


def load(options: argparse.Namespace) -> tuple[Estimator, Any]:
    """Returns (estimator, plan) from a plan file and the options' cluster and model."""
    from ..emit.options import check_experts

    estimator = estimator_from(options)
    made = read_plan(options.plan)
    check_same_model(made, estimator.model, str(options.plan), str(options.model))
    check_planned_precision(made, estimator.model, str(options.plan))
    check_experts(made, estimator.model, str(options.plan))
    kinds = {device for stage in made.stages for replica in stage.replicas for device in replica.devices}
    pools = [pool for pool, node in enumerate(estimator.cluster.nodes) if node.gpu in kinds]
    return estimator.running(pools), made


def priced(estimator: Estimator, made: Any, options: argparse.Namespace) -> tuple[Candidate, Estimate, Any]:
    """Returns a plan as a candidate on the cluster, with its estimate and the nodes of its ranks."""
    candidate, seated = candidate_of(made, estimator.cluster, options.plan)
    sys.stderr.writelines(f"{options.plan}: {note}\n" for note in strayed(made, seated))
    candidate = as_said(estimator, candidate, made)
    estimate = estimator.estimate(candidate)
    if estimate is None:
        problem = "no figures for some replica of this plan"
        raise PlannerError(options.plan, "stages", len(made.stages), problem, "Profile its TP and micro batch size")
    return candidate, estimate, seated


def simulate(options: argparse.Namespace) -> int:
    """Simulate a plan with its own routing."""
    from megatron_het.schedule.view import visualize

    from ..costs.simulation import simulate_candidate

    if options.trace:
        check_target(options.trace, "--trace")
    if options.picture:
        check_target(options.picture, "--picture", (".svg", ".png", ".pdf", ".txt"))
    estimator, made = load(options)
    refuse_unrunnable(made, options.plan)
    candidate, estimate, seated = priced(estimator, made, options)
    found = simulate_candidate(estimator, candidate, estimate, made, seated)
    body = summary(estimator, candidate, estimate, found.iteration_s)
    body["bubble_fraction"] = found.result.bubble_fraction
    body["bubble_by_cause_s"] = [dataclasses.asdict(b) for b in found.result.bubble]
    body["simulated_peak_bytes"] = list(found.peak_bytes)
    if options.trace:
        write_text(options.trace, json.dumps(visualize.chrome_trace(found.result)))
    if options.picture and options.picture.endswith(".txt"):
        write_text(options.picture, visualize.text_picture(found.result) + "\n")
    elif options.picture:
        visualize.draw(found.result, options.picture)
    written = [f"wrote {path}" for path in (options.trace, options.picture) if path]
    say(body, options, *summary_tables(body), *written)
    return 0


def refuse_unrunnable(made: Any, file: str) -> None:
    """Refuse a plan that the runtime refuses, because it has no iteration time; raises PlannerError."""
    from megatron_het.features.registry import check_plan_alone

    with plan_errors(file):
        check_plan_alone(made)


def profile(options: argparse.Namespace) -> int:
    """Measure this node."""
    from ..profile.worker import run

    found = run(options, model_of(options).profiled)
    if found is not None:
        body = {
            "profile": str(options.out),
            "devices": [d.kind for d in found.devices],
            "timings": sum(len(d.timings) for d in found.devices),
            "links": len(found.links),
            "complete": found.complete,
        }
        kinds = ", ".join(d.kind for d in found.devices)
        said = f"wrote {options.out}: {body['timings']} layer timings on {kinds}, {body['links']} links"
        say(body, options, said)
    return 0


def emit(options: argparse.Namespace) -> int:
    """Write the launch files."""
    from ..emit.command import run

    model = model_of(options)
    model.check_run(options.model)
    with shown_progress("Megatron's checks of the flags", options):
        written = run(options, model, load_cluster(options.cluster))
    files = {name: str(path) for name, path in written.files.items()}
    body = {
        "files": files,
        "model_notes": model.notes,
        "notes": written.notes,
        "nodes": [{"kind": n.name, "ranks": list(n.ranks), "host": n.host} for n in written.nodes],
    }
    say(body, options, *[f"wrote {path}" for path in files.values()], *model.notes, *written.notes)
    return 0


def explain(options: argparse.Namespace) -> int:
    """Run ``explain``: bottlenecks, best plans of other kinds, and the gain from one more node of each group."""
    from ..report.html import check_page, page_of_search

    check_page(options)
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    running = estimator.running(best.candidate.gpus())
    body = summary(running, best.candidate, best.estimate, best.simulated_s)
    body["search"] = search_body(outcome, goal)
    body["binding"] = binding(running, goal, best)
    body["runners_up"] = alternatives(estimator, outcome, best)
    progress = Progress(limit_s=each_s(options, len(estimator.cluster.nodes)))
    with shown_progress(lambda: progress.text, options):
        body["one_more_node"] = one_more_node(estimator, goal, best, progress)
    shown = [row_of(estimator, "this plan", best, best), *body["runners_up"]]
    runners = plans_tables("Plans of other kinds", "differs by", shown)
    more = table("One more node", "kind", "s per iteration", "change")
    for row in body["one_more_node"]:
        more.add_row(row["place"], f"{row['iteration_s']:.4g}", f"{100 * row['change']:+.1f} %")
    page = page_of_search(
        running, best, options, "Plan", binding=body["binding"], runners_up=shown, one_more_node=body["one_more_node"]
    )
    lines = [*bound_lines(outcome, goal), *[f"- {text}" for text in body["binding"]]]
    written = [f"wrote {file}" for file in page.values()]
    say(body | page, options, *summary_tables(body), *lines, *runners, more, *written)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Run ``compare``: the plan beside an even split, single kinds of GPU and single schedules."""
    from ..report.html import check_page, page_of_search

    check_page(options)
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    progress = Progress(limit_s=each_s(options, len(estimator.cluster.nodes) + len(goal.schedules)))
    with shown_progress(lambda: progress.text, options):
        rows = comparison(estimator, goal, best, progress)
    shown = plans_tables("Comparison", "what", rows)
    running = estimator.running(best.candidate.gpus())
    page = page_of_search(running, best, options, "Comparison", comparison=rows)
    lines = bound_lines(outcome, goal)
    written = [f"wrote {file}" for file in page.values()]
    say({"rows": rows, "search": search_body(outcome, goal)} | page, options, *shown, *lines, *written)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the page."""
    from ..report.collect import collect, rows_of
    from ..report.html import ENDINGS, notes_of, render

    check_target(options.html, "--html", ENDINGS)
    goal = goal_from(options)
    estimator, made = load(options)
    check_prices(estimator, goal, options.cluster)
    refuse_unrunnable(made, options.plan)
    candidate, estimate, seated = priced(estimator, made, options)
    title = f"Plan for {estimator.model.name} on {estimator.cluster.name}"
    notes = notes_of(options, options.plan)
    page, body = collect(estimator, candidate, estimate, made, seated, title=title, notes=notes)
    if not options.no_search:
        estimator = estimator.running(range(len(estimator.cluster.nodes)))
        mine = Found(candidate, estimate, body["iteration_s"])
        kinds = len(estimator.cluster.nodes)
        progress = Progress(limit_s=each_s(options, 2 * kinds + len(goal.schedules)))
        with shown_progress(lambda: progress.text, options):
            body["comparison"] = comparison(estimator, goal, mine, progress)
            body["one_more_node"] = one_more_node(estimator, goal, mine, progress)
        page["comparison"] = rows_of(estimator, body["comparison"])
        page["one_more_node"] = body["one_more_node"]
    write_text(options.html, render(page))
    say(body | {"html": options.html}, options, *summary_tables(body), f"wrote {options.html}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Run ``check``: print whether a plan can run and fits; exit code 1 if not."""
    estimator, made = load(options)
    problem = _obstacle(made)
    problems, notes, fullest = ([problem], [], []) if problem else _misfits(estimator, made, options)
    notes += estimator.model.notes
    tables: list[Any] = ["the plan is valid and fits", *fullest]
    if problems:
        tables = [table("Problems", "where", "what")]
        for problem in problems:
            tables[0].add_row(problem["key"], problem["problem"])
    say({"valid": not problems, "problems": problems, "notes": notes}, options, *tables, *notes)
    return 1 if problems else 0


def _obstacle(made: Any) -> dict[str, Any] | None:
    """Returns why the runtime would refuse the plan regardless of cluster and flags; None if it would not."""
    from megatron_het.features.registry import check_plan_alone
    from megatron_het.lowering.programs import build

    try:
        check_plan_alone(made)
    except PlanError as error:
        return _problem(error.where, error)
    try:
        build(made)
    except PlanError as error:
        return {"key": "schedule.name", "problem": error.problem}
    return None


def _problem(key: str, error: PlanError | PlannerError) -> dict[str, Any]:
    """Returns an error of the plan as a row: its key, and a text with value, problem and hint."""
    hint = f". {error.hint}" if error.hint else ""
    return {"key": key, "problem": f"{shown(error.value)}: {error.problem}{hint}"}


def _misfits(
    estimator: Estimator, made: Any, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Returns what does not fit the cluster, what cannot be checked, and the stage with the fullest memory."""
    try:
        seat_replicas(made, rooms_of(estimator.cluster), options.plan)
    except PlannerError as error:
        return [_problem(error.key, error)], [], []
    candidate, estimate, _ = priced(estimator, made, options)
    apart = estimator.cluster.vendors_problem(candidate.gpus())
    problems: list[dict[str, Any]] = [{"key": "stages", "problem": apart}] if apart else []
    for m in estimate.memory:
        if m.total_bytes > estimator.memory_margin * m.capacity_bytes:
            gpu, usable = estimator.cluster.nodes[m.group.pool].gpu, estimator.memory_margin * m.capacity_bytes
            problem = f"needs {m.total_bytes / GIB:.2f} GiB of {usable / GIB:.2f} GiB usable on {gpu} "
            problem += f"(TP {m.group.tp}); gradients {m.gradient_bytes / GIB:.2f}, "
            problem += f"activations {m.activation_bytes / GIB:.2f}, optimizer {m.optimizer_bytes / GIB:.2f} GiB"
            problems.append({"key": f"stages[{m.stage}]", "problem": problem})
    for pool, held, limit in estimator.short_of_host_memory(estimate):
        if estimator.cluster.nodes[pool].host_memory_bytes:  # assumed sizes only limit searches
            problem = f"offloads {held / GIB:.1f} GiB to a node that has {limit / GIB:.1f} GiB of main memory for it"
            problems.append({"key": f"nodes[{pool}].host_memory_bytes", "problem": problem})
    for node in {estimator.cluster.nodes[pool].gpu for pool in candidate.gpus()}:
        device = estimator.cluster.gpu(node)
        if not device.supports(made.training.precision):
            problem = f"{node} does not support {made.training.precision}"
            problems.append({"key": "training.precision", "problem": problem})
    worst = estimate.worst_memory
    fullest = (
        f"memory is fullest on stage {worst.stage} ({estimator.cluster.nodes[worst.group.pool].gpu}): "
        f"{worst.total_bytes / GIB:.1f} of {worst.capacity_bytes / GIB:.1f} GiB"
    )
    return problems, host_memory_lines(offloaded(estimator, estimate)), [fullest]
