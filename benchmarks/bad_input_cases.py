"""Malformed inputs by mutation: every case is wrong in a known way, whatever the seed.

A case is a command line and the files it reads.  Mutations of numbers, names and structure come from a
good file and a random place in it; texts that would run in a shell or control a terminal, special files
and bad options are listed, and drawn from.
"""

import copy
import json
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The good files that ``benchmarks.bad_input`` makes bad ones of.


MODEL: dict[str, Any] = {
    "name": "small",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
    "seq_length": 128,
    "global_batch_size": 8,
    "micro_batch_sizes": [1],
    "precision": "bf16",
    "gated": True,
    "recompute": ["none"],
}
CLUSTER: dict[str, Any] = {
    "name": "mixed",
    "nodes": [
        {
            "gpu": "A100-40",
            "count": 2,
            "gpus_per_node": 2,
            "zone": "east-a",
            "network_bytes_per_s": 12.5e9,
            "network_latency_s": 2e-5,
            "usd_per_gpu_hour": 3.0,
            "hosts": ["n1", "n2"],
            "slurm": {"partition": "gpu", "constraint": "a100", "account": "lab", "gres": "gpu:a100"},
        },
        {
            "gpu": "mine",
            "count": 1,
            "gpus_per_node": 2,
            "zone": "west-a",
            "collective_bytes_per_s": 1e9,
            "max_gpus": 2,
            "measured_rates": [[1, 1e6, 1e9], [1, 64e6, 2e9]],
            "hosts": ["n3"],
            "slurm": {"partition": "gpu", "constraint": "mine", "account": "lab", "gres": "gpu:mine"},
        },
    ],
    "links": [{"between": ["east", "west"], "bytes_per_s": 1e9, "latency_s": 1e-3, "usd_per_gb": 0.02}],
    "gpus": {
        "mine": {
            "flops": {"bf16": 1e14, "fp32": 2e13},
            "memory_bytes": 24_000_000_000,
            "memory_bytes_per_s": 9e11,
            "intra_node_bytes_per_s": 3e10,
            "launch_s": 1e-5,
            "source": "made up",
        }
    },
}


def _timing(layer: str, speed: float) -> dict[str, Any]:
    return {
        "layer": layer,
        "micro_batch_size": 1,
        "tp": 1,
        "slice_tokens": 128,
        "forward_s": 1e-3 / speed,
        "backward_s": 2e-3 / speed,
        "update_s": 1e-4,
        "parameters": 50_000,
        "activation_bytes": 1_000_000,
        "output_bytes": 16_384,
        "context_tokens": 0,
        "recompute": "none",
        "workspace_bytes": 0,
    }


PROFILE: dict[str, Any] = {
    "format": "megatron_het.profile",
    "version": 1,
    "model": {
        **{k: MODEL[k] for k in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")},
        **{k: MODEL[k] for k in ("vocab_size", "seq_length", "precision", "name")},
    },
    "devices": [
        {
            "kind": kind,
            "memory_bytes": 24_000_000_000,
            "gpus_per_node": 2,
            "timings": [_timing(layer, speed) for layer in ("embedding", "layer", "head")],
            "largest_batches": [{"tp": 1, "layers": 2, "micro_batch_size": 4, "recompute": "none"}],
            "reserved_bytes": 0,
        }
        for kind, speed in (("A100-40", 2.0), ("mine", 1.0))
    ],
    "links": [
        {
            "scope": "network",
            "first_kind": "A100-40",
            "second_kind": "mine",
            "operation": "p2p",
            "participants": 2,
            "latency_s": 1e-4,
            "bytes_per_s": 1e9,
            "samples": [[1024, 1e-4], [1_048_576, 1e-3]],
        }
    ],
    "complete": True,
    "notes": "made up",
}


def _replica(ranks: list[int], microbatches: list[int], device: str, speed: float) -> dict[str, Any]:
    return {"ranks": ranks, "microbatches": microbatches, "device": device, "speed": speed}


PLAN: dict[str, Any] = {
    "format": "megatron_het.plan",
    "version": 1,
    "model": {
        **{k: MODEL[k] for k in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")},
        **{k: MODEL[k] for k in ("seq_length", "ffn_hidden_size", "vocab_size")},
        "tied_embeddings": False,
    },
    "training": {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "precision": "bf16",
        "sequence_parallel": False,
        "recompute": "none",
        "distributed_optimizer": False,
    },
    "stages": [
        {
            "layers": [3],
            "replicas": [_replica([0], [0, 2, 4, 6], "A100-40", 1.0), _replica([1], [1, 3, 5, 7], "A100-40", 1.0)],
        },
        {"layers": [1], "replicas": [_replica([2], list(range(8)), "mine", 0.5)]},
    ],
    "schedule": {"name": "1f1b", "parameters": {"slack": 0.5}},
    "predicted": {
        "iteration_s": 0.1,
        "bubble_fraction": 0.2,
        "per_rank": [
            {
                "rank": rank,
                "compute_s": 0.05,
                "parameter_bytes": 1000,
                "gradient_bytes": 1000,
                "optimizer_bytes": 4000,
                "activation_bytes": 100,
            }
            for rank in range(3)
        ],
    },
    "notes": "made up",
}


def sliced_plan() -> dict[str, Any]:
    """The same stages with slices."""
    return {**PLAN, "schedule": {"name": "slimpipe", "parameters": {"slices": 4}}}


def other_plans() -> dict[str, dict[str, Any]]:
    """Plans of further kinds for the same model and cluster, by name."""
    in_a_v = [{**stage, "layers": [1, 1]} for stage in PLAN["stages"]]
    one = {
        "layers": [4],
        "replicas": [
            _replica([0], [0, 3], "A100-40", 1.0),
            _replica([1], [1, 4], "A100-40", 1.0),
            _replica([2], [2, 5], "mine", 0.5),
        ],
    }
    sizes = [2, 2, 1, 1, 1, 1]
    first, second = PLAN["stages"]
    routed = [
        {**first, "replicas": [_replica([0], [0, 2, 4], "A100-40", 1.0), _replica([1], [1, 3, 5], "A100-40", 1.0)]},
        {**second, "replicas": [_replica([2], list(range(6)), "mine", 0.5)]},
    ]
    unequal = {**PLAN["training"], "micro_batch_size": max(sizes), "micro_batch_sizes": sizes}
    sharded = {**unequal, "distributed_optimizer": True}
    window = {"window": True, "zero": 3}
    return {
        "zb-v": {**PLAN, "stages": in_a_v, "schedule": {"name": "zb-v", "parameters": {}}},
        "v-half": {**PLAN, "stages": in_a_v, "schedule": {"name": "v-half", "parameters": {}}},
        "depths": {**PLAN, "schedule": {"name": "1f1b", "parameters": {"depths": [2]}}},
        "unequal": {**PLAN, "training": unequal, "stages": routed},
        "data-parallel": {
            **PLAN,
            "training": unequal,
            "stages": [one],
            "schedule": {"name": "data-parallel", "parameters": {}},
        },
        "zero-3": {
            **PLAN,
            "training": sharded,
            "stages": [{**one, "layers": [2, 2]}],
            "schedule": {"name": "data-parallel", "parameters": window},
        },
    }


def document_text(document: Any) -> str:
    """JSON, which YAML readers read too."""
    return json.dumps(document, indent=1)


MARK = "executed.mark"
"""Injected commands make a file of this name."""
COMMAND = f"touch $MARK_FOLDER/{MARK}"
INJECTIONS = (
    f"x$({COMMAND})",
    f"x`{COMMAND}`",
    f"x; {COMMAND};",
    f"x\n{COMMAND}\n",
    f'x"; {COMMAND}; "',
    f"x'; {COMMAND}; '",
    f"x}}; {COMMAND}; ${{y",
    f"x & {COMMAND} &",
)
_PLANNER = ("check", "simulate", "emit", "plan")


@dataclass(frozen=True)
class Case:
    """One start of one command.

    Attributes:
        kind: What was done to the input.
        tool: ``planner``, ``schedule``, ``job``, ``doctor``, ``start`` (the beginning of training) or ``checkpoint``
            (the choice of one to load).
        words: Its command line.
        files: Text or bytes of files, by name; a callable makes a special file at the path.
        wrong: Whether the input must be refused; else it may be accepted, but must do no harm.
        scripts: Whether scripts that were written are to be run.
    """

    kind: str
    tool: str
    words: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)
    wrong: bool = True
    scripts: bool = False


def good_files() -> dict[str, Any]:
    """The files that every case starts from."""
    return {
        "plan.json": document_text(PLAN),
        "sliced.json": document_text(sliced_plan()),
        "cluster.yaml": document_text(CLUSTER),
        "model.yaml": document_text(MODEL),
        "profile.json": document_text(PROFILE),
    }


def command(name: str, *more: str) -> tuple[str, ...]:
    """A planner's command line on the good files."""
    words = [name, "--cluster", "cluster.yaml", "--model", "model.yaml"]
    if name != "plan":
        words.insert(1, "plan.json")
    if name == "plan":
        words += ["--limit-s", "1", "--out", "out.json"]
    if name == "emit":
        words += ["--out", "run"]
    return (*words, *more)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every scalar of a document and where it is."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(document)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return out


class _Raw(str):
    """Text that goes into a document as it is, without quotes."""


def _text(document: Any) -> str:
    """JSON with raw pieces."""
    raw: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            name = f"@raw{len(raw)}@"
            raw[f'"{name}"'] = str(value)
            return name
        if isinstance(value, dict):
            return {k: marked(v) for k, v in value.items()}
        return [marked(v) for v in value] if isinstance(value, list) else value

    text = document_text(marked(document))
    for name, piece in raw.items():
        text = text.replace(name, piece)
    return text


_NUMBERS: tuple[tuple[str, Any], ...] = (
    ("not a number", _Raw("NaN")),
    ("not a number (YAML)", _Raw(".nan")),
    ("infinite", _Raw("Infinity")),
    ("infinite (YAML)", _Raw(".inf")),
    ("too large for a float", _Raw("1e400")),
    ("hundreds of digits", _Raw("9" * 400)),
    ("thousands of digits", _Raw("7" * 6000)),
    ("negative", -1),
    ("negative, large", _Raw("-" + "9" * 300)),
    ("a text for a number", "many"),
    ("a number in quotes", "4"),
    ("true for a number", True),
    ("a list for a number", [1]),
    ("a mapping for a number", {"a": 1}),
    ("a date for a number", "2024-01-01"),
)
_TEXTS: tuple[tuple[str, Any], ...] = (
    ("a number for a text", 7),
    ("a list for a text", ["a"]),
    ("a mapping for a text", {"a": "b"}),
    ("a terminal's control sequence", "\x1b]0;x\x07\x1b[2J"),
    ("a line break in a name", "a\nb"),
    ("a null character", "a\0b"),
    ("a very long name", "x" * 1_000_000),
)
_SWITCHES: tuple[tuple[str, Any], ...] = (
    ("a number for a switch", 2),
    ("a text for a switch", "yes"),
    ("a list for a switch", [True]),
)
# Texts that may be anything, or where another word means something else but is not wrong.
_FREE = {"notes", "source", "name", "zone", "gpu", "kind", "first_kind", "second_kind", "layer", "device"}


def _leaf_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case | None:
    path, value = rng.choice(list(_leaves(document)))
    if isinstance(value, bool):
        kind, new = rng.choice(_SWITCHES)
    elif isinstance(value, int | float):
        kind, new = rng.choice(_NUMBERS)
    else:
        kind, new = rng.choice(_TEXTS)
        if kind in ("a line break in a name", "a very long name") and path[-1] in ("notes", "source"):
            return None
        if kind == "a null character" and path[-1] in ("notes", "source"):
            return None
        if kind.startswith("a terminal") and path[-1] in ("notes", "source"):
            return None
    tool, words = rng.choice(targets)
    return Case(f"{kind}: {_where(path)}", tool, words, {name: _text(_replaced(document, path, new))})


def _where(path: tuple[Any, ...]) -> str:
    return ".".join("*" if isinstance(k, int) else str(k) for k in path)


def _shape_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case:
    """Keys and structure of the whole file."""
    text = document_text(document)
    lines = text.splitlines()
    keyed = [i for i, line in enumerate(lines) if '": ' in line and line.rstrip().endswith(",")]
    i = rng.choice(keyed)
    cut = rng.randrange(1, len(text) - 2)
    deep = rng.choice((100, 2_000, 200_000))
    changes: dict[str, Callable[[], Any]] = {
        "a key twice": lambda: "\n".join([*lines[: i + 1], lines[i], *lines[i + 1 :]]),
        "an unknown key": lambda: text.replace("{", '{"colour": 1, ', 1),
        "truncated": lambda: text[:cut],
        "empty": lambda: "",
        "blank": lambda: "\n\n  \n",
        "a list": lambda: f"[{text}]",
        "a number": lambda: "17",
        "a text": lambda: '"plan"',
        "null": lambda: "null",
        "two documents": lambda: f"{text}\n---\n{text}" if name.endswith("yaml") else text + text,
        "garbage behind": lambda: text + "\n}]",
        "not UTF-8": lambda: text.encode().replace(b'"', b'"\xff\xfe', 1),
        "random bytes": lambda: rng.randbytes(2000),
        "deep lists": lambda: "[" * deep + "]" * deep,
        "deep mappings": lambda: '{"a":' * deep + "1" + "}" * deep,
        "deep value": lambda: text.replace("{", '{"deep": ' + "[" * deep + "]" * deep + ", ", 1),
        "half of a surrogate pair": lambda: text.replace('": "', '": "\\ud800', 1),
        "a tag": lambda: text.replace("{", '{"a": !!python/object/apply:os.system ["' + COMMAND + '"], ', 1),
        "an endless alias": lambda: "a: &a [*a]",
        "aliases that multiply": _bomb,
        "aliases that multiply in a field": lambda: _bomb() + "name: *h\nnum_layers: *h\nnodes: *h\n",
        "larger than what is read": lambda: " " * (33 << 20) + text,
    }
    kind = rng.choice(list(changes))
    tool, words = rng.choice(targets)
    return Case(f"{kind}: the file", tool, words, {name: changes[kind]()})


def _bomb() -> str:
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefg", "bcdefgh"):
        text += f"{name}: &{name} [" + ", ".join([f"*{before}"] * 10) + "]\n"
    return text


_REQUIRED: dict[str, list[str | tuple[str | int, ...]]] = {
    "plan.json": ["format", "version", "model", "training", "stages", ("model", "num_layers"), ("model", "seq_length")],
    "cluster.yaml": ["nodes", ("nodes", 0, "gpu"), ("nodes", 1, "count"), ("nodes", 0, "gpus_per_node"), "links"],
    "model.yaml": ["num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "seq_length", "global_batch_size"],
    "profile.json": ["format", "version", "model", ("model", "precision"), ("devices", 0, "kind")],
}


def _removed_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case:
    """A required key is missing."""
    choice = rng.choice(_REQUIRED[name])
    path = choice if isinstance(choice, tuple) else (choice,)
    out = copy.deepcopy(document)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    tool, words = rng.choice(targets)
    return Case(f"missing: {_where(path)}", tool, words, {name: _text(out)})


# Files that are none: made at the path where a file is expected.


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


def _planner(*names: str) -> list[tuple[str, tuple[str, ...]]]:
    return [("planner", command(name)) for name in names]


def _start(plan: str = "plan.json") -> tuple[str, tuple[str, ...]]:
    return "start", ("--num-layers", "4", "--het-plan", plan)


def mutated(rng: random.Random, count: int) -> Iterator[Case]:
    """``count`` mutations of the four kinds of files."""
    profiled = [("planner", (*command(name), "--profile", "profile.json")) for name in ("plan", "simulate", "check")]
    sources: list[tuple[str, Any, list[tuple[str, tuple[str, ...]]]]] = [
        ("plan.json", PLAN, [*_planner("check", "simulate", "emit"), _start(), _start()]),
        ("plan.json", sliced_plan(), [*_planner("check", "simulate", "emit"), _start()]),
        *(("plan.json", plan, [*_planner("check", "simulate", "emit"), _start()]) for plan in other_plans().values()),
        *[("cluster.yaml", CLUSTER, _planner(*_PLANNER))] * 3,  # as often as half of the plans
        *[("model.yaml", MODEL, _planner(*_PLANNER))] * 3,
        ("profile.json", PROFILE, profiled),
    ]
    made = 0
    while made < count:
        name, document, targets = rng.choice(sources)
        makers = (_leaf_case, _leaf_case, _leaf_case, _shape_case, _removed_case)
        case = rng.choice(makers)(rng, name, document, targets)
        if case is not None:
            made += 1
            yield case


def random_numbers(rng: random.Random, count: int) -> Iterator[Case]:
    """Numbers that may or may not be wrong: any answer is fine, if it comes in time and in order."""
    # A plan that is found would train dry first, which takes its time in processes of its own.
    planned = [("planner", command("plan", "--no-verify")), *_planner("simulate")]
    sources = (
        ("plan.json", PLAN, [*_planner("check", "simulate"), _start()]),
        ("plan.json", sliced_plan(), [*_planner("check", "simulate"), _start()]),
        *(("plan.json", plan, [*_planner("check", "simulate"), _start()]) for plan in other_plans().values()),
        ("cluster.yaml", CLUSTER, planned),
        ("model.yaml", MODEL, planned),
    )
    for _ in range(count):
        name, document, targets = rng.choice(sources)
        paths = [p for p, v in _leaves(document) if isinstance(v, int | float) and not isinstance(v, bool)]
        path = rng.choice(paths)
        value = rng.choice((0, 1, 2, 7, 1000, 10**5, 10**6, 10**7, 10**9, 10**18, 2**63 - 1, 1e-300, 1e300, 0.5))
        tool, words = rng.choice(targets)
        text = json.dumps(_replaced(document, path, value))
        yield Case(f"{value:g} for {_where(path)}", tool, words, {name: text}, wrong=False)
