"""Malformed inputs by list: injections, special files, options, and plans that contradict themselves."""

import json
import os
import pickle
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.bad_input_cases import (
    CLUSTER,
    COMMAND,
    INJECTIONS,
    MODEL,
    PLAN,
    SPECIAL,
    Case,
    _replaced,
    _start,
    command,
    document_text,
    sliced_plan,
)
from megatron_het.checkpoint.choice import TRACKER
from megatron_het.features.watch.monitor import FORMAT, VERSION, identity
from megatron_het.plan import Plan, plan_hash

# Malformed input of the commands around a job: ``het-run``, the doctor, ``replan`` and ``replay``.

_HUGE = "9" * 400
_TOKEN = {"token": "0123456789abcdef0123456789abcdef\n"}
_NO_FILES: tuple[Any, ...] = (
    *("", "{}", "[]", "null", "\x00", "[" * 100_000, "{" * 9, '{"a": 1, "a": 2}'),
    b"\xff\xfe\x00",
)
_TRACE = "time_s,gpu,nodes,notice\n0,A100-40,1,\n100,mine,1,no\n"


def _job(*more: str) -> tuple[str, ...]:
    """A case of ``het-run`` whose controller would wait for its node."""
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


def _onto_files() -> Iterator[Case]:
    """Cases whose output path is an input of the command, or a file of another kind."""
    own = {"mine.txt": "notes\n", "program.txt": "program: x\n", "watch.json": "{}", "trace.csv": _TRACE}
    simulated, planned = command("simulate"), command("plan")[:-2]
    outputs: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("planner", (*planned, "--profile", "profile.json", "--out"), ("cluster.yaml", "model.yaml", "profile.json")),
        ("planner", (*simulated, "--trace"), ("plan.json", "cluster.yaml", "model.yaml")),
        ("planner", ("replan", ".", "--out"), ("cluster.yaml", "model.yaml", "watch.json")),
        ("doctor", ("--plan", "plan.json", "--cluster", "cluster.yaml", "--json"), ("plan.json", "cluster.yaml")),
        ("schedule", ("simulate", "program.txt", "--json"), ("program.txt", "plan.json")),
        ("schedule", ("simulate", "program.txt", "--trace"), ("program.txt", "plan.json")),
    )
    for tool, words, names in outputs:
        for name in (*names, "mine.txt"):
            yield Case(f"output onto {name}", tool, (*words, name), own)
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
        for content in (*_NO_FILES, b"\x80\x04N.", pickle.dumps(Planted()), *SPECIAL.values()):
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
    yield from _runs()
    yield from _job_files()
    yield from _doctors()
    yield from _replays()
    yield from _replans()


def special_files() -> Iterator[Case]:
    """Every kind of special file as input and as output."""
    check, plan, emit = command("check"), (*command("plan")[:-2], "--out"), (*command("emit")[:-2], "--out")
    rows: list[tuple[str, str, tuple[str, ...], str]] = [
        *((name, "planner", check, name) for name in ("plan.json", "cluster.yaml", "model.yaml")),
        ("profile.json", "planner", (*check, "--profile", "profile.json"), "profile.json"),
        ("plan", "start", _start()[1], "plan.json"),
        ("program", "schedule", ("check", "program.txt"), "program.txt"),
        ("plan --out", "planner", (*plan, "target"), "target"),
        ("simulate --trace", "planner", (*command("simulate"), "--trace", "target"), "target"),
        ("simulate --picture", "planner", (*command("simulate"), "--picture", "t.svg"), "t.svg"),
        ("schedule --trace", "schedule", ("simulate", "1f1b", "--trace", "target"), "target"),
        ("schedule --json", "schedule", ("simulate", "1f1b", "--json", "target"), "target"),
        ("schedule --picture", "schedule", ("show", "1f1b", "--picture", "t.svg"), "t.svg"),
        ("emit --out", "planner", (*emit, "target"), "target"),
    ]
    for kind, make in SPECIAL.items():
        for what, tool, words, file in rows:
            if (kind, what) != ("a folder", "emit --out"):
                yield Case(f"{kind} as {what}", tool, words, {file: make})
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


_BAD_NUMBERS = ("nan", "inf", "-inf", "-1", "x", "", "1e400", "9" * 400, "0x10", "1 2", "true")


def options() -> Iterator[Case]:
    """Bad values of every option, unknown options, and options that contradict each other."""
    for value in (*_BAD_NUMBERS, "0", "1.5"):
        yield Case("bad --memory-margin", "planner", (*command("check"), f"--memory-margin={value}"))
    for option in ("--limit-s", "--max-gpus", "--max-usd-per-iteration", "--min-iterations-per-s"):
        for value in (*_BAD_NUMBERS, "0"):
            words = (*command("plan"), f"{option}={value}")
            yield Case(f"bad {option}", "planner", words)
    for option in ("--train-iters", "--save-interval", "--cpus-per-task", "--lr"):
        values = (*_BAD_NUMBERS, *(() if option == "--cpus-per-task" else ("0",)))
        for value in values:
            yield Case(f"bad {option}", "planner", (*command("emit"), f"{option}={value}"))
    yield from _emit_options()
    yield from _profile_options()
    yield from _start_options()
    yield from _schedule_options()


def _emit_options() -> Iterator[Case]:
    bad = {
        "--time-limit": ("never", "1:99", "24:00:00:00", "-5", "", "1h", "24:00:00 --exclusive", "\uff11"),
        "--job-name": ("", "a b", "-x", "a/b", "x" * 300, "%j"),
        "--run-dir": ("relative", "/a%b", "/a\\b"),
        "--extra": (
            *("--num-layers 99", "--num-lay=99", "--seq-length 1", "--het-plan other.json", "--bf16", "--save x"),
            *("'", "word", "--load=x", "--yaml-cfg x.yaml"),
        ),
    }
    for option, values in bad.items():
        for value in values:
            yield Case(f"bad {option}", "planner", (*command("emit"), f"{option}={value}"))


def _profile_options() -> Iterator[Case]:
    for value in ("-1", "x", "9" * 400, "1.5"):
        yield Case("bad --processes", "planner", ("profile", "--model", "model.yaml", f"--processes={value}"))
    numbers = "--window-s --windows --largest-batch-layers --tp --micro-batch-sizes --slice-tokens"
    for option in numbers.split():
        for value in ("nan", "-1", "x", "9" * 400, "inf"):
            yield Case(f"bad {option}", "planner", ("profile", "--model", "model.yaml", f"{option}={value}"))
    for words in (
        (),
        ("--bogus",),
        ("nonsense",),
        ("plan",),
        ("check", "plan.json"),
        (*command("plan"), "--search", "magic"),
        (*command("plan"), "--schedules", "waltz"),
        (*command("plan"), "--schedules", ","),
    ):
        yield Case("bad words", "planner", words)


def _start_options() -> Iterator[Case]:
    for words in (
        ("--het-plan", "plan.json", "--het-plan", "sliced.json"),
        ("--het-plan", "plan.json", "--het-plan=plan.json"),
        ("--het-plan", "missing.json"),
        ("--het-plan", ""),
        ("--het-plan",),
        ("--het-bogus", "1"),
        ("--het-slices", "4"),
        ("--het-plan", "plan.json", "--het-schedule", "waltz"),
        *(("--het-plan", "sliced.json", f"--het-slices={v}") for v in ("0", "-1", "1", "x", "9" * 400, "1000000000")),
        *(("--het-plan", "plan.json", f"--het-trace-iteration={v}") for v in ("x", "9" * 400)),
        *(("--het-plan", "plan.json", f"--het-transport={v}") for v in ("x", "")),
    ):
        yield Case("bad flags of the start", "start", words)


def _schedule_options() -> Iterator[Case]:
    numbers = ("0", "-1", "x", "9" * 400, "1000000000")
    for option in ("--pp", "--microbatches", "--slices", "--chunks"):
        for value in numbers:
            if (option, value) != ("--chunks", "0"):
                yield Case(f"bad {option}", "schedule", ("simulate", "1f1b", f"{option}={value}"))
    for option in ("--latency", "--transfer", "--gather", "--attention-share", "--output-share"):
        for value in ("nan", "inf", "-1", "x", "1e400"):
            yield Case(f"bad {option}", "schedule", ("simulate", "1f1b", f"{option}={value}"))
    for value in ("nan 1 1 1", "inf 1 1 1", "1 1", "0 1 1 1", "x", "-1 1 1 1", "1e-400 1 1 1"):
        yield Case("bad --speeds", "schedule", ("simulate", "1f1b", f"--speeds={value}"))
    for option, values in (
        ("--layers", ("", "x", "1 | | 1", "-1 | 1", "9" * 400)),
        ("--replicas", ("x", "0 1 1 1", "1", "9999999999 1 1 1")),
        ("--route", ("x", "9 9 | 0 0", "0", "-1 | 0 | 0 | 0")),
    ):
        for value in values:
            if value:
                yield Case(f"bad {option}", "schedule", ("simulate", "1f1b", f"{option}={value}"))
    for words in (
        (),
        ("waltz",),
        ("simulate",),
        ("simulate", "waltz"),
        ("simulate", "1f1b", "--exchange-units=-1"),
        ("simulate", "slimpipe", "--slices", "4", "--exchange-units=1000000000"),
        ("simulate", "ministage", "--chunks", "2", "--parameters", "--prefetch=-5"),
        ("show", "1f1b", "--picture", "x.exe"),
        ("show", "1f1b", "--width=" + "9" * 400),
        ("check", "1f1b", "--transport", "pigeon"),
        ("compare", "--pp", "1000000", "--microbatches", "1000000", "--slices", "1"),
        ("compare", "--pp", "0", "--microbatches", "1", "--slices", "1"),
        ("compare", "--pp", "2", "--microbatches", "-1", "--slices", "1"),
    ):
        yield Case("bad words", "schedule", words)
    for kind, text in {
        "empty": "",
        "garbage": "program 1f1b",
        "a huge number": "program: x\nlayers: " + "9" * 5000 + "\nroute: 0\nreplicas: 1\nslices: 1\nplacement: loop\n"
        "forward_only: no\nvocabulary: no\nexchange_units: 0\ndevice 0.0: F0.0.0 B0.0.0\n",
        "many slices": "program: x\nlayers: 1\nroute: 0\nreplicas: 1\nslices: 1000000000\nplacement: loop\n"
        "forward_only: no\nvocabulary: no\nexchange_units: 0\ndevice 0.0: F0.0.0 B0.0.0\n",
        "many devices": "program: x\nlayers: 1\nroute: 0\nreplicas: 1000000000\nslices: 1\nplacement: loop\n"
        "forward_only: no\nvocabulary: no\nexchange_units: 0\ndevice 0.0: F0.0.0 B0.0.0\n",
    }.items():
        for name in ("check", "simulate", "show"):
            yield Case(f"program: {kind}", "schedule", (name, "program.txt"), {"program.txt": text})


def _plans() -> Iterator[Case]:
    replica = ("stages", 0, "replicas", 0)
    plans: dict[str, Any] = {
        "version 1.0": _replaced(PLAN, ("version",), 1.0),
        "version true": _replaced(PLAN, ("version",), True),
        "another version": _replaced(PLAN, ("version",), 2),
        "no feed-forward width": _replaced(PLAN, ("model", "ffn_hidden_size"), 0),
        "negative feed-forward width": _replaced(PLAN, ("model", "ffn_hidden_size"), -4),
        "negative vocabulary": _replaced(PLAN, ("model", "vocab_size"), -1),
        "other number of layers": _replaced(PLAN, ("stages", 0, "layers"), [4]),
        "a rank twice": _replaced(PLAN, (*replica, "ranks"), [1]),
        "a missing rank": _replaced(PLAN, ("stages", 1, "replicas", 0, "ranks"), [3]),
        "a microbatch twice": _replaced(PLAN, (*replica, "microbatches"), [0, 1, 2, 4, 6]),
        "a missing microbatch": _replaced(PLAN, (*replica, "microbatches"), [0, 2, 4]),
        "no stages": _replaced(PLAN, ("stages",), []),
        "no replicas": _replaced(PLAN, ("stages", 0, "replicas"), []),
        "speed 0": _replaced(PLAN, (*replica, "speed"), 0),
        "speed 1e-320": _replaced(PLAN, (*replica, "speed"), 1e-320),
        "huge slack": _replaced(PLAN, ("schedule", "parameters", "slack"), 1e308),
        "a list as parameter": _replaced(PLAN, ("schedule", "parameters", "slack"), [1]),
        "unknown parameter": _replaced(PLAN, ("schedule", "parameters"), {"speed": 1}),
        "unknown schedule": _replaced(PLAN, ("schedule", "name"), "waltz"),
        "a prediction of an unknown rank": _replaced(PLAN, ("predicted", "per_rank", 0, "rank"), 9),
        "two predictions of a rank": _replaced(PLAN, ("predicted", "per_rank", 0, "rank"), 1),
        "a billion slices": _replaced(
            _replaced(sliced_plan(), ("model", "seq_length"), 10**9), ("schedule", "parameters", "slices"), 10**9
        ),
        "fewer slices than stages": _replaced(sliced_plan(), ("schedule", "parameters", "slices"), 1),
    }
    for kind, plan in plans.items():
        for tool, words in (*(("planner", command(name)) for name in ("check", "simulate", "emit")), _start()):
            yield Case(kind, tool, words, {"plan.json": document_text(plan)})


def _clusters() -> Iterator[Case]:
    node = CLUSTER["nodes"][0]
    clusters: dict[str, Any] = {
        "a host twice": {"hosts": ["n1", "n1"]},
        "a host in two groups": {"hosts": ["n1", "n3"]},
        "an empty host": {"hosts": ["n1", ""]},
        "a blank host": {"hosts": ["n1", " "]},
        "a host with a blank": {"hosts": ["n1", "n 2"]},
        "a host with an option": {"hosts": ["n1", "-oProxyCommand=x"]},
        "too few hosts": {"hosts": ["n1"]},
        "a billion nodes": {"count": 10**9, "hosts": []},
        "negative quota": {"max_gpus": -1},
        "a blank partition": {"slurm": {"partition": " "}},
        "a partition with an option": {"slurm": {"partition": "gpu --exclusive"}},
        "a resource with its number": {"slurm": {"gres": "gpu:a100:4"}},
        "a fraction of a node": {"count": 1.5},
        "2.0 nodes": {"count": 2.0},
        "an infinite rate": {"collective_bytes_per_s": 1e309},
    }
    for kind, change in clusters.items():
        text = json.dumps({**CLUSTER, "nodes": [{**node, **change}, CLUSTER["nodes"][1]]})
        for name in ("plan", "check", "emit"):
            yield Case(kind, "planner", command(name), {"cluster.yaml": text})
    many = {"nodes": [{"gpu": "A10G", "count": 1, "gpus_per_node": 1, "zone": "z"} for _ in range(2000)]}
    yield Case("2,000 groups of nodes", "planner", command("plan"), {"cluster.yaml": json.dumps(many)})


def _models() -> Iterator[Case]:
    batches = ({"global_batch_size": 10**6}, {"global_batch_size": 10**9})
    for change in ({"num_layers": 10**6}, {"num_layers": 10**18}, *batches, {"hidden_size": 66}):
        yield Case(f"model: {change}", "planner", command("plan"), {"model.yaml": json.dumps({**MODEL, **change})})
    times = ("1:30", "2024-01-01", "2024-01-01 10:00:00")
    for text in ("yes", "012", "0x10", *times, "!!binary aGk=", "!!set {a}", "!!float 4"):
        lines = "\n".join(f"{k}: {json.dumps(v)}" for k, v in MODEL.items() if k != "num_layers")
        yield Case(f"num_layers: {text}", "planner", command("plan"), {"model.yaml": f"{lines}\nnum_layers: {text}\n"})


def listed(rng: random.Random) -> list[Case]:
    """All listed cases, in an order drawn from the seed."""
    cases = [*special_files(), *injections(), *options(), *_plans(), *_clusters(), *_models(), *jobs()]
    rng.shuffle(cases)
    return cases
