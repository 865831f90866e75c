"""What this machine and Slurm say about nodes and GPUs.  Every question has a time limit and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ...errors import PlannerError
from ...inputs.names import SLURM_RULES, expanded_hosts, host_problem
from .naming import GIB, Named, catalog_name

LIMIT_S = 30.0
_MOST = 4 << 20
_MOST_LINES = 20_000
_UNUSABLE = re.compile(r"down|drain|fail|maint|reserved|power(ed|ing)_down|unknown|not_responding|no_respond|\*")
"""States of nodes that no job of today gets; a star marks one that does not answer."""


class Seen(NamedTuple):
    """GPUs of a node that were found.

    Attributes:
        name: What the driver or Slurm calls the GPU.
        gpu: The same in the catalog, None when it has none.
        count: How many a node has.
        gres: Slurm's name; empty where nobody said one.
    """

    name: str
    gpu: Named | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    gres: str = ""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that were found.

    Attributes:
        gpus: Those of each node, in the order in which they were listed.
        hosts: Their names, when known.
        count: How many nodes.
        memory_bytes: Main memory of a node.
        network: Bytes per second of a node, and how that is known.
        slurm: Partition, constraint and cores, as far as known.
    """

    gpus: tuple[Seen, ...]
    count: int = 1
    hosts: tuple[str, ...] = ()
    memory_bytes: float | None = None
    network: tuple[float, str] | None = None
    slurm: tuple[tuple[str, str], ...] = ()


def ask(command: Sequence[str]) -> str | None:
    """The answer of a program; None when it is not there.

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
        reason = (done.stderr[:2000].decode("utf-8", "replace") or said).strip()
        raise PlannerError(command[0], "(answer)", None, f"failed with exit code {done.returncode}: {reason}")
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


def host_names(text: str) -> tuple[str, ...]:
    """Names from ``n1,n2`` or ``n[01-16,20]``.

    Raises:
        PlannerError: Not a list of host names.
    """
    try:
        return tuple(dict.fromkeys(expanded_hosts(text)))
    except ValueError as error:
        raise PlannerError("command line", "--hosts", text, str(error), "Like n1,n2 or n[01-16]") from None


def _main_memory() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError):
        return None


def _network(base: Path = Path("/sys/class")) -> tuple[float, str] | None:
    """What the network cards of this machine say: all InfiniBand ports together, else the fastest Ethernet card."""
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


__all__ = ["GIB", "Nodes", "Seen", "ask", "host_names", "slurm_nodes", "this_machine"]
