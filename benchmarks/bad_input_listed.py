"""Malformed inputs by list: injections, special files, options, and plans that contradict themselves.

The texts and options are in ``bad_input_listed.yaml``.
"""

import functools
import itertools
import json
import os
import pickle
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bad_input_cases import (
    CLUSTER,
    COMMAND,
    INJECTIONS,
    MODEL,
    PLAN,
    PROFILE,
    SPECIAL,
    Case,
    _replaced,
    command,
    document_text,
    place_of,
    sliced_plan,
    written_out,
)
from megatron_het.checkpoint.choice import TRACKER
from megatron_het.features.watch.monitor import FORMAT, VERSION, identity
from megatron_het.plan import Plan, plan_hash

_LISTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ONCE_WRONG: dict[str, list[str]] = _LISTED["once_wrong"]
"""Kinds that ran a command, hung, ended in a traceback or were accepted."""
_JOBS = ("runs", "job_files", "doctors", "replays", "replans")
"""Groups of the list: the commands around a job."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(written_out(text)))


@functools.cache
def _documents() -> dict[str, dict[str, Any]]:
    """Returns the good documents of which files with changed fields are made, by name."""
    plan = Plan.from_json(PLAN)
    replicas = [(s, q, r) for s, stage in enumerate(plan.stages) for q, r in enumerate(stage.replicas)]
    devices = [
        {"device": i, "stage": s, "replica": q, "ranks": list(r.ranks), "kind": r.device, "operations": {}}
        for i, (s, q, r) in enumerate(replicas)
    ]
    good: dict[str, dict[str, Any]] = _LISTED["documents"]
    good["running"]["generation"]["plan"] = PLAN
    good["expectations"]["plan_hash"] = plan_hash(plan)
    good["watch"] |= {"format": FORMAT, "version": VERSION, "plan_hash": identity(plan), "devices": devices}
    own = {"cluster": CLUSTER, "model": MODEL, "profile": PROFILE, "plan": PLAN, "sliced plan": sliced_plan()}
    return {**good, **own}


def _text(content: Any, document: str) -> str | bytes:
    """Returns what is in a file: a text of the list, or a good document with other fields."""
    text: str | bytes = written_out(content)
    return json.dumps({**_documents()[document], **content}) if isinstance(content, dict) else text


def _case(row: dict[str, Any], kind: str, *more: str, files: dict[str, Any] | None = None) -> Case:
    """Returns the command of a row with more words and files."""
    base = _LISTED["commands"][row["as"]]
    own = {name: _text(content, base.get("document", "")) for name, content in base.get("files", {}).items()}
    return Case(kind, base["tool"], (*_words(base["words"]), *more), {**own, **(files or {})})


def _group(name: str) -> Iterator[Case]:
    """Yields the cases of a group of the list."""
    for row in _LISTED[name]:
        given = [*_LISTED["sets"].get(row.get("set"), ()), *row.get("values", row.get("files", ()))]
        for option, value in itertools.product(row.get("options", ()), map(written_out, given)):
            yield _case(row, f"bad {option}", f"{option}={value}")
        for content, target in itertools.product(given, row.get("of", ())):
            files = {target["name"]: _text(content, row.get("document", ""))}
            yield _case(target, target["kind"], *_words(target.get("words", "")), files=files)
        for more in row.get("words", ()):
            yield _case(row, row["kind"], *_words(f"{more} {row.get('then', '')}"))


def _onto_files() -> Iterator[Case]:
    """Yields cases whose output path is an input of the command, or a file of another kind."""
    own = {"mine.txt": "notes\n", "program.txt": "program: x\n", "watch.json": "{}"}
    for row in _LISTED["onto_files"]:
        for name in row["names"]:
            yield _case(row, f"output onto {name}", *_words(row["words"]), name, files=own)
    yield Case("output onto plan.json", "planner", (*command("emit")[:-2], "--out", "."), own)


def _reports() -> Iterator[Case]:
    """Cases with bad folders for a run's report."""
    words = ("--num-layers", "4", "--het-plan", "plan.json", "--het-report")
    for kind, make in SPECIAL.items():
        if kind != "a folder":
            yield Case(f"{kind} as --het-report", "start", (*words, "target"), {"target": make})
        yield Case(f"{kind} as rank-0.json", "start", (*words, "report"), {"report/rank-0.json": make})
    for target in ("plan.json", "plan.json/x", "/proc/self/x", "/sys/x", "x" * 300):
        yield Case("bad --het-report", "start", (*words, target))


def _side_files() -> Iterator[Case]:
    """Cases with malformed files beside a checkpoint's data, which must be refused or ignored, never executed."""
    for name in (TRACKER, "het-checksums-0.json", "metadata.json", ".metadata", "common.pt"):
        place = name if name == TRACKER else f"iter_0000004/{name}"
        # The newest checkpoint is found without a tracker, and is believed as far as checksums go that are there.
        wrong = name not in (TRACKER, "het-checksums-0.json")
        unnoted = {} if name == "het-checksums-0.json" else {"saved/iter_0000004/het-checksums-0.json": ""}
        for content in (
            *map(written_out, _LISTED["sets"]["no_files"]),
            b"\x80\x04N.",
            pickle.dumps(Planted()),
            *SPECIAL.values(),
        ):
            for beside in ({}, unnoted) if unnoted else ({},):
                files = {**beside, f"saved/{place}": content}
                yield Case(f"{name} of a checkpoint", "checkpoint", ("saved",), files, wrong)


class Planted:
    """An object that runs a command in any process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (COMMAND,)


def jobs() -> Iterator[Case]:
    """All cases of the commands around a job."""
    yield from _onto_files()
    yield from _reports()
    yield from _side_files()
    yield from itertools.chain.from_iterable(map(_group, _JOBS))


def special_files() -> Iterator[Case]:
    """Every kind of special file as input and as output."""
    plan, emit = (*command("plan")[:-2], "--out"), (*command("emit")[:-2], "--out")
    for kind, make in SPECIAL.items():
        for row in _LISTED["special"]:
            if (kind, row["what"]) != ("a folder", "emit --out"):
                yield _case(row, f"{kind} as {row['what']}", *_words(row["words"]), files={row["file"]: make})
    for target in (f"/dev/het-bad-input-{os.getpid()}", "/proc/self/comm", "/sys/het-bad-input", "plan.json/x"):
        yield Case(f"plan --out {target}", "planner", (*plan, target))
        yield Case(f"simulate --trace {target}", "planner", (*command("simulate"), "--trace", target))
        yield Case(f"emit --out {target}", "planner", (*emit, target))
    yield Case("a name of 300 characters", "planner", (*plan, "x" * 300))


def injections() -> Iterator[Case]:
    """Cases with shell commands in every field that becomes part of a script."""

    def case(kind: str, *more: str, files: dict[str, Any] | None = None, wrong: bool = True) -> Case:
        words = command("emit") if "--out" not in more else command("emit")[:-2]
        return Case(kind, "planner", (*words, *more), files or {}, wrong, scripts=True)

    places: list[tuple[Any, ...]] = [("nodes", 0, "hosts", 0), ("nodes", 1, "hosts", 0), ("nodes", 0, "gpu")]
    places += [("nodes", n, "slurm", key) for n in (0, 1) for key in CLUSTER["nodes"][0]["slurm"]]
    for text in INJECTIONS:
        broken = "\n" in text
        for place in places:
            key = [name for name in place if isinstance(name, str)][-1]
            yield case(f"shell text in {key}", files={"cluster.yaml": document_text(_replaced(CLUSTER, place, text))})
        gpu = {**CLUSTER, "gpus": {text: CLUSTER["gpus"]["mine"]}}
        gpu["nodes"] = [CLUSTER["nodes"][0], {**CLUSTER["nodes"][1], "gpu": text}]
        plan = _replaced(PLAN, ("stages", 1, "replicas", 0, "device"), text)
        files = {"cluster.yaml": document_text(gpu), "plan.json": document_text(plan)}
        yield case("shell text as name of a GPU", files=files, wrong=broken)
        for option in ("--job-name", "--time-limit", "--run-dir", "--lr", "--python", "--extra"):
            yield case(f"shell text in {option}", option, text, wrong=broken or option != "--python")
        yield case("shell text as folder", "--out", text.replace("/", "_"), wrong=broken)
        yield case("shell text as value of --extra", "--extra", f"--data-path {json.dumps(text)}", wrong=False)
        quoted = "--data-path '\"" + text.replace("'", "") + "\"'"
        yield case("quoted text of --extra", "--extra", quoted, wrong=False)


def _changed() -> Iterator[Case]:
    """Yields cases of documents that are good but for the values at some places."""
    for group in _LISTED["changed"]:
        for kind, changes in group["kinds"].items():
            document = _documents()[group["document"]]
            for place, value in changes.items():
                document = _replaced(document, place_of(place), value)
            for name in group["as"]:
                yield _case({"as": name}, kind, files={group["name"]: document_text(document)})
    many = {"nodes": [{"gpu": "A10G", "count": 1, "gpus_per_node": 1, "zone": "z"} for _ in range(2000)]}
    yield Case("2,000 groups of nodes", "planner", command("plan"), {"cluster.yaml": json.dumps(many)})


def _texts() -> Iterator[Case]:
    """Yields cases of files that are no documents."""
    for group in _LISTED["texts"]:
        good = document_text(_documents()[group["document"]]) if "document" in group else group.get("in", "")
        for kind, given in group["kinds"].items():
            old, new = map(written_out, given if isinstance(given, list) else (good, given))
            text = good.replace(old, new, 1)
            for name in group["as"]:
                yield _case({"as": name}, kind, files={group["name"]: text})


def _numbers_of_layers() -> Iterator[Case]:
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in MODEL.items() if key != "num_layers")
    for text in _LISTED["numbers_of_layers"]:
        yield Case(f"num_layers: {text}", "planner", command("plan"), {"model.yaml": f"{lines}\nnum_layers: {text}\n"})


def in_order() -> list[Case]:
    """All listed cases, in the order of the list."""
    fixed = (special_files(), injections(), _group("options"), _changed(), _texts(), _numbers_of_layers(), jobs())
    return [*itertools.chain.from_iterable(fixed)]


def listed(rng: random.Random) -> list[Case]:
    """All listed cases, in an order drawn from the seed."""
    cases = in_order()
    rng.shuffle(cases)
    return cases
