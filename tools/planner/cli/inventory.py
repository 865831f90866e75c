"""The commands ``init`` (a cluster file from Slurm or nvidia-smi) and ``quickstart`` (from there to a job)."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_het.safe_io import parse_yaml

from ..errors import PlannerError, command
from ..inputs.catalog import catalog, find_gpu, gpu_names
from ..inputs.cluster import cluster_from_document
from ..inputs.files import SLURM_RULES, check_target, comment, expanded_hosts, host_problem, write_text
from ..inputs.model import model_of
from ..report.tables import say

# ``het-plan quickstart``: from this machine and a model to the command that starts a job.


_OF_INIT = ("hosts", "gpu", "gpus_per_node")
_OF_MODEL = ("seq_length", "global_batch_size", "precision", "document_lengths")


def quickstart(options: argparse.Namespace) -> int:
    """Run ``init``, ``plan``, ``check`` and ``emit`` as they could be typed; the first exit code that is not 0, or 0.

    Args:
        options: Its own, and ``main``, which runs a command.
    """
    from ..emit.options import to_fill_in

    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not options.force:
        raise PlannerError("command line", "--out", str(out), "is there already", "Name another folder, or --force")
    asked = [*_given(options, _OF_INIT), *([] if options.source == "auto" else ["--from", options.source])]
    if options.cluster and asked:
        problem = "does nothing with --cluster, where nobody is asked what there is"
        raise PlannerError("command line", asked[0], asked[1], problem, "Leave one of them out")
    model_of(options)  # which says that it is not there before a folder is made
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    for words in _commands(options):
        sys.stdout.write(f"\n$ {command()} {shlex.join(words)}\n")
        sys.stdout.flush()
        if code := options.main(words):
            if is_new and not any(out.iterdir()):  # so that it can be tried again
                out.rmdir()
            return code
    start = "When that is filled in, start" if to_fill_in(shlex.split(options.extra or "")) else "Start"
    sys.stdout.write(f"\n{start} the job with:\n{_start(out / 'job')}\n")
    return 0


def _commands(options: argparse.Namespace) -> Iterator[list[str]]:
    out: Path = options.out
    force = ["--force"] if options.force else []
    cluster = options.cluster or str(out / "cluster.yaml")
    if not options.cluster:
        yield ["init", "--out", cluster, "--from", options.source, *_given(options, _OF_INIT), *force]
    inputs = ["--cluster", cluster, "--model", options.model, *_given(options, _OF_MODEL)]
    plan = str(out / "plan.json")
    yield ["plan", *inputs, "--out", plan, "--limit-s", f"{options.limit_s:g}", *force]
    yield ["check", plan, *inputs]
    extra = [f"--extra={options.extra}"] if options.extra else []
    yield ["emit", plan, *inputs, "--out", str(out / "job"), *extra, *force]


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    values = {name: getattr(options, name) for name in names}
    return [word for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]


def _start(job: Path) -> str:
    """The command that starts the job: Slurm's where there is Slurm, else a script for each node."""
    if shutil.which("sbatch"):
        return f"sbatch {shlex.quote(str(job / 'train.sbatch'))}"
    scripts = sorted(job.glob("torchrun-node-*.sh"), key=lambda file: int(file.stem.rpartition("-")[2]))
    where = [""] if len(scripts) == 1 else [f"   # on node {i}" for i in range(len(scripts))]
    return "\n".join(f"bash {shlex.quote(str(script))}{node}" for script, node in zip(scripts, where, strict=True))


# What this machine and Slurm say about nodes and GPUs.  Every question has a time limit and changes nothing.


GIB = 2.0**30


class Named(NamedTuple):
    """A GPU of the catalog; ``doubt`` says what the name left open."""

    name: str
    doubt: str = ""


# Kinds with several sizes of memory; the others are in data/gpu_names.yaml.
_BY_MEMORY = {"a100": (("A100-40", 40), ("A100-80", 80)), "v100": (("V100-16", 16), ("V100-32", 32))}


def catalog_name(text: str, memory_bytes: float | None = None) -> Named | None:
    """The catalog's GPU for a name as ``nvidia-smi`` or Slurm give it; None when it has none.

    Args:
        text: For example ``NVIDIA A100-SXM4-80GB``, ``a100`` or ``nvidia_h100_80gb_hbm3``.
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    for word, sizes in _BY_MEMORY.items():
        if word not in plain:
            continue
        said = re.search(r"(\d+) ?gb?\b", plain)
        gib = memory_bytes / GIB if memory_bytes else float(said.group(1)) if said else None
        if gib is None:
            names = " or ".join(name for name, _ in sizes)
            return Named(sizes[0][0], f"{names}: the name does not say how much memory it has")
        return Named(min(sizes, key=lambda entry: abs(entry[1] - gib))[0])
    return next((Named(name) for pattern, name in gpu_names().items() if re.search(pattern, plain)), None)


LIMIT_S = 30.0
_MOST = 4 << 20
_MOST_LINES = 20_000
_UNUSABLE = re.compile(r"down|drain|fail|maint|reserved|power(ed|ing)_down|unknown|not_responding|no_respond|\*")
"""States of nodes that no job of today gets; a star marks one that does not answer."""


class Seen(NamedTuple):
    """GPUs of a node that were found."""

    name: str  # what the driver or Slurm calls the GPU
    gpu: Named | None  # the same in the catalog, None when it has none
    # how many a node has
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    gres: str = ""  # Slurm's name; empty where nobody said one


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that were found."""

    gpus: tuple[Seen, ...]  # those of each node, in the order in which they were listed
    count: int = 1
    hosts: tuple[str, ...] = ()  # their names, when known
    memory_bytes: float | None = None  # main memory of a node
    network: tuple[float, str] | None = None  # bytes per second of a node, and how that is known
    slurm: tuple[tuple[str, str], ...] = ()  # partition, constraint and cores, as far as known


def ask(command: Sequence[str]) -> str | None:
    """Returns the output of a program; None if it is not installed.

    Raises:
        PlannerError: The program fails or does not answer in time.
    """
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PlannerError(command[0], "(answer)", None, f"no answer in {LIMIT_S:.0f} s") from None
    except OSError as error:
        raise PlannerError(command[0], "(answer)", None, f"cannot be started: {error.strerror}") from None
    said = done.stdout[:_MOST].decode("utf-8", "replace")
    if done.returncode:
        reason = (done.stderr[:2000].decode("utf-8", "replace") or said).strip().rpartition("\n")[2]
        problem = f"failed with exit code {done.returncode}: {reason}"
        raise PlannerError(command[0], "(answer)", None, problem, _ASK_NOBODY)
    return said


def this_machine(hosts: Sequence[str] = ()) -> list[Nodes]:
    """The GPUs that ``nvidia-smi`` lists; none without the program.

    Args:
        hosts: Names of nodes like this one; this one alone when empty.
    """
    said = ask(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    found: list[tuple[str, float | None]] = []
    for line in (said or "").splitlines()[:1024]:
        name, _, size = (part.strip() for part in line.partition(","))
        if name:
            memory = float(size) * 2.0**20 if re.fullmatch(r"[0-9]{1,9}", size) else None
            found.append((name, memory))
    if not found:
        return []
    gpus = tuple(Seen(name, catalog_name(name, size), len(list(same))) for (name, size), same in groupby(found))
    return [Nodes(gpus, len(hosts) or 1, tuple(hosts), memory_bytes=_main_memory(), network=_network())]


def slurm_nodes() -> tuple[list[Nodes], list[str]] | None:
    """The nodes with GPUs that ``sinfo`` lists, equal ones together, and those left out; None without the program.

    A node counts in the first partition that lists it, the default one first.  Nodes that are down, drained or
    reserved are left out.
    """
    said = ask(["sinfo", "--noheader", "--Node", "--format=%N|%P|%G|%f|%m|%T|%c"])
    if said is None:
        return None
    lines = said.splitlines()
    if len(lines) > _MOST_LINES:
        problem = f"{len(lines)} lines, more than the {_MOST_LINES} of any cluster file"
        raise PlannerError("sinfo", "(answer)", None, problem, "Write the cluster file by hand (docs/planner.md)")
    rows = [line.split("|") for line in lines if line.count("|") in (4, 5, 6)]
    rows.sort(key=lambda row: not row[1].strip().endswith("*"))
    groups: dict[tuple[str, str, str, str, tuple[tuple[str, int], ...]], list[str]] = {}
    placed: set[str] = set()
    left_out = []
    for host, partition, gres, features, memory, *more in ([cell.strip() for cell in row] for row in rows):
        if host in placed or host_problem(host):
            continue
        placed.add(host)
        state, cores = [*more, "", ""][:2]
        if _UNUSABLE.search(state.lower()):
            left_out += [f"{host} ({state[:20]})"] if _gpus_of(gres) else []
            continue
        if gpus := tuple(_gpus_of(gres)):
            groups.setdefault((partition.rstrip("*"), features, memory, cores, gpus), []).append(host)
    return [_slurm_group(*key, hosts) for key, hosts in groups.items()], left_out


def _slurm_group(
    partition: str, features: str, memory: str, cores: str, gpus: tuple[tuple[str, int], ...], hosts: list[str]
) -> Nodes:
    words = [word for word in features.split(",") if word not in ("", "(null)")]
    by_feature = {word: found for word in words if (found := catalog_name(word))}
    constraint = next(iter(by_feature), "")
    seen = []
    for kind, count in gpus:
        named = catalog_name(kind) if kind else None
        if constraint and len(gpus) == 1 and (named is None or named.doubt):  # a feature is that of the node
            named = by_feature[constraint] if named is None or not by_feature[constraint].doubt else named
        gres = f"gpu:{kind}" if kind else "gpu"
        seen.append(Seen(kind or ",".join(words) or "gpu", named, count, "" if SLURM_RULES["gres"](gres) else gres))
    slurm = {"partition": partition, "constraint": constraint}
    kept = tuple((name, text) for name, text in slurm.items() if text and not SLURM_RULES[name](text))
    return Nodes(
        tuple(seen),
        count=len(hosts),
        hosts=tuple(hosts),
        memory_bytes=float(memory) * 2.0**20 if re.fullmatch(r"[0-9]{1,12}", memory) else None,
        slurm=kept + ((("cpus", cores),) if re.fullmatch(r"[1-9][0-9]{0,2}", cores) else ()),
    )


def _gpus_of(gres: str) -> list[tuple[str, int]]:
    """(type, number) of the GPUs in Slurm's text, e.g. ``gpu:a100:8(S:0-1),gpu:2``; the type may be empty."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.strip().split(":")
        if words[0] == "gpu" and len(words) in (2, 3) and re.fullmatch(r"[0-9]{1,4}", words[-1]) and int(words[-1]):
            found.append((words[1] if len(words) == 3 else "", int(words[-1])))
    return found


def _main_memory() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError):
        return None


def _network(base: Path = Path("/sys/class")) -> tuple[float, str] | None:
    """Returns the rate of this machine's network: all InfiniBand ports together, else the fastest Ethernet card."""
    ports = sum(_number(file, r"([0-9.]+) Gb/sec") or 0.0 for file in base.glob("infiniband/*/ports/*/rate"))
    if ports:
        return ports * 1e9 / 8, "all InfiniBand ports of this machine"
    cards = [_number(file, r"([0-9]+)$") or 0.0 for file in base.glob("net/*/speed") if file.parent.name != "lo"]
    if cards and max(cards) > 0:
        return max(cards) * 1e6 / 8, "the fastest network card of this machine"
    return None


def _number(file: Path, pattern: str) -> float | None:
    """A number in one of the kernel's small files."""
    try:
        found = re.match(pattern, file.read_text(encoding="ascii")[:200].strip())
    except (OSError, ValueError):
        return None
    return float(found.group(1)) if found else None


UNKNOWN = "FILL-IN"
_ASK_NOBODY = "Else say what there is: --gpu A100-40 --gpus-per-node 8 --hosts n[1-4]"


def init(options: argparse.Namespace) -> int:
    """Run ``init``: query the nodes, write the cluster file, print the remaining steps."""
    check_target(options.out, "--out", (".yaml", ".yml"))
    if os.path.lexists(options.out) and not options.force:
        raise PlannerError("command line", "--out", options.out, "is there already", "Name another file, or --force")
    found, source, left_out = _found(options)
    text = cluster_text(found, source)
    todo = [gpu.name for nodes in found for gpu in nodes.gpus if gpu.gpu is None]
    if not todo:  # what is written can be read
        cluster_from_document(parse_yaml(text, options.out), options.out)
    write_text(options.out, text)
    body = {
        "cluster": options.out,
        "source": source,
        "nodes": [
            {"gpu": g.gpu.name if g.gpu else None, "seen": g.name, "count": nodes.count, "gpus_per_node": g.count}
            for nodes in found
            for g in nodes.gpus
        ],
        "unknown": todo,
        "left_out": left_out,
    }
    more = f" and {len(left_out) - 20} more" if len(left_out) > 20 else ""
    without = [f"Left out, because no job gets them now: {', '.join(left_out[:20])}{more}"] if left_out else []
    say(body, options, *_lines(found, source, options.out), *without)
    return 0


def _found(options: argparse.Namespace) -> tuple[list[Nodes], str, list[str]]:
    """Returns the found nodes, their source, and the nodes that cannot be used now."""
    try:
        hosts = tuple(dict.fromkeys(expanded_hosts(options.hosts))) if options.hosts else ()
    except ValueError as error:
        raise PlannerError("command line", "--hosts", options.hosts, str(error)) from None
    for flag, value, problem in (
        ("--gpus-per-node", not options.gpu and options.gpus_per_node, "does nothing without --gpu"),
        ("--from", options.gpu and options.source != "auto" and options.source, "does nothing with --gpu"),
        ("--hosts", options.source == "slurm" and options.hosts, "does nothing with --from slurm, which lists them"),
    ):
        if value:
            raise PlannerError("command line", flag, value, problem, "Leave it out")
    if options.gpu:
        find_gpu(options.gpu, {}, "command line", "--gpu")
        seen = Seen(options.gpu, Named(options.gpu), options.gpus_per_node or 8)
        return [Nodes((seen,), len(hosts) or 1, hosts)], "the command line", []
    if options.source in ("auto", "slurm") and not hosts:
        try:
            nodes_of_slurm = slurm_nodes()
        except PlannerError:  # without ``--from slurm`` a Slurm that does not answer is no error if there are GPUs
            if options.source == "slurm" or not this_machine():
                raise
            nodes_of_slurm = None
        if nodes_of_slurm and nodes_of_slurm[0]:
            return nodes_of_slurm[0], "sinfo", nodes_of_slurm[1]
        if options.source == "slurm":
            what = "sinfo is not on PATH" if nodes_of_slurm is None else "sinfo lists no node with GPUs (gres gpu)"
            if nodes_of_slurm and nodes_of_slurm[1]:
                what += f" that is up: {', '.join(nodes_of_slurm[1][:5])}"
            raise PlannerError("command line", "--from", "slurm", what, "Run it where Slurm's commands work")
    if options.source != "slurm" and (here := this_machine(hosts)):
        return here, "nvidia-smi", []
    asked = "nvidia-smi lists none" if hosts or options.source != "auto" else "neither sinfo nor nvidia-smi lists one"
    problem = f"no GPU was found: {asked}"
    hint = f"Run it on a node with GPUs or where Slurm's commands work. {_ASK_NOBODY}"
    raise PlannerError("command line", "--from", options.source, problem, hint)


def cluster_text(found: Sequence[Nodes], source: str) -> str:
    """The cluster file."""
    lines = [
        f"# Cluster file written by '{command()} init' from {source}. Check the lines that say so.",
        "# Every key is described in docs/planner.md.",
        "name: cluster",
        "nodes:",
    ]
    for nodes in found:
        lines += _group(nodes)
    lines += [
        "# Zones or regions that are far from each other need a link, for example:",
        "# links:",
        "#   - {between: [us-a, eu-b], bytes_per_s: 0.5e9, latency_s: 0.09, usd_per_gb: 0.02}",
    ]
    return "\n".join(lines) + "\n"


def _group(nodes: Nodes) -> list[str]:
    several = len(nodes.gpus) > 1
    lines = [f"  # Found: {nodes.count} x {comment(_seen(nodes))}."]
    if any(seen.gpu is None for seen in nodes.gpus):
        which = "a GPU of these" if several else "such GPU"
        lines.append(f"  # The catalog has no {which}: CHECK. Name the nearest one, or describe it under 'gpus:'.")
    if several:
        lines.append("  - gpus:  # CHECK: in the order of nvidia-smi" if nodes.gpus[0].gres else "  - gpus:")
        for seen in nodes.gpus:
            gres = f", gres: {_word(seen.gres)}" if seen.gres else ""
            lines.append(f"      - {{type: {_catalog_word(seen)}, count: {seen.count}{gres}}}{_doubt(seen)}")
    else:
        lines.append(f"  - gpu: {_catalog_word(nodes.gpus[0])}{_doubt(nodes.gpus[0])}")
    lines.append(f"    count: {nodes.count}")
    if not several:
        lines.append(f"    gpus_per_node: {nodes.gpus[0].count}")
    lines += ["    zone: local                  # nodes near each other; us-a-1 is in region us-a"]
    if nodes.network:
        rate, known = nodes.network
        lines.append(f"    network_bytes_per_s: {rate:g}   # of a whole node, one direction: {known}")
    else:
        lines.append("    network_bytes_per_s: 12.5e9  # CHECK: of a whole node, one direction; 12.5e9 is 100 Gbit/s")
    first = nodes.gpus[0]
    price = catalog()[first.gpu.name].usd_per_hour if first.gpu else None
    where = ", in the entries of gpus" if several else ""
    lines.append(f"    # usd_per_gpu_hour: {price if price is not None else 2.0}       # your price, for costs{where}")
    if nodes.memory_bytes:
        lines.append(
            f"    # host_memory_bytes: {0.8 * nodes.memory_bytes:.0f}   # main memory that plans may offload to; "
            f"a node has {nodes.memory_bytes / GIB:.0f} GiB"
        )
    if nodes.hosts:
        lines.append(f"    hosts: [{', '.join(_word(host) for host in nodes.hosts)}]")
    slurm = dict(nodes.slurm) | ({"gres": first.gres} if first.gres and not several else {})
    if slurm:
        words = (f"{key}: {text if key == 'cpus' else _word(text)}" for key, text in slurm.items())
        lines.append(f"    slurm: {{{', '.join(words)}}}")
    return lines


def _seen(nodes: Nodes) -> str:
    return " + ".join(f"{seen.count} {seen.name}" for seen in nodes.gpus)


def _catalog_word(seen: Seen) -> str:
    return UNKNOWN if seen.gpu is None else _word(seen.gpu.name)


def _doubt(seen: Seen) -> str:
    return f"  # CHECK: {seen.gpu.doubt}" if seen.gpu is not None and seen.gpu.doubt else ""


def _word(text: str) -> str:
    """A YAML text; quoted, because names such as ``1e3`` or ``on`` mean something else without quotes."""
    return json.dumps(text)


def _lines(found: Sequence[Nodes], source: str, out: str) -> list[Any]:
    lines = [
        f"{nodes.count} x {_seen(nodes)}: "
        + " + ".join(seen.gpu.name if seen.gpu else "not in the catalog" for seen in nodes.gpus)
        for nodes in found
    ]
    lines.append(f"wrote {out} (from {source})")
    if any(seen.gpu is None for nodes in found for seen in nodes.gpus):
        lines.append(f"Replace {UNKNOWN} in it: name the nearest GPU of the catalog, or describe yours under 'gpus:'")
    lines.append(f"Next: check it, then '{command()} plan --cluster {out} --model MODEL'")
    return lines
