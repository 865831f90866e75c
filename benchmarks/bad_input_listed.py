"""Malformed inputs by list: injections, special files, options, and plans that contradict themselves."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bad_input_cases import INJECTIONS, Case, _replaced, _start, command
from benchmarks.bad_input_files import CLUSTER, MODEL, PLAN, document_text, sliced_plan
from benchmarks.bad_input_jobs import jobs


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    """Like /dev/full where devices can be made (root); else a pipe."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


def _kernel(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": _fifo,
    "a device": _device,
    "/dev/zero": _zero,
    "a socket": _socket,
    "a link to itself": _loop,
    "a folder": _folder,
    "a file of the kernel": _kernel,
}


def special_files() -> Iterator[Case]:
    """Every kind of special file as input and as output."""
    for kind, make in SPECIAL.items():
        for name in ("plan.json", "cluster.yaml", "model.yaml"):
            yield Case(f"{kind} as {name}", "planner", command("check"), {name: make})
        yield Case(
            f"{kind} as profile.json",
            "planner",
            (*command("check"), "--profile", "profile.json"),
            {"profile.json": make},
        )
        yield Case(f"{kind} as plan", "start", _start()[1], {"plan.json": make})
        yield Case(f"{kind} as program", "schedule", ("check", "program.txt"), {"program.txt": make})
        targets = {
            "plan --out": (*command("plan")[:-2], "--out", "target"),
            "simulate --trace": (*command("simulate"), "--trace", "target"),
        }
        for option, words in targets.items():
            yield Case(f"{kind} as {option}", "planner", words, {"target": make})
        yield Case(
            f"{kind} as simulate --picture", "planner", (*command("simulate"), "--picture", "t.svg"), {"t.svg": make}
        )
        yield Case(
            f"{kind} as schedule --trace", "schedule", ("simulate", "1f1b", "--trace", "target"), {"target": make}
        )
        yield Case(f"{kind} as schedule --json", "schedule", ("simulate", "1f1b", "--json", "target"), {"target": make})
        yield Case(f"{kind} as schedule --picture", "schedule", ("show", "1f1b", "--picture", "t.svg"), {"t.svg": make})
        if kind != "a folder":
            words = (*command("emit")[:-2], "--out", "target")
            yield Case(f"{kind} as emit --out", "planner", words, {"target": make})
    for target in (
        f"/dev/het-bad-input-{os.getpid()}",
        "/proc/self/comm",
        "/sys/het-bad-input",
        "/nope\0x",
        "plan.json/x",
    ):
        if "\0" not in target:
            yield Case(f"plan --out {target}", "planner", (*command("plan")[:-2], "--out", target))
            yield Case(f"simulate --trace {target}", "planner", (*command("simulate"), "--trace", target))
            yield Case(f"emit --out {target}", "planner", (*command("emit")[:-2], "--out", target))
    yield Case("a name of 300 characters", "planner", (*command("plan")[:-2], "--out", "x" * 300))


def injections() -> Iterator[Case]:
    """Shell text in everything that becomes part of a script."""
    places: list[tuple[Any, ...]] = [("nodes", 0, "hosts", 0), ("nodes", 1, "hosts", 0), ("nodes", 0, "gpu")]
    places += [("nodes", n, "slurm", key) for n in (0, 1) for key in CLUSTER["nodes"][0]["slurm"]]
    for text in INJECTIONS:
        for place in places:
            file = document_text(_replaced(CLUSTER, place, text))
            key = [name for name in place if isinstance(name, str)][-1]
            yield Case(f"shell text in {key}", "planner", command("emit"), {"cluster.yaml": file}, scripts=True)
        gpu = {**CLUSTER, "gpus": {text: CLUSTER["gpus"]["mine"]}}
        gpu["nodes"] = [CLUSTER["nodes"][0], {**CLUSTER["nodes"][1], "gpu": text}]
        plan = _replaced(PLAN, ("stages", 1, "replicas", 0, "device"), text)
        files = {"cluster.yaml": document_text(gpu), "plan.json": document_text(plan)}
        yield Case("shell text as name of a GPU", "planner", command("emit"), files, "\n" in text, scripts=True)
        for option, wrong in (
            ("--job-name", True),
            ("--time-limit", True),
            ("--run-dir", True),
            ("--lr", True),
            ("--python", "\n" in text),
            ("--extra", True),
        ):
            yield Case(f"shell text in {option}", "planner", (*command("emit"), option, text), {}, wrong, scripts=True)
        folder = text.replace("/", "_")
        yield Case(
            "shell text as folder", "planner", (*command("emit")[:-2], "--out", folder), {}, "\n" in text, scripts=True
        )
        flag = f"--data-path {json.dumps(text)}"
        yield Case(
            "shell text as value of --extra", "planner", (*command("emit"), "--extra", flag), {}, False, scripts=True
        )
        quoted = "--data-path '\"" + text.replace("'", "") + "\"'"
        yield Case("quoted text of --extra", "planner", (*command("emit"), "--extra", quoted), {}, False, scripts=True)


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
    for value in ("never", "1:99", "24:00:00:00", "-5", "", "1h", "24:00:00 --exclusive", "\uff11"):
        yield Case("bad --time-limit", "planner", (*command("emit"), f"--time-limit={value}"))
    for value in ("", "a b", "-x", "a/b", "x" * 300, "%j"):
        yield Case("bad --job-name", "planner", (*command("emit"), f"--job-name={value}"))
    for value in ("relative", "/a%b", "/a\\b"):
        yield Case("bad --run-dir", "planner", (*command("emit"), f"--run-dir={value}"))
    for value in (
        "--num-layers 99",
        "--num-lay=99",
        "--seq-length 1",
        "--het-plan other.json",
        "--bf16",
        "--save x",
        "'",
        "word",
        "--load=x",
        "--yaml-cfg x.yaml",
    ):
        yield Case("bad --extra", "planner", (*command("emit"), f"--extra={value}"))


def _profile_options() -> Iterator[Case]:
    for value in ("-1", "x", "9" * 400, "1.5"):
        yield Case("bad --processes", "planner", ("profile", "--model", "model.yaml", f"--processes={value}"))
    for option in (
        "--window-s",
        "--windows",
        "--largest-batch-layers",
        "--tp",
        "--micro-batch-sizes",
        "--slice-tokens",
    ):
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


def contradictions() -> Iterator[Case]:
    """Plans, clusters and models whose parts do not fit each other."""
    yield from _plans()
    yield from _clusters()
    yield from _models()


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
    for change in (
        {"num_layers": 10**6},
        {"global_batch_size": 10**6},
        {"global_batch_size": 10**9},
        {"hidden_size": 66},
        {"num_layers": 10**18},
    ):
        yield Case(f"model: {change}", "planner", command("plan"), {"model.yaml": json.dumps({**MODEL, **change})})
    for text in (
        "yes",
        "012",
        "1:30",
        "0x10",
        "2024-01-01",
        "2024-01-01 10:00:00",
        "!!binary aGk=",
        "!!set {a}",
        "!!float 4",
    ):
        lines = "\n".join(f"{k}: {json.dumps(v)}" for k, v in MODEL.items() if k != "num_layers")
        yield Case(f"num_layers: {text}", "planner", command("plan"), {"model.yaml": f"{lines}\nnum_layers: {text}\n"})


def listed(rng: random.Random) -> list[Case]:
    """All listed cases, in an order of the seed's."""
    cases = [*special_files(), *injections(), *options(), *contradictions(), *jobs()]
    rng.shuffle(cases)
    return cases
