"""Outputs that a change of the code's form must not change: programs, plans, launch files and refusals, by name."""

import collections
import contextlib
import difflib
import hashlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks import bad_input
from benchmarks.bad_input import reported
from benchmarks.bad_input_listed import in_order
from examples.llama.job import model_of
from megatron_het.lowering.programs import build
from megatron_het.plan import Plan, PlanError, ScheduleSpec
from megatron_het.schedule import dumps
from testing.combination_cases import PARAMETERS, are_of_two_schedules, case_of, features, pair_row
from tests.unit.planner.emit_plans import KINDS, LAUNCH, MIDDLE, changed, context_parallel_plan, even_plan, uneven_plan
from tools.planner.__main__ import main as het_plan
from tools.planner.emit.command import emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import model_arguments

Corpus = dict[str, str]  # text by name: all of it where people can read it, else a summary and the hash of the whole


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- programs ------------------------------------------------------------------------------------------


def program_rows() -> dict[str, dict[str, Any]]:
    """Every schedule alone, and with every feature that goes with schedules, by name."""
    rows = {schedule: pair_row([("schedule", schedule)]) for schedule in PARAMETERS["schedule"]}
    for schedule, (name, value) in itertools.product(PARAMETERS["schedule"], features()):
        pair = (("schedule", schedule), (name, value))
        if name != "schedule" and not are_of_two_schedules(pair):
            rows[f"{schedule} with {name} = {value}"] = pair_row(pair)
    return rows


def programs_of(row: Mapping[str, Any], name: str) -> str:
    """The programs of training and evaluation of a row's plan, or why there are none."""
    try:
        plan = case_of(dict(row), name, 0).plan
        return "\n".join(f"-- {'evaluation' if mode else 'training'}\n{dumps(p)}" for mode, p in build(plan).items())
    except PlanError as error:
        return f"refused: {error}"


def programs() -> Corpus:
    """Operations by kind and the hash of every program; whole for the first schedule."""
    found = {}
    for name, row in program_rows().items():
        text = programs_of(row, name)
        if not text.startswith("refused") and name != "1f1b":
            plan = case_of(dict(row), name, 0).plan
            counts = collections.Counter(op.kind.name for ops in build(plan)[False].ops for op in ops)
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
            text = f"{plan.world_size} ranks; {kinds}; {digest(text)}"
        found[name] = text
    return found


# -- plans ---------------------------------------------------------------------------------------------


def nodes(gpu: str, count: int, gpus: int, zone: str = "a-1", usd: float = 1.0) -> dict[str, Any]:
    return {"gpu": gpu, "count": count, "gpus_per_node": gpus, "zone": zone, "usd_per_gpu_hour": usd}


CLUSTERS: dict[str, dict[str, Any]] = {
    "equal": {"nodes": [nodes("A100-40", 1, 4)]},
    "mixed": {"nodes": [nodes("A100-40", 1, 2, usd=3.0), nodes("RTX-3090", 1, 4, usd=0.4)]},
    "three": {"nodes": [nodes("H100-SXM", 1, 2, usd=5.0), nodes("A100-40", 1, 2, usd=3.0), nodes("T4", 2, 1, usd=0.3)]},
    "zones": {
        "nodes": [nodes("A100-40", 1, 2, usd=3.0), nodes("V100-16", 2, 2, "b-1", 1.0)],
        "links": [{"between": ["a", "b"], "bytes_per_s": 1.0e9, "latency_s": 0.01, "usd_per_gb": 0.02}],
    },
}
SHARED = {"nodes": [{"gpus": [{"type": "A100-40", "count": 2}, {"type": "V100-16", "count": 2}], "count": 1}]}
_DENSE: dict[str, Any] = {**MIDDLE, "micro_batch_sizes": [1, 2], "precision": "fp16"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "long": {**_DENSE, "seq_length": 16384, "num_query_groups": 2, "global_batch_size": 4, "micro_batch_sizes": [1]},
    "tied": {**_DENSE, "tied_embeddings": True, "precision": "fp32", "recompute": ["none", "full"]},
    "large": {**_DENSE, "num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16},
}
PLANS: dict[str, tuple[str, str, str]] = {
    # Every schedule with every cluster and every model, not with every pair of them.
    **{
        f"{schedule}, {cluster}, {model}": (cluster, model, f"--schedules {schedule}")
        for i, schedule in enumerate(("1f1b", "interleaved", "ministage", "slimpipe"))
        for j, cluster in enumerate(CLUSTERS)
        for model in (list(MODELS)[(i + j + shift) % len(MODELS)] for shift in (0, 1))
    },
    **{f"all, {cluster}, dense": (cluster, "dense", "") for cluster in CLUSTERS},
    **{f"all, mixed, {model}": ("mixed", model, "") for model in ("long", "tied")},
    "cost": ("mixed", "dense", "--objective cost"),
    "cost over zones": ("zones", "large", "--objective cost --schedules 1f1b"),
    "budget": ("three", "dense", "--max-usd-per-iteration 0.00002 --schedules 1f1b"),
    "no plan is that cheap": ("three", "dense", "--max-usd-per-iteration 0.0000001 --schedules 1f1b"),
    "at most three": ("mixed", "dense", "--max-gpus 3 --schedules 1f1b"),
    "documents": ("mixed", "long", "--document-lengths 700 --schedules slimpipe"),
    "zorse": ("mixed", "large", "--search zorse"),
    "sailor": ("zones", "dense", "--search sailor"),
    "poplar": ("three", "dense", "--search poplar"),
    "two kinds in a node": ("shared", "dense", "--schedules 1f1b"),
    "margin": ("mixed", "tied", "--memory-margin 0.01 --schedules 1f1b"),
}
"""Cluster, model and options by name."""


@contextlib.contextmanager
def in_folder() -> Iterator[Path]:
    """An empty working folder, and a terminal of 100 columns."""
    here = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"COLUMNS": "100", "HET_PLAN_VERIFY": "0"}),
    ):
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(here)


def plan_json(name: str) -> str:
    """The plan.json of ``het-plan plan``, or the error."""
    cluster, model, words = PLANS[name]
    said = io.StringIO()
    with in_folder() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        (folder / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTERS, "shared": SHARED}[cluster]), encoding="utf-8")
        (folder / "model.yaml").write_text(yaml.safe_dump(MODELS[model]), encoding="utf-8")
        code = het_plan(
            ["plan", "--cluster", "cluster.yaml", "--model", "model.yaml", *words.split(), "--no-verify", "--json"]
        )
        out = folder / "plan.json"
        return out.read_text(encoding="utf-8") if out.exists() else f"exit code {code}: {said.getvalue()}"


def plan_entry(name: str) -> str:
    """What of a plan people compare, and the hash of the file."""
    text = plan_json(name)
    if not text.startswith("{"):
        return text.strip()
    body = json.loads(text)
    stages = []
    for stage in body["stages"]:
        replicas = [f"{r.get('device')} x {len(r['ranks'])}: {len(r['microbatches'])}" for r in stage["replicas"]]
        stages.append(f"  {'+'.join(map(str, stage['layers']))} layers on {', '.join(replicas)}")
    schedule = json.dumps(body.get("schedule"))
    return "\n".join([f"{body['predicted']['iteration_s']:.6g} s; {schedule}; {digest(text)}", *stages])


def plans() -> Corpus:
    """Every plan."""
    return {name: plan_entry(name) for name in PLANS}


# -- launch files --------------------------------------------------------------------------------------


def sliced() -> Plan:
    return replace(even_plan(), schedule=ScheduleSpec("slimpipe", {"slices": 4, "vocabulary": True}))


def in_one_node() -> Plan:
    """Both kinds in the same node, of which not all devices are used."""
    return replace(uneven_plan(), notes="in one node")


IN_ONE_NODE = {
    "big": changed(KINDS["big"], gres="gpu", shared_node="both", devices=(2, 3, 4, 5)),
    "small": changed(KINDS["small"], gres="gpu", shared_node="both", devices=(0, 1), hosts=("n1", "n2")),
}
EMITTED: dict[str, tuple[Callable[[], Plan], dict[str, Any], bool]] = {
    "even": (even_plan, {}, False),
    "uneven": (uneven_plan, {"doctor": True, "save_interval": 50}, False),
    "context-parallel": (context_parallel_plan, {"environment": {"NCCL_DEBUG": "WARN"}}, False),
    "slices": (sliced, {"time_limit": "01:00:00", "job_name": "sliced"}, False),
    "elastic": (uneven_plan, {}, True),
    "in one node": (in_one_node, {}, True),
}
"""Plan, changed options, and whether the pool may change, by name."""


def emitted() -> Corpus:
    found = {}
    for name, (made, options, is_elastic) in EMITTED.items():
        plan = made()
        with in_folder() as folder:
            groups = {"MODEL": model_arguments(plan, model_of(plan)), "TRAINING": ["--train-iters", "10"]}
            elastic = ElasticOptions((("the rest", plan),)) if is_elastic else None
            kinds = IN_ONE_NODE if made is in_one_node else KINDS
            emit(plan, folder / "run", kinds, groups, replace(LAUNCH, iterations=10, **options), elastic=elastic)
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                text = file.read_text(encoding="utf-8").replace(str(folder), "FOLDER")
                found[f"{name}/{file.relative_to(folder / 'run')}"] = text.rstrip()
    return found


# -- refusals ------------------------------------------------------------------------------------------


def refusals() -> Corpus:
    """What is said about malformed input: all that was once wrong, and the last one of every kind that is listed."""
    cases = {case.kind: case for case in [*in_order(), *reported()]}
    wanted = [case for case in cases.values() if case.wrong and case.tool in ("planner", "schedule", "start", "doctor")]
    with mock.patch.dict(os.environ, {"COLUMNS": "100", "HET_PLAN_VERIFY": "0"}):
        said = [(answer.case.kind, answer.text) for answer in bad_input.run(wanted)]
    # The message of a refusal, without how the command is used.
    begins = [max(text.find("error: "), text.find("megatron_het: "), 0) for _, text in said]
    return {_of_every_run(kind): _of_every_run(text[at:]).strip() for (kind, text), at in zip(said, begins)}


def _of_every_run(text: str) -> str:
    """The text without names that differ from run to run."""
    return re.sub(r"(het-bad-input-|/proc/)\d+", r"\1N", re.sub(r"\S*bad-input-\w{8}/work", "FOLDER", text))


KINDS_OF_OUTPUT: dict[str, Callable[[], Corpus]] = {
    "programs": programs,
    "plans": plans,
    "emitted": emitted,
    "refusals": refusals,
}
RECORDS = Path(__file__).parent / "records"
_HEAD = "=== "


def write(kind: str, corpus: Corpus) -> None:
    RECORDS.mkdir(exist_ok=True)
    text = "".join(f"{_HEAD}{name}\n{body}\n" for name, body in corpus.items())
    (RECORDS / f"{kind}.txt").write_text(text, encoding="utf-8")


def read(kind: str) -> Corpus:
    text = (RECORDS / f"{kind}.txt").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in ("\n" + text).split(f"\n{_HEAD}")[1:])
    return {name: body.removesuffix("\n") for name, _, body in parts}


def differences(kind: str, corpus: Corpus, *, of: Collection[str] | None = None) -> list[str]:
    """How outputs differ from the recorded ones, of all names or of those in ``of``: a text per name."""
    recorded = {name: text for name, text in read(kind).items() if of is None or name in of}
    found = []
    for name in recorded.keys() | corpus.keys():
        old, new = (side.get(name, "(none)").splitlines() for side in (recorded, corpus))
        if old != new:
            found.append(
                "\n".join([f"{kind}: {name}", *difflib.unified_diff(old, new, "recorded", "now", "", "", 1, "")])
            )
    return sorted(found)


if sys.platform == "darwin":  # forks processes that have imported everything
    del KINDS_OF_OUTPUT["refusals"]
