"""The kinds of trials: what happens to a job, where, and what is to come of it; all drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.fault_points import Fault
from benchmarks.fault_trials import STEPS, Pool, Trial
from megatron_het.lowering.programs import build


def _fault(rng: random.Random, pool: Pool, act: str, point: str = "operation", **more: Any) -> Fault:
    node = rng.randrange(len(pool.nodes))
    found = {
        "name": f"{act}-{rng.randrange(10**6)}",
        "act": act,
        "node": pool.names[node],
        "slot": rng.randrange(pool.nodes[node]),
        "point": point,
        "iteration": rng.randrange(2, STEPS - 4),
        "share": rng.random(),
    }
    return found | more


def _one(act: str, point: str = "operation", **more: Any) -> Callable[[random.Random, Pool], Trial]:
    """Trials with one fault; ``more`` are fields of a trial."""
    return lambda rng, pool: Trial("", pool, (_fault(rng, pool, act, point),), **more)


def _kill(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "kill"),), ("--copy-every", str(rng.choice((1, 1, 2)))))


def _node(rng: random.Random, pool: Pool) -> Trial:
    largest = max(range(len(pool.nodes)), key=lambda n: pool.nodes[n])
    more: dict[str, Any] = {"node": pool.names[largest], "slot": rng.randrange(pool.nodes[largest])}
    return Trial("", pool, (_fault(rng, pool, "node", **more),), node_returns=rng.random() < 0.5)


def _agent(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "agent"),), node_returns=rng.random() < 0.5)


def _save(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "kill", "save", iteration=4 * rng.choice((1, 2))),), (), 4)


def _reconfiguration(rng: random.Random, pool: Pool) -> Trial:
    first = _fault(rng, pool, "kill")
    point = rng.choice(("left", "opening", "agreeing", "moving"))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "kill", point, node=rng.choice(others), slot=0)
    return Trial("", pool, (first, second | {"after": 0 if point == "left" else 1}))


def _truncated(rng: random.Random, pool: Pool) -> Trial:
    fault = _fault(rng, pool, "truncate", iteration=rng.randrange(8, STEPS - 3))
    return Trial("", pool, (fault,), ("--copy-every", "0"), 3)


def _full_disk(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "kill"),), (), 4, disk_bytes=1)


def _stall(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "stall", rng.choice(("operation", "copy"))),))


def _vanish(rng: random.Random, pool: Pool) -> Trial:
    point = rng.choice(("operation", "operation", "copy", "moving"))
    fault = _fault(rng, pool, "vanish", point)
    if point != "moving":
        return Trial("", pool, (fault,), node_returns=rng.random() < 0.5)
    first = _fault(rng, pool, "kill", node=rng.choice([name for name in pool.names if name != fault["node"]]), slot=0)
    return Trial("", pool, (first, fault | {"after": 1}), node_returns=rng.random() < 0.5)


def _link(rng: random.Random, pool: Pool) -> Trial:
    return Trial("", pool, (_fault(rng, pool, "link", rng.choice(("operation", "operation", "copy"))),))


def _disk(rng: random.Random, pool: Pool) -> Trial:
    """The disk of the job's folder, not that of the checkpoints."""
    act = rng.choice(("full folder", "read-only folder"))
    faults = (_fault(rng, pool, act, iteration=3), _fault(rng, pool, "kill", iteration=rng.randrange(6, STEPS - 4)))
    return Trial("", pool, faults, folder_bytes=1 << 24)


def _clock(rng: random.Random, pool: Pool) -> Trial:
    jump_s = rng.choice((-3600.0, 3600.0))
    first = _fault(rng, pool, "clock", iteration=rng.randrange(2, 6), jump_s=jump_s)
    more = (_fault(rng, pool, "kill", iteration=rng.randrange(7, STEPS - 4)),) if rng.random() < 0.5 else ()
    return Trial("", pool, (first, *more), unchanged=not more)


def _stale(rng: random.Random, pool: Pool) -> Trial:
    """The controller dies after a change, and its file is the one of before the change."""
    first = _fault(rng, pool, "kill", iteration=rng.randrange(2, 5))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "controller", node=rng.choice(others), slot=0, after=1, iteration=rng.randrange(8, 11))
    return Trial("", pool, (first, second), state="stale")


def _lossy(rng: random.Random, pool: Pool) -> Trial:
    fault = _fault(rng, pool, "lossy", iteration=rng.randrange(2, 6), loss=rng.choice((0.01, 0.03)))
    return Trial("", pool, (fault,), unchanged=True)


def _inside(rng: random.Random, pool: Pool) -> Trial:
    """A death in the first operation of a kind, on whoever comes to it first."""
    kinds = sorted({op.kind.name for ops in build(pool.plans[0])[False].ops for op in ops})
    return Trial("", pool, (_fault(rng, pool, "kill", f"in {rng.choice(kinds)}", anybody=True),))


def _again(rng: random.Random, pool: Pool) -> Trial:
    """A node dies, another one while the change goes on, and both come back during that."""
    first = _fault(rng, pool, "agent", iteration=rng.randrange(2, 6))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "agent", rng.choice(("opening", "agreeing")), node=rng.choice(others), slot=0, after=1)
    return Trial("", pool, (first, second), node_returns=True)


def _hopeless(rng: random.Random, pool: Pool) -> Trial:
    pool = replace(pool, plans=pool.plans[:1])
    return Trial("", pool, (_fault(rng, pool, "kill"),), ("--restarts", "0", "--return-s", "2"), hopeless=True)


_MAKERS: dict[str, Callable[[random.Random, Pool], Trial]] = {
    "kill": _kill,
    "stop for ever": _one("stop"),
    "stop for a moment": _one("moment", unchanged=True),
    "node": _node,
    "controller": _one("controller", unchanged=True),
    "controller hangs": _one("controller hangs", unchanged=True),
    "controller moves": _one("controller", unchanged=True, controller_moves=True),
    "agent": _agent,
    "in an update": _one("kill", "update"),
    "in a save": _save,
    "in a reconfiguration": _reconfiguration,
    "truncated checkpoint": _truncated,
    "full disk": _full_disk,
    "stalled connection": _stall,
    "vanished node": _vanish,
    "stalled link": _link,
    "disk of the folder": _disk,
    "clock jumps": _clock,
    "second controller": _one("second controller", unchanged=True),
    "stale state": _stale,
    "broken state": _one("controller", unchanged=True, state="broken"),
    "junk on the port": _one("junk", unchanged=True),
    "lost packets": _lossy,
    "short of memory": _one("memory"),
    "in an operation": _inside,
    "change in a change": _again,
    "no plan": _hopeless,
}


def make(kind: str, rng: random.Random, pool: Pool) -> Trial:
    """A trial of a kind: who has what when, and what is to come of it."""
    return replace(_MAKERS[kind](rng, pool), kind=kind)


KINDS = tuple(_MAKERS)
MOUNTS = ("full disk", "disk of the folder")
"""Kinds that need the right to mount a small disk."""
