"""Progress of a job for ``het-run status``, and whether a change pays off in the remaining iterations."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_het.plan import Plan, plan_hash

_FEW = 3
History = Sequence[Mapping[str, Any]]  # one entry per generation, as in ``FOLDER/state.json``
_MOST = 100  # entries of a history: it is shown every second, and a job may have changes for months


@dataclass(frozen=True)
class _Part:
    """Progress of one generation."""

    first: int  # number of done iterations when it began
    reached: int  # number of done iterations when it ended
    seconds: float  # time that it trained
    entry: int  # index of its entry in the history


def goodput(history: History, reached: int, now_s: float) -> float | None:
    """Share of the time since the job's start, 0 to 1, spent on iterations that were kept; None before the first.

    The rest was spent on the start, on changes, and on repeated iterations.

    Args:
        reached: Number of iterations that are done now.
    """
    parts = _parts(history, reached, now_s)
    if not parts:
        return None
    useful_s = history[0].get("useful_s", 0.0) + sum(_useful_s(parts))
    whole_s = now_s - history[0]["seen"]
    return min(1.0, useful_s / whole_s) if whole_s > 0 else None


def _useful_s(parts: Sequence[_Part]) -> list[float]:
    """Seconds that every generation spent on iterations that were kept."""
    found, least = list[float](), parts[-1].reached if parts else 0
    for part in reversed(parts):
        done, counted = part.reached - part.first, min(part.reached, least) - part.first
        found.append(part.seconds * max(0, counted) / done if done else 0.0)
        least = min(least, part.first)
    return found[::-1]


def newest(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the start and the newest changes; the useful time of dropped entries is added to the start's.

    Args:
        history: The last entry is of a generation that has not begun.
    """
    cut = len(history) - _MOST
    if cut <= 0:
        return history
    parts = _parts(history, history[-1]["reached"], history[-1]["stopped"])
    gone_s = sum(useful_s for part, useful_s in zip(parts, _useful_s(parts), strict=True) if part.entry <= cut)
    start = {key: value for key, value in history[0].items() if key != "opened"}
    return [start | {"useful_s": start.get("useful_s", 0.0) + gone_s}, *history[cut + 1 :]]


def standing(history: History, reached: int, now_s: float) -> dict[str, Any]:
    """Returns the fields about progress of the controller's document; see :func:`goodput`."""
    return {"reached": reached, "now": now_s, "goodput": goodput(history, reached, now_s)}


def _parts(history: History, reached: int, now_s: float) -> list[_Part]:
    ends = [(entry["reached"], entry["stopped"]) for entry in history[1:]]
    found = []
    for number, (entry, (last, stopped_s)) in enumerate(zip(history, [*ends, (reached, now_s)], strict=False)):
        opened = [told for told in entry.get("opened", {}).values() if "loaded" in told["times"]]
        if opened:
            first = max(told["iteration"] for told in opened)
            began_s = max(told["times"]["loaded"] for told in opened)
            found.append(_Part(first, max(first, last), max(0.0, stopped_s - began_s), number))
    return found


def measured_s(entry: Mapping[str, Any], reached: int, now_s: float) -> float | None:
    """Seconds per iteration of the running generation, from its history entry; None if it has done too few."""
    opened = entry.get("opened", {}).values()
    if not opened:
        return None
    done = reached - max(told["iteration"] for told in opened) - 1
    first_s = max(float(told["times"]["first_step"]) for told in opened)
    return (now_s - first_s) / done if done >= _FEW and now_s > first_s else None


def summed_up(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of a past generation, with the slowest rank's times in place of those of all ranks.

    The whole history is written every second and read at a start, so its size must not depend on the ranks.
    """
    told = list(entry.get("opened", {}).values())
    if not told:
        return entry
    names = {name for one in told for name in one["times"]}
    times = {name: max(one["times"][name] for one in told if name in one["times"]) for name in sorted(names)}
    found = {name: max(one[name] for one in told) for name in ("iteration", "last") if all(name in one for one in told)}
    sent_bytes = sum(one.get("sent_bytes", 0) for one in told)
    return entry | {"opened": {"all": {**found, "times": times, "sent_bytes": sent_bytes}}}


def duration(seconds: float) -> str:
    """A time for a reader: ``45 s``, ``12 min``, ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if minutes < 3:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def last_iteration(history: History) -> int | None:
    """Returns the training's last iteration, as reported by its ranks; None before the first iteration."""
    found = [told["last"] for entry in history for told in entry.get("opened", {}).values() if "last" in told]
    return max(found, default=None)


def describe(status: Mapping[str, Any] | None) -> str:
    """The lines of ``het-run status``; ``status`` is None if the controller has written nothing yet."""
    if status is None:
        return "the controller has just started; ask again in a second\n"
    lines = [_progress(status), *_generation(status)]
    ranks = None if status["generation"] is None else set(status["generation"]["ranks"])
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for member in status["members"]:
        nodes.setdefault(member["node"], []).append(member)
    for name, members in sorted(nodes.items()):
        kinds = ", ".join(sorted({member["device"] for member in members if member["device"]}))
        idle = 0 if ranks is None else sum(member["process"] not in ranks for member in members)
        words = [f"{len(members)} worker{'s' * (len(members) > 1)}" + (f" ({kinds})" if kinds else "")]
        words += [f"{idle} without a rank"] if idle else []
        words += ["is to leave"] if name in status["leaving"] else []
        lines.append(f"  node {name}: {', '.join(words)}")
    changes = status["history"][1:]
    if changes and (before := changes[0]["generation"] - 1) > 0:
        lines.append(f"  {before} change{'s' * (before > 1)} before")
    for entry in changes:
        # The pause lasts from the end of the generation before to the end of the first iteration.
        steps = [told["times"]["first_step"] for told in entry.get("opened", {}).values() if told["times"]]
        pause = f"{max(steps) - entry['stopped']:.1f} s to the end of the first iteration" if steps else "under way"
        lines.append(f"  change {entry['generation']} at iteration {entry['reached']}: {entry['why']}, {pause}")
    if status.get("under_way") and not status.get("over"):
        lines.append(f"  a change begins: {status['under_way']}; all ranks leave their session")
    strangers = status.get("strangers", {})
    if number := strangers.get("refused"):
        lines.append(f"  {number} connection{'s' * (number > 1)} without the token, the last from {strangers['last']}")
    if status.get("unwritten"):
        lines.append(f"  {status['unwritten']}")
    return "\n".join(lines) + "\n"


def _progress(status: Mapping[str, Any]) -> str:
    history, reached = status["history"], status["reached"]
    last = last_iteration(history)
    begun = f"iteration {reached}" + (f" of {last}" if last is not None else "")
    text = begun if reached or last is not None else "the training has not begun"
    each_s = measured_s(history[-1], reached, status["now"]) if history else None
    if each_s is not None and last is not None and not status.get("over"):
        text += f", {each_s:.3g} s each, {duration(each_s * (last - reached))} left"
    if status["goodput"] is not None:
        whole_s = status["now"] - history[0]["seen"]
        text += f"; goodput {100 * status['goodput']:.1f} % of {duration(whole_s)}"
    return text + (f"; {ending(status['error'], reached, last)}" if status.get("over") else "")


def ending(error: str, reached: int, last: int | None) -> str:
    """Says how a job ended: by an error, by a wish (a signal, ``--exit-interval``), or with its last iteration."""
    if error:
        return f"the job ended: {error}"
    if last is None or reached >= last:
        return "the training is over"
    return f"the training has stopped at iteration {reached} of {last}; start the job again to go on"


def _generation(status: Mapping[str, Any]) -> list[str]:
    if status["generation"] is None:
        nodes, come = status.get("nodes", 1), len({member["node"] for member in status["members"]})
        return [f"no generation yet: the job waits for its nodes, and {come} of {nodes} came"]
    plan = Plan.from_json(status["generation"]["plan"])
    stages = " + ".join(str(sum(len(replica.ranks) for replica in stage.replicas)) for stage in plan.stages)
    why = status["history"][-1]["why"] if status["history"] else "start"
    number = status["generation"]["number"]
    return [
        f"generation {number} ({why}): plan {plan_hash(plan)}, {plan.schedule.name}, "
        f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)} of {stages} ranks"
    ]


CHANGE_S = 10.0  # assumed cost of a change before one was seen, without the parts that grow with the job
HOST_BYTES_PER_S, LINK_BYTES_PER_S, GROUP_S = 4e9, 1e9, 0.01
"""Bandwidth between device and host memory, bandwidth of an unmeasured link, and time to create a group.

These are assumptions, like :data:`CHANGE_S`, until in-memory copies measure the first two.
"""
JOIN, DEATH, LEAVE = "join", "death", "leave"
"""Kinds of changes in a history; a change of only the plan is of the last kind."""


@dataclass(frozen=True)
class Rates:
    """How fast state moves."""

    host_bytes_per_s: float = HOST_BYTES_PER_S  # between device and host memory
    link_bytes_per_s: float | None = None  # between nodes; None if not measured


def grows_s(
    state_bytes: float, link_bytes_per_s: float, groups: int, host_bytes_per_s: float = HOST_BYTES_PER_S
) -> float:
    """Seconds of a change that grow with the job, if the rank with the most state receives all of it.

    Args:
        state_bytes: Parameters and optimizer state of the rank with the most.
        link_bytes_per_s: Bandwidth of the slowest link to this rank, for it alone.
        groups: Number of groups that a rank joins: its replica, its stage's replicas, and its neighbours.
        host_bytes_per_s: See :class:`Rates`.
    """
    return 2 * state_bytes / host_bytes_per_s + state_bytes / link_bytes_per_s + GROUP_S * groups


def state_bytes(plan: Plan) -> float:
    """Bytes of parameters and optimizer state on the rank with the most, from the plan's prediction; 0 without one."""
    if plan.predicted is None:
        return 0.0
    return max((rank.parameter_bytes + rank.optimizer_bytes for rank in plan.predicted.per_rank), default=0.0)


def grows_for_s(plan: Plan, rates: Rates) -> float:
    """:func:`grows_s` of a plan, from its prediction; 0 without a prediction of memory."""
    held_bytes = state_bytes(plan)
    if plan.predicted is None or not held_bytes:
        return 0.0
    links = plan.predicted.costs.links if plan.predicted.costs is not None else ()
    known = [link.bytes_per_s for link in links] + [rate for rate in (rates.link_bytes_per_s,) if rate is not None]
    groups = 2 + 2 * max(len(stage.replicas) for stage in plan.stages)
    return grows_s(held_bytes, min(known, default=LINK_BYTES_PER_S), groups, rates.host_bytes_per_s)


def change_s(history: History, plan: Plan | None = None, kind: str = "", rates: Rates | None = None) -> float:
    """Estimates the seconds of a change, from its reason to the end of the first iteration after it.

    The estimate is from the last changes of this job, of the same kind if there are any: a newcomer gets a whole state,
    other ranks have most of theirs.  The time in which state moved is scaled with the state.  Before the first
    change the estimate is from an assumption and the measured rates.

    Args:
        plan: Plan of the change; None for no scaling.
        kind: Kind of the change; empty for any.
        rates: Rates at which state moves; None for assumed ones.
    """
    seen = [entry for entry in history if entry["generation"] > 0 and entry.get("opened")]
    alike = [entry for entry in seen if entry.get("kind") == kind]
    if not seen:
        return CHANGE_S + (grows_for_s(plan, rates or Rates()) if plan is not None else 0.0)
    wanted_bytes = 0.0 if plan is None else state_bytes(plan)
    return statistics.median([_seen_s(entry, wanted_bytes) for entry in (alike or seen)[-_FEW:]])


def _seen_s(entry: Mapping[str, Any], wanted_bytes: float) -> float:
    """Seconds that a change like that of ``entry`` would take with ``wanted_bytes`` of state."""
    times = [told["times"] for told in entry["opened"].values()]
    # The controller's own clock does not jump.
    took_s = float(entry.get("took_s", max(0.0, max(t["first_step"] for t in times) - entry["seen"])))
    moved_bytes = float(entry.get("state_bytes", 0.0))
    if not moved_bytes or not wanted_bytes:
        return took_s
    moved_s = min(took_s, max(max(0.0, t["loaded"] - t["built"]) for t in times))
    return took_s + moved_s * (wanted_bytes / moved_bytes - 1.0)


def against(
    plan: Plan, present: Plan, history: History, reached: int, now_s: float, *, rates: Rates | None = None
) -> str:
    """Why a change to a better plan with newcomers no longer pays off.

    Args:
        present: The running plan.
        rates: Rates at which state moves; None for assumed ones.

    Returns:
        Empty if the change pays off, or if that is unknown: before the first iteration, or without predictions in both
        plans, as in a user's list of plans.
    """
    last = last_iteration(history)
    if plan.predicted is None or present.predicted is None or last is None:
        return ""
    gain = 1.0 - plan.predicted.iteration_s / present.predicted.iteration_s
    left, cost_s = max(0, last - reached), change_s(history, plan, JOIN, rates)
    saved_s = gain * left * (measured_s(history[-1], reached, now_s) or present.predicted.iteration_s)
    if gain <= 0 or saved_s > cost_s:  # a user's list may prefer a plan for other reasons than time
        return ""
    return (
        f"iterations would be {100 * gain:.1f} % shorter, which saves {saved_s:.1f} s in the {left} that are left; "
        f"a change takes {cost_s:.1f} s"
    )
