"""Malformed inputs that once ran a command, hung, ended in a traceback or were accepted; all are in every test run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.bad_input_cases import (
    CLUSTER,
    MODEL,
    PLAN,
    Case,
    _bomb,
    _planner,
    _Raw,
    _replaced,
    _start,
    _text,
    command,
    document_text,
)
from benchmarks.bad_input_listed import listed

_LISTED = (
    *("shell text in hosts", "shell text in partition", "shell text in --job-name", "shell text in --time-limit"),
    *("shell text in --run-dir", "shell text in --python", "a device as plan --out", "a device as simulate --trace"),
    *("a file of the kernel as plan --out", "a pipe as plan", "a pipe as plan.json", "/dev/zero as cluster.yaml"),
    *("a billion slices", "fewer slices than stages", "2,000 groups of nodes", "num_layers: 2024-01-01"),
    *("num_layers: !!binary aGk=", "num_layers: !!float 4", "huge slack", "bad --processes", "version 1.0"),
    *("no feed-forward width", "negative feed-forward width", "negative vocabulary", "an infinite rate"),
    *("an empty host", "a blank host", "a host twice", "a host in two groups", "bad --lr", "bad --cpus-per-task"),
    *("bad --time-limit", "bad --extra", "model: {'num_layers': 1000000}", "model: {'global_batch_size': 1000000}"),
)
"""Kinds of :func:`listed` of which one case each is taken."""
_MANY = 5000


def _numbers() -> Iterator[tuple[str, str, Any, tuple[Any, ...], Any]]:
    """(what, file, document, place, value)."""
    speed = ("stages", 0, "replicas", 0, "speed")
    yield "a speed that is not a number", "plan.json", PLAN, speed, _Raw("NaN")
    yield "a speed of hundreds of digits", "plan.json", PLAN, speed, _Raw("9" * 400)
    yield "true as a number", "plan.json", PLAN, ("model", "num_layers"), True
    for value in (_Raw("NaN"), -1.0):
        yield f"a prediction of {value}", "plan.json", PLAN, ("predicted", "iteration_s"), value
    yield "an infinite launch", "cluster.yaml", CLUSTER, ("gpus", "mine", "launch_s"), _Raw(".inf")


def many_replicas() -> str:
    """A plan whose first stage has a replica for each of many microbatches."""
    replicas = [{"ranks": [i], "microbatches": [i], "device": "A100-40", "speed": 1.0} for i in range(_MANY)]
    last = {**PLAN["stages"][1]["replicas"][0], "ranks": [_MANY], "microbatches": list(range(_MANY))}
    stages = [{"layers": [3], "replicas": replicas}, {"layers": [1], "replicas": [last]}]
    training = {**PLAN["training"], "global_batch_size": _MANY}
    return document_text(
        {**{k: v for k, v in PLAN.items() if k != "predicted"}, "training": training, "stages": stages}
    )


def reported() -> Iterator[Case]:
    """One case or more of everything that was found."""
    for what, name, document, place, value in _numbers():
        targets = [*_planner("check", "simulate"), *([_start()] if name == "plan.json" else _planner("plan"))]
        for tool, words in targets:
            yield Case(what, tool, words, {name: _text(_replaced(document, place, value))})
    deep = document_text(PLAN).replace("{", '{"deep": ' + "[" * 200_000 + "]" * 200_000 + ", ", 1)
    twice = document_text(PLAN).replace('"version": 1,', '"version": 1, "version": 1,', 1)
    for what, text in {"a deep plan": deep, "a key twice in JSON": twice}.items():
        yield Case(what, "planner", command("check"), {"plan.json": text})
        yield Case(what, _start()[0], _start()[1], {"plan.json": text})
    plain = "\n".join(f"{key}: {value}" for key, value in MODEL.items() if isinstance(value, int))
    models = {
        "a key twice in YAML": f"{plain}\nnum_layers: 4\n",
        "aliases that multiply in a field": f"{_bomb()}name: *h\n{plain}\n",
    }
    for what, text in models.items():
        yield Case(what, "planner", command("plan"), {"model.yaml": text})
    yield Case("thousands of replicas", _start()[0], _start()[1], {"plan.json": many_replicas()}, wrong=False)
    twice_given = ("--het-plan", "plan.json", "--het-plan", "sliced.json")
    yield Case("a plan given twice", "start", twice_given)
    by_kind = {case.kind: case for case in listed(random.Random(0))}
    yield from (by_kind[kind] for kind in _LISTED)
