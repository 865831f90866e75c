"""Malformed input of the commands around a job: ``het-run``, the doctor, ``replan`` and ``replay``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.bad_input_cases import INJECTIONS, Case, command
from benchmarks.bad_input_files import CLUSTER, MODEL, PLAN
from megatron_het.plan import Plan, plan_hash
from megatron_het.watch.monitor import FORMAT, VERSION, identity

_HUGE = "9" * 400
_TOKEN = {"token": "0123456789abcdef0123456789abcdef\n"}
_NO_FILES: tuple[Any, ...] = (
    "",
    "{}",
    "[]",
    "null",
    "\x00",
    "[" * 100_000,
    '{"a": 1, "a": 2}',
    b"\xff\xfe\x00",
    "{" * 9,
)
_TRACE = "time_s,gpu,nodes,notice\n0,A100-40,1,\n100,mine,1,no\n"


def _job(*more: str) -> tuple[str, ...]:
    """A controller that would wait for its node."""
    words = ("--controller", "127.0.0.1:29477", "--controller-only", "--folder", "run", "--token-file", "token")
    return (*words, *more)


def _runs() -> Iterator[Case]:
    good = ("--plans", "plan.json")
    numbers = ("x", "-1", "nan", "1e400", _HUGE, "")
    for option in ("--nodes", "--workers", "--restarts", "--copy-every"):
        for value in (*numbers, "1.5"):
            yield Case(f"bad {option}", "job", _job(*good, f"{option}={value}"), _TOKEN)
    for option in ("--timeout-s", "--lost-s", "--leave-s", "--return-s", "--plan-limit-s"):
        for value in (*numbers, "inf", "0"):
            yield Case(f"bad {option}", "job", _job(*good, f"{option}={value}"), _TOKEN)
    for value in ("", "x", "x:", ":1", "x:0", "x:65536", f"x:{_HUGE}", "x:-1", "no such host:1", "a\nb:1"):
        words = tuple(value if word == "127.0.0.1:29477" else word for word in _job(*good))
        yield Case("bad --controller", "job", words, _TOKEN)
    for value in ("", " ", "../x", "x" * 300, "a\nb", "\x1b[2J", *INJECTIONS[3:4]):
        yield Case("bad --node", "job", _job(*good, f"--node={value}"), _TOKEN)
    yield Case("bad --device", "job", _job(*good, "--device=a\nb"), _TOKEN)
    yield Case("--folder is a file", "job", _job(*good, "--folder", "plan.json"), _TOKEN)
    yield Case("no plans", "job", _job(), _TOKEN)
    yield Case("no model", "job", _job("--cluster", "cluster.yaml"), _TOKEN)
    for words in (("status",), ("leave",), ("replan", "--controller", "x"), ("status", "--controller", "127.0.0.1:9")):
        yield Case("bad command", "job", (*words, "--token-file", "token"), _TOKEN)
    yield Case("no flags", "job", ("--controller", "127.0.0.1:9", "--token-file", "token", "--folder", "run"), _TOKEN)
    for flag in ("--het-plan=plan.json", "--het-auto-batch"):
        words = ("--controller", "127.0.0.1:9", "--token-file", "token", "--folder", "run", "--", flag)
        yield Case("a flag of the controller's", "job", words, _TOKEN)


def _job_files() -> Iterator[Case]:
    for content in _NO_FILES:
        yield Case("plan of a job", "job", _job("--plans", "bad"), {**_TOKEN, "bad": content})
        yield Case("second plan of a job", "job", _job("--plans", "plan.json", "bad"), {**_TOKEN, "bad": content})
        searched = ("--model", "model.yaml", "--cluster", "cluster.yaml")
        for name in ("cluster.yaml", "model.yaml"):
            yield Case(f"{name} of a job", "job", _job(*searched), {**_TOKEN, name: content})
        yield Case("profile of a job", "job", _job(*searched, "--profile", "bad"), {**_TOKEN, "bad": content})
    for name, wrong in (
        ("cluster.yaml", {**CLUSTER, "nodes": "x"}),
        ("cluster.yaml", {**CLUSTER, "nodes": [{"gpu": ["x"], "count": 1}]}),
        ("model.yaml", {**MODEL, "num_layers": -1}),
    ):
        words = _job("--model", "model.yaml", "--cluster", "cluster.yaml")
        yield Case(f"{name} of a job", "job", words, {**_TOKEN, name: json.dumps(wrong)})
    other = {**PLAN, "training": {**PLAN["training"], "precision": "fp16"}}
    files = {**_TOKEN, "bad": json.dumps(other)}
    yield Case("plans of two trainings", "job", _job("--plans", "plan.json", "bad"), files)
    for token in ("", "short", "x" * 15, b"\xff" * 40, b"\x00" * 10_000_000):
        yield Case("bad token", "job", _job("--plans", "plan.json"), {"token": token})
    generation = {"number": 1, "plan": PLAN, "ranks": [1, 2, 3], "holders": [], "nodes": [], "loads": False,
                  "unsaved": []}  # fmt: skip
    running = {"over": False, "newest": 1, "generation": generation, "signature": "", "history": [], "members": [],
               "leaving": []}  # fmt: skip
    damages: tuple[dict[str, Any], ...] = (
        {"generation": {}},
        {"newest": "x"},
        {"members": [{"process": 1}]},
        {"leaving": 3},
        {"corrected": {}},
        {"corrected": {"cluster": {"nodes": [{}]}, "profile": None}},
    )
    for state in (*_NO_FILES, *(json.dumps({**running, **damage}) for damage in damages)):
        words = _job("--plans", "plan.json", "--folder", "kept")
        yield Case("state of a job", "job", words, {**_TOKEN, "kept/state.json": state})


def _doctors() -> Iterator[Case]:
    digest = plan_hash(Plan.from_json(PLAN))
    good = {"format": "megatron_het.expectations", "version": 1, "plan_hash": digest, "links": [], "layers": []}
    for words in (
        ("--limit-s=x",),
        *(("--limit-s", value) for value in ("0", "nan", "inf", "1e400", _HUGE)),
        *(("--slow-ratio", value) for value in ("0", "1", "nan", "x")),
        *(("--link-ratio", value) for value in ("-1", "inf", "")),
        ("--skip", "everything"),
        ("--transport", "pigeon"),
        ("--profile", "profile.json"),
        ("--expect", "bad", "--cluster", "cluster.yaml"),
        (),
        ("--plan", ""),
        ("--plan", "missing"),
        ("--", "--het-plan"),
        ("--", "--het-plan", "missing"),
        ("--plan", "plan.json", "--cluster", "missing"),
        ("--plan", "plan.json", "--json", "/dev/x"),
        ("--plan", "plan.json", "--expect", "missing"),
    ):
        yield Case("bad words of the doctor", "doctor", words)
    for content in (
        *_NO_FILES,
        json.dumps({**good, "links": [1]}),
        json.dumps({**good, "links": [{"first": 0}]}),
        json.dumps({**good, "layers": {}}),
        json.dumps({**good, "model": 3}),
        json.dumps({**good, "version": 99}),
        json.dumps({**good, "plan_hash": "another"}),
    ):
        words = ("--plan", "plan.json", "--expect", "bad")
        yield Case("expectations of the doctor", "doctor", words, {"bad": content})
        yield Case("plan of the doctor", "doctor", ("--plan", "bad"), {"bad": content})
        words = ("--plan", "plan.json", "--cluster", "bad", "--profile", "profile.json")
        yield Case("cluster of the doctor", "doctor", words, {"bad": content})


def _replays() -> Iterator[Case]:
    words = ("replay", "trace.csv", *command("plan")[1:5], "--limit-s", "1")
    line = _TRACE.splitlines()
    for text in (
        *_NO_FILES,
        "time_s,gpu,nodes\n",
        "time_s,gpu,gpu,nodes\n0,mine,mine,1\n",
        "a,b,c\n1,2,3\n",
        '"' * 9,
        "\n".join([line[0], "0,mine"]),
        *("\n".join([line[0], line[1], f"{cell},mine,1,"]) for cell in ("nan", "-1", "1e400", _HUGE, "x", "")),
        *("\n".join([line[0], line[1], f"9,mine,{cell},"]) for cell in ("nan", "-1", "9", _HUGE, "0.5", "")),
        *("\n".join([line[0], line[1], f"9,{cell},1,"]) for cell in ("", "H9000", "=cmd()")),
        "\n".join([line[0], "9,mine,1,no", "3,mine,1,no"]),
        "\n".join([line[0], "9,mine,1,perhaps"]),
        "\n".join([line[0], "0,mine,1,no"]),
        _TRACE + "200,mine,1,no\n" * 200_000,
    ):
        yield Case("a trace", "planner", words, {"trace.csv": text})
    trace = {"trace.csv": _TRACE}
    for content in (*_NO_FILES, '{"pause_s": 3}', '{"pause_s": {"join": {"whole": NaN}}}'):
        yield Case("pauses", "planner", (*words, "--pauses", "bad"), {**trace, "bad": content})
    for option in ("--join-s", "--death-s", "--restart-s", "--save-s", "--save-every"):
        for value in ("nan", "-1", "1e400", "x", ""):
            yield Case(f"bad {option}", "planner", (*words, f"{option}={value}"), trace)
    for more in (("--picture", "x.exe"), ("--picture", "/dev/x.svg"), ("--html", "plan.json/x"), ("--html", "/dev/x")):
        yield Case("bad target of a replay", "planner", (*words, *more), trace)


def _replans() -> Iterator[Case]:
    words = ("replan", ".", "--limit-s", "1")
    plan = Plan.from_json(PLAN)
    replicas = [(stage, at, r) for stage, s in enumerate(plan.stages) for at, r in enumerate(s.replicas)]
    devices = [
        {"device": i, "stage": stage, "replica": at, "ranks": list(r.ranks), "kind": r.device, "operations": {}}
        for i, (stage, at, r) in enumerate(replicas)
    ]
    good = {"format": FORMAT, "version": VERSION, "plan_hash": identity(plan), "iteration": 3, "findings": [],
            "predicted_iteration_s": 1.0, "iteration_s": 1.0, "devices": devices, "links": []}  # fmt: skip
    for content in (
        *_NO_FILES,
        *(json.dumps({**good, key: value}) for key, value in (
            ("devices", []), ("devices", [1]), ("iteration", -1), ("iteration_s", 1e999), ("iteration", True),
            ("plan_hash", "x"), ("links", {}), ("findings", [{"what": "x"}]), ("version", 2), ("x", 1),
        )),
    ):  # fmt: skip
        yield Case("what a run measured", "planner", words, {"watch.json": content})
    watch = {"watch.json": json.dumps(good)}
    for more in (
        *(("--restart-s", value) for value in ("nan", "-1", "1e400", "x")),
        *(("--memory-margin", value) for value in ("nan", "0", "-1", "2", "inf", "x")),
        ("--out", "/dev/x"),
        ("--out", "cluster.yaml/x"),
        *((f"--{name}", "missing") for name in ("plan", "cluster", "model", "profile", "watch")),
    ):
        yield Case("bad words of replan", "planner", (*words, *more), watch)
    yield Case("no run", "planner", ("replan", "missing"))


def jobs() -> Iterator[Case]:
    """All of them."""
    yield from _runs()
    yield from _job_files()
    yield from _doctors()
    yield from _replays()
    yield from _replans()
