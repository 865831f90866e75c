"""The kinds of trials: what happens to a job, where, and what is to come of it; all drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.fault_plans import STEPS, Pool
from benchmarks.fault_points import Fault
from benchmarks.fault_trials import Trial


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


def _kill(rng: random.Random, pool: Pool) -> Trial:
    return Trial("kill", pool, (_fault(rng, pool, "kill"),), ("--copy-every", str(rng.choice((1, 1, 2)))))


def _stop(rng: random.Random, pool: Pool) -> Trial:
    return Trial("stop for ever", pool, (_fault(rng, pool, "stop"),))


def _moment(rng: random.Random, pool: Pool) -> Trial:
    return Trial("stop for a moment", pool, (_fault(rng, pool, "moment"),), unchanged=True)


def _node(rng: random.Random, pool: Pool) -> Trial:
    largest = max(range(len(pool.nodes)), key=lambda n: pool.nodes[n])
    more: dict[str, Any] = {"node": pool.names[largest], "slot": rng.randrange(pool.nodes[largest])}
    return Trial("node", pool, (_fault(rng, pool, "node", **more),), node_returns=rng.random() < 0.5)


def _controller(rng: random.Random, pool: Pool) -> Trial:
    return Trial("controller", pool, (_fault(rng, pool, "controller"),), unchanged=True)


def _hanging_controller(rng: random.Random, pool: Pool) -> Trial:
    return Trial("controller hangs", pool, (_fault(rng, pool, "controller hangs"),), unchanged=True)


def _moving_controller(rng: random.Random, pool: Pool) -> Trial:
    return Trial("controller moves", pool, (_fault(rng, pool, "controller"),), unchanged=True, controller_moves=True)


def _agent(rng: random.Random, pool: Pool) -> Trial:
    return Trial("agent", pool, (_fault(rng, pool, "agent"),), node_returns=rng.random() < 0.5)


def _update(rng: random.Random, pool: Pool) -> Trial:
    return Trial("in an update", pool, (_fault(rng, pool, "kill", "update"),))


def _save(rng: random.Random, pool: Pool) -> Trial:
    return Trial("in a save", pool, (_fault(rng, pool, "kill", "save", iteration=4 * rng.choice((1, 2))),), (), 4)


def _reconfiguration(rng: random.Random, pool: Pool) -> Trial:
    first = _fault(rng, pool, "kill")
    point = rng.choice(("left", "opening", "agreeing", "moving"))
    others = [name for name in pool.names if name != first["node"]]
    second = _fault(rng, pool, "kill", point, node=rng.choice(others), slot=0)
    return Trial("in a reconfiguration", pool, (first, second | {"after": 0 if point == "left" else 1}))


def _truncated(rng: random.Random, pool: Pool) -> Trial:
    fault = _fault(rng, pool, "truncate", iteration=rng.randrange(8, STEPS - 3))
    return Trial("truncated checkpoint", pool, (fault,), ("--copy-every", "0"), 3)


def _full_disk(rng: random.Random, pool: Pool) -> Trial:
    return Trial("full disk", pool, (_fault(rng, pool, "kill"),), (), 4, disk_bytes=1)


def _stall(rng: random.Random, pool: Pool) -> Trial:
    return Trial("stalled connection", pool, (_fault(rng, pool, "stall", rng.choice(("operation", "copy"))),))


def _vanish(rng: random.Random, pool: Pool) -> Trial:
    point = rng.choice(("operation", "operation", "copy", "moving"))
    fault = _fault(rng, pool, "vanish", point)
    if point != "moving":
        return Trial("vanished node", pool, (fault,), node_returns=rng.random() < 0.5)
    first = _fault(rng, pool, "kill", node=rng.choice([name for name in pool.names if name != fault["node"]]), slot=0)
    return Trial("vanished node", pool, (first, fault | {"after": 1}), node_returns=rng.random() < 0.5)


def _link(rng: random.Random, pool: Pool) -> Trial:
    return Trial("stalled link", pool, (_fault(rng, pool, "link", rng.choice(("operation", "operation", "copy"))),))


def _hopeless(rng: random.Random, pool: Pool) -> Trial:
    pool = replace(pool, plans=pool.plans[:1])
    return Trial("no plan", pool, (_fault(rng, pool, "kill"),), ("--restarts", "0", "--return-s", "2"), hopeless=True)


KINDS: dict[str, Callable[[random.Random, Pool], Trial]] = {
    "kill": _kill,
    "stop for ever": _stop,
    "stop for a moment": _moment,
    "node": _node,
    "controller": _controller,
    "controller hangs": _hanging_controller,
    "controller moves": _moving_controller,
    "agent": _agent,
    "in an update": _update,
    "in a save": _save,
    "in a reconfiguration": _reconfiguration,
    "truncated checkpoint": _truncated,
    "full disk": _full_disk,
    "stalled connection": _stall,
    "vanished node": _vanish,
    "stalled link": _link,
    "no plan": _hopeless,
}
