"""The controller: membership, plan and generation of a job.  It is no rank and moves no state.

It reads messages and heartbeats of agents and workers, decides, and writes the next generation.  Its
decisions are also in a file, so that it can be restarted while the training goes on.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.elastic import members, worth
from megatron_het.elastic.job import Checks, Generation, Moment, ServedBoard, refusal
from megatron_het.elastic.pool import NoPlanError, Planner, Process, assign
from megatron_het.plan import Plan, plan_hash
from megatron_het.safe_io import one_line, shown
from megatron_het.store import StoreError

_POLL_S, _CHANGE_POLL_S = 0.02, 0.004
_SHOW_S = 1.0
_GAP_S = 1.0
_TRIES = 2
_KEPT = 2  # generations whose documents stay on the board


@dataclass(eq=False)
class Controller:
    """Decides which generation comes next."""

    board: ServedBoard  # served by this process
    planner: Planner  # makes plans
    state: Path  # file with the decisions
    nodes: int  # number of nodes to wait for before the first generation
    bounds: members.Bounds  # bounds on waits
    say: Callable[[str], None]
    is_replaced: Callable[[], bool] = lambda: False  # whether another controller has taken the job over
    fallback: str = ""  # folder for checkpoints that cannot be written into ``--save``; empty for none

    def __post_init__(self) -> None:
        self._saves = members.Saves(self.fallback)
        self._file, self._lessons = members.StateFile(self.state, self.say), members.Lessons(self.planner, self.say)
        self._members: dict[int, members.Member] = {}
        self._newest = 0
        self._leaving: dict[str, int] = {}  # nodes that are to leave, and the newest process that this is about
        self._generation: Generation | None = None
        self._ended: dict[int, dict[str, Any]] = {}
        self._wanted: tuple[str, Moment] | None = None
        self._changed: Moment | None = None
        self._failed_since: Moment | None = None
        self._gone: dict[int, str] = {}
        self._proved: list[Plan] = []
        self._failures, self._progress = members.Failures(), members.Progress(self.bounds.stuck_s)
        self._told = 0
        self._misses: dict[str, int] = {}
        self._arrivals, self._checks = members.Arrivals(self.nodes, self.bounds.start_s), Checks()
        self._signature: str | None = None
        self._considered, self._prepared = frozenset[int](), frozenset[int]()
        self._asked = self._waits = False
        self._shown_s = self._tried_s = 0.0
        self._watched_s = time.monotonic()
        self._read, self._unwritten = 0, False
        self.history: list[dict[str, Any]] = []
        """One entry per change: its reason, and the times of its phases (wall clock)."""
        self._recover()
        self.board.start()

    def run(self) -> None:
        """Run until the job is over.

        Raises:
            JobError: The job cannot go on.
            ReplacedError: Another controller has taken the job over.
        """
        try:
            while not self._step():
                time.sleep(_POLL_S if self._wanted is None and self._failed_since is None else _CHANGE_POLL_S)
        except members.JobError as error:
            self._end(str(error))
            raise
        if unsaved := self._saves.unsaved_end(worth.last_iteration(self.history)):
            self._end(unsaved)
            raise members.JobError(unsaved)
        self._end("")

    def _step(self) -> bool:
        """Run one round; returns whether the job is over."""
        if self.is_replaced():
            raise members.ReplacedError(f"another controller has taken over {self.state.parent}; this one ends")
        self._listen()
        self._watch()
        self._prepare()
        generation = self._generation
        if generation is None:
            if self._arrivals.are_complete(self._pool()):
                self._next("start", Moment())
            return False
        alive = [process for process in generation.ranks if process in self._members]
        if all(self._ended.get(process, {}).get("how") == "finished" for process in generation.ranks):
            return True
        failed = self._failed_since is not None or any(e["how"] == "failed" for e in self._ended.values())
        if failed or len(alive) < len(generation.ranks):
            self._after_failure(generation, alive)
        elif self._wanted is not None and all(process in self._ended for process in alive):
            if any(self._ended[process]["how"] == "finished" for process in alive):
                return True  # the last iteration was done before the change
            self._next(*self._wanted)
        elif self._wanted is None:
            if reason := self._lessons.reason(generation, self._members):
                self._considered, self._prepared = frozenset(p.number for p in self._pool()), frozenset()
                self._want(reason)
            self._consider_change(generation)
        return False

    # -- messages of agents and workers ----------------------------------------------------------

    def _listen(self) -> None:
        while self.board.has(f"inbox/{self._read + 1}"):
            self._read += 1
            try:
                message = self.board.get(f"inbox/{self._read}")
                self.board.drop(f"inbox/{self._read}")
                self._hear(message)
            except (StoreError, KeyError, TypeError, ValueError, RecursionError) as error:
                self.say(f"a message that makes no sense is left out: {shown(str(error))}")
        retry = self._file.failure and time.monotonic() - self._tried_s > _SHOW_S
        if self._unwritten or retry:  # once for all messages: a busy disk takes half a second each time
            self._save()

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self._welcome(message)
        elif kind == "exit":
            why = f"worker {message['process']} on {message['node']} {message['why']}"
            self._lose(int(message["process"]), why)
            self._arrivals.ended(str(message["node"]), int(message.get("left", 1)), why)
        elif kind == "ended" and self._generation is not None and message["generation"] == self._generation.number:
            self._note_ended(message)
        elif kind == "opened":
            self._note_opened(message)
        elif kind == "drift" and self._generation is not None and message["generation"] == self._generation.number:
            self._lessons.note(message, self._generation, self._pool(), self.history, self._rates())
        elif kind == "checked":
            self._checks.note(message)
        elif kind == "newer":
            self._adopt(Generation.from_json(message["generation"]))
        elif kind == "leave":
            early = {int(process) for process in message.get("processes", ())}.difference(self._members)
            self._leaving[str(message["node"])] = max([self._newest, *early])
            self.say(f"node {message['node']} is to leave")
            for process in early:  # it is not ready yet
                self.board.put(f"gone/{process}", {"identity": ""})
            self._release()
        elif kind == "replan":
            try:
                self.planner.renew()
            except (ImportError, ValueError) as error:
                self.say(f"a new plan was asked for, and nothing changes: {error}")
            else:
                self._asked, self._considered, self._prepared = True, frozenset(), frozenset()

    def _note_ended(self, message: dict[str, Any]) -> None:
        self._ended[int(message["process"])] = message
        self._told = max(self._told, int(message["iteration"]))
        if message["how"] == "failed":
            self._tell_waiting("a session failed")
        if message.get("unsaved") is not None:
            last = worth.last_iteration(self.history)
            if said := self._saves.note(int(message["generation"]), int(message["unsaved"]), last):
                self.say(f"{said}: {message['error']}")

    def _tell_waiting(self, why: str) -> None:
        """End the waits of workers for a process of this generation that is lost."""
        assert self._generation is not None
        if not self.board.has(self._generation.lost_key):
            self.board.put(self._generation.lost_key, why)

    def _welcome(self, message: Mapping[str, Any]) -> None:
        number, node = int(message["process"]), str(message["node"])
        identity, signature = str(message.get("identity", "")), str(message["signature"])
        known = self._members[number].identity if number in self._members else self._gone.get(number, identity)
        if known not in ("", identity):
            why = "its number is another process's, because the controller's file was older than the job"
            self.board.put(f"refused/{number}", {"identity": identity, "why": why, "again": True})
            return
        self._signature = self._signature or signature
        if differs := refusal(signature, self._signature):
            self.board.put(f"refused/{number}", {"identity": identity, "why": differs, "again": False})
            self._gone[number], why = identity, f"worker {number} on {node} is refused: {differs}"
            self._arrivals.ended(node, 0, why)
            self.say(why)
            return
        if number > self._leaving.get(node, -1):  # the node has come back
            self._leaving.pop(node, None)
        self._members[number] = members.Member(Process(number, node, str(message["device"])), identity=identity)
        self._arrivals.came(node, int(message.get("workers", 1)))
        self._give_no_number_below(number)  # a restarted controller must not give this number to another process
        self._unwritten = True
        self.say(f"worker {number} on {node} is ready")
        self._release()

    def _give_no_number_below(self, number: int) -> None:
        if number > self._newest:
            self._newest = number
            self.board.start_count("processes", number)

    def _adopt(self, generation: Generation) -> None:
        """Take over a generation that workers run but that this controller's file does not have."""
        if self._generation is not None and generation.number <= self._generation.number:
            return
        self.say(f"the state in {self.state} is older than the job: generation {generation.number} runs")
        silent = [number for number, member in self._members.items() if member.beats < 0]
        for number in set(silent).difference(generation.ranks):
            del self._members[number]  # only in the file; a heartbeat adds it again
        for number, node in zip(generation.ranks, generation.nodes, strict=True):
            if number not in self._members and number not in self._gone:
                self._members[number] = members.Member(Process(number, node))
            self._give_no_number_below(number)
        self._generation, self._ended, self._wanted, self._failed_since = generation, {}, None, None
        self._saves.recall(generation)
        now_s = Moment().wall_s
        entry = {"generation": generation.number, "why": "found to run", "seen": now_s, "left": now_s}
        self.history.append({**entry, "stopped": now_s, "planned": now_s, "reached": self._reached()})
        self._progress.begin()
        self._publish(generation)
        self._unwritten = True

    def _note_opened(self, message: dict[str, Any]) -> None:
        if message["padded_vocab_size"] is not None:
            self.board.put("padded_vocab_size", message["padded_vocab_size"])
        if self.history and self._generation is not None and message["generation"] == self._generation.number:
            self._failures.over()
            self._progress.opened()
            entry = self.history[-1]
            if "opened" not in entry and self._changed is not None:
                entry |= {"took_s": self._changed.ago_s(), "state_bytes": worth.state_bytes(self._generation.plan)}
            if all(self._generation.plan != plan for plan in self._proved):
                self._proved.append(self._generation.plan)
            times, now_s = message["times"], Moment().wall_s
            late_s = now_s - times.get("told", now_s)  # the clock of its node may be another one
            told: dict[str, Any] = {key: message[key] for key in ("iteration", "last", "sent_bytes") if key in message}
            told["times"] = {name: at_s + late_s for name, at_s in times.items()}
            entry.setdefault("opened", {})[str(message["process"])] = told
            self._release()
            self._unwritten = True

    def _release(self) -> None:
        """Let leaving nodes go, once the generation trains or before the first one: their state is not needed."""
        if self._generation is not None and not (self.history and self.history[-1].get("opened")):
            return
        ranks = () if self._generation is None else self._generation.ranks
        for number, member in list(self._members.items()):
            if member.process.node in self._leaving and number not in ranks:
                self._forget(number)
                self._arrivals.ended(member.process.node, 0, "it has left")
                self.board.put(f"gone/{number}", {"identity": member.identity})
                self.say(f"worker {number} on {member.process.node} has left")

    def _forget(self, number: int) -> None:
        self._gone[number] = self._members.pop(number).identity
        self.board.drop(f"beat/{number}")

    def _watch(self) -> None:
        now = time.monotonic()
        gap_s, self._watched_s = now - self._watched_s, now
        if gap_s > _GAP_S:  # this process was stopped: messages from that time are read later
            for member in self._members.values():
                member.seen_s += gap_s
            if self._failed_since is not None:
                self._failed_since = replace(self._failed_since, clock_s=self._failed_since.clock_s + gap_s)
        if now - self._shown_s > _SHOW_S:
            self._shown_s = now
            self.board.put("status", self.status())
            self._hear_beats(self.board.keys("beat/"), now)
        else:
            self._hear_beats([f"beat/{number}" for number in self._members], now)
        for number, member in list(self._members.items()):
            if now - member.seen_s > self.bounds.lost_s:
                self._kill(number, "no sign of life")
                self._lose(number, f"worker {number} on {member.process.node} gives no sign of life")
        stuck = self._progress.is_stuck(self._reached(), worth.last_iteration(self.history))
        if stuck and self._generation is not None and self._failed_since is None:
            self.say(f"no iteration has ended for {self.bounds.stuck_s:g} s: all ranks leave their session")
            self._tell_waiting("an iteration is stuck")
            self._failed_since = Moment()

    def _hear_beats(self, keys: Sequence[str], now_s: float) -> None:
        for key in keys:
            try:
                beat = self.board.get(key)
                if beat is not None:
                    self._hear_beat(beat, now_s)
            except (KeyError, TypeError, ValueError) as error:
                self.board.drop(key)
                self.say(f"a sign of life that makes no sense is left out: {shown(str(error))}")

    def _hear_beat(self, beat: Any, now_s: float) -> None:
        number, identity = int(beat["process"]), str(beat.get("identity", ""))
        member = self._members.get(number)
        if member is None and number not in self._gone:  # it joined under an earlier controller
            self._welcome(beat)
            member = self._members.get(number)
        if member is None or beat["beats"] == member.beats or member.identity not in ("", identity):
            return
        if not member.identity:
            member.identity = identity
            member.process = Process(number, str(beat["node"]), str(beat["device"]))
        member.beats, member.seen_s, member.iteration = int(beat["beats"]), now_s, int(beat["iteration"])
        host, link = map(float, beat.get("rates") or (0.0, 0.0))
        member.rates = (host, link) if host > 0 and link > 0 else None
        ended, running = beat.get("ended"), self._generation
        if ended and running and number not in self._ended and ended["generation"] == running.number:
            self._note_ended(ended)  # its message was for an earlier controller

    def _kill(self, number: int, why: str) -> None:
        if member := self._members.get(number):
            self.board.put(f"kill/{number}", {"identity": member.identity, "why": why})

    def _lose(self, number: int, why: str) -> None:
        if number not in self._members:
            if number not in self._gone:  # it was not ready yet
                self.say(why)
            return
        self._forget(number)
        self.say(why)
        if self._generation is None:
            return
        if number in self._generation.movers:
            self._tell_waiting(why)
        if number in self._generation.ranks and self._failed_since is None:
            self._failed_since = Moment()

    # -- decisions -------------------------------------------------------------------------------

    def _pool(self) -> list[Process]:
        return [m.process for m in self._members.values() if m.process.node not in self._leaving]

    def _rates(self) -> worth.Rates:
        """Rates at which state moves, from the slowest in-memory copies."""
        rates = [member.rates for member in self._members.values() if member.rates is not None]
        return worth.Rates(*map(min, zip(*rates, strict=True))) if rates else worth.Rates()

    def _prepare(self) -> None:
        """Request plans for the present pool, and for the pool without any one node."""
        pool = self._pool()
        numbers = frozenset(process.number for process in pool)
        if numbers == self._prepared or len({p.node for p in pool}) < (self.nodes if self._generation is None else 1):
            return
        self._prepared = numbers
        without = ([p for p in pool if p.node != node] for node in sorted({p.node for p in pool}))
        self.planner.prepare([pool, *(left for left in without if left)])

    def _consider_change(self, generation: Generation) -> None:
        """Change the plan if nodes leave, or if newcomers allow a better one; every pool is considered once."""
        pool = self._pool()
        staying = frozenset(process.number for process in pool)
        if staying == self._considered or not self.planner.is_ready(pool):
            return  # the training goes on while a plan is made
        considered, self._considered = self._considered, staying
        if self._asked:
            self._asked = False
            self._want("a new plan was asked for")
        elif any(process not in staying for process in generation.ranks):
            self._want("a node leaves")
        elif staying - set(generation.ranks):
            try:
                plan, _ = self.planner.plan(pool)
            except NoPlanError:
                return
            if not self.planner.is_better(plan, generation.plan):
                return
            if why := worth.against(
                plan, generation.plan, self.history, self._reached(), Moment().wall_s, rates=self._rates()
            ):
                self.say(f"a node joins, and nothing changes: {why}")
            elif (problems := self._problems(plan, staying - set(generation.ranks))) is None:
                self._considered = considered  # the training goes on while a newcomer checks the plan
            elif problems:
                self.planner.reject(plan, problems[0])
                self.say(f"a node joins, and its plan is refused: {one_line('; '.join(problems), 1000)}")
                self._considered = considered
            else:
                self._want("a node joins")

    def _problems(self, plan: Plan, newcomers: Collection[int]) -> list[str] | None:
        """The problems of a plan from a newcomer's :class:`Checks`; a plan that has run is not checked."""
        if plan in self._proved:
            return []
        return self._checks.problems(plan, lambda asked: self.board.put(f"check/{min(newcomers)}", asked))

    def _plan(self, pool: Sequence[Process]) -> tuple[Plan, tuple[int, ...]]:
        """A plan for a pool; if the planner has none any more, one that has run.

        Raises:
            NoPlanError: There is no plan.
        """
        try:
            return self.planner.plan(pool)
        except NoPlanError:
            for plan in reversed(self._proved):
                ranks = assign(plan, pool)
                if ranks is not None:
                    return plan, ranks
            raise

    def _want(self, reason: str) -> None:
        if self._generation is None or self._wanted is not None:
            return
        try:
            self.planner.plan(self._pool())  # while the training goes on; a change without one would end the job
        except NoPlanError as error:
            self.say(f"{reason}, and nothing changes: {error}")
            return
        self._wanted = (reason, Moment())
        self.board.put(f"{self._generation.number}/wanted", reason)
        self.say(f"{reason}: all ranks leave after the next iteration")

    def _after_failure(self, generation: Generation, alive: Sequence[int]) -> None:
        """Wait until the survivors have left their session, in bounded time, then go on with them."""
        self._failed_since = self._failed_since or Moment()
        running = [process for process in alive if process not in self._ended]
        if running and self._failed_since.ago_s() < self.bounds.leave_s:
            return
        for process in running:
            self._kill(process, "it did not leave its session")
            self._lose(process, f"worker {process} did not leave its session in {self.bounds.leave_s:g} s")
        if self._waits_for_workers(self._failed_since):
            return
        dead = sum(process not in self._members for process in generation.ranks)
        if not dead and self._failed_since.ago_s() < self._failures.pause_s:
            return
        if dead or not self._gives_up_plan(generation):
            self._failures.note(self._reached(), dead, {e["error"] for e in self._ended.values() if e["error"]})
        lost = "1 rank was lost" if dead == 1 else f"{dead} ranks were lost"
        self._next(lost if dead else "a session failed", self._failed_since)

    def _gives_up_plan(self, generation: Generation) -> bool:
        """Give up a plan that was refused, or failed twice before it trained, if another one trained; says if so."""
        plan, key = generation.plan, plan_hash(generation.plan)
        if not self._proved or plan in self._proved:
            return False
        self._misses[key] = self._misses.get(key, 0) + 1
        is_refused = any(ended.get("refused") for ended in self._ended.values())
        if not is_refused and self._misses[key] < _TRIES:
            return False
        why = next((ended["error"] for ended in self._ended.values() if ended["error"]), "it did not open")
        self.planner.reject(plan, one_line(why, 1000))
        self.say(f"plan {key} is given up: {why}")
        return True

    def _waits_for_workers(self, since: Moment) -> bool:
        """Wait for new workers of the agents where no plan fits the present ones; returns whether to go on waiting."""
        waits = False
        try:
            self._plan(self._pool())
        except NoPlanError as error:
            may_come = bool(self._proved) or not self._arrivals.nobody_is_left
            waits = may_come and since.ago_s() < self.bounds.return_s  # later the next generation reports it
            if waits and not self._waits:
                self.say(f"{error}. Workers may come back for {self.bounds.return_s:g} s")
        self._waits = waits
        return waits

    def _next(self, reason: str, since: Moment) -> None:
        before = self._generation
        left_s = Moment().wall_s
        try:
            plan, ranks = self._plan(self._pool())
        except NoPlanError as error:
            what = f"{reason}, and there is no plan for what is left" if before else "the job cannot begin"
            empty = self._arrivals.without_workers
            raise members.JobError(f"{what}: {error}{empty and f'. {empty}'}") from None
        number = 0 if before is None else before.number + 1
        holders = () if before is None else tuple(p for p in before.movers if p in self._members)
        nodes = tuple(self._members[process].process.node for process in ranks)
        self._generation = Generation(
            number, plan, ranks, holders, nodes, before is not None, **self._saves.for_generation()
        )
        stopped_s = left_s if self._failed_since is None else since.wall_s
        entry = {"generation": number, "why": reason, "seen": since.wall_s, "left": left_s, "stopped": stopped_s}
        if before is not None:
            comes = bool(set(ranks).difference(before.movers))
            entry["kind"] = worth.DEATH if self._failed_since is not None else worth.JOIN if comes else worth.LEAVE
        self.history[-1:] = [worth.summed_up(old) for old in self.history[-1:]]
        self.history = worth.newest([*self.history, {**entry, "reached": self._reached()}])
        self._publish(self._generation)
        self.history[-1]["planned"] = Moment().wall_s
        self._changed = since
        self._ended, self._wanted, self._failed_since = {}, None, None
        self._progress.begin()
        self._considered = frozenset()
        self._save()
        self.say(f"generation {number} ({reason}): {len(ranks)} ranks on {len(set(nodes))} nodes")

    def _publish(self, generation: Generation) -> None:
        """Publish a generation for the workers to begin; delete the documents of old ones."""
        self.board.put(f"{generation.number}/generation", generation.to_json())
        self.board.put("latest", generation.number)
        if old := self.board.keys(f"{generation.number - _KEPT}/"):
            self.board.drop(*old)

    # -- the controller's file -------------------------------------------------------------------

    def _reached(self) -> int:
        return max([self._told, *(member.iteration for member in self._members.values())])

    def status(self) -> dict[str, Any]:
        """Returns the content of ``het-run status`` as JSON values."""
        return {
            **worth.standing(self.history, self._reached(), Moment().wall_s),
            "generation": None if self._generation is None else self._generation.to_json(),
            "signature": self._signature,
            "members": [member.to_json() for _, member in sorted(self._members.items())],
            "newest": self._newest,
            "under_way": self._wanted[0] if self._wanted else "a session failed" if self._failed_since else "",
            "leaving": sorted(self._leaving),
            "nodes": self.nodes,
            "corrected": self._lessons.corrected,
            "strangers": self.board.strangers.to_json(),
            "unwritten": self._file.failure,
            "history": self.history,
        }

    def _save(self, **more: Any) -> None:
        document = {**self.status(), **more}
        self._tried_s = time.monotonic()
        self._file.write(json.dumps(document, indent=1))
        self._unwritten = False  # a failed write is tried again every second
        self.board.put("status", document)

    def _recover(self) -> None:
        """Take over the job in the controller's file, if there is one."""
        if not self.state.exists():
            return
        if (found := members.recalled(self.state, self.say)) is None:
            return
        self._give_no_number_below(found.newest)
        if found.generation is None:
            return
        self._generation, self._signature, self.history = found.generation, found.signature, list(found.history)
        self._members = {p.number: members.Member(p, identity=identity) for p, identity in found.processes}
        self._leaving = dict.fromkeys(found.leaving, found.newest)
        self._saves.recall(self._generation)
        self._lessons.recall(found.corrected)
        if self.history and self.history[-1].get("opened"):
            self._progress.opened()
            self._proved.append(self._generation.plan)
        self._publish(self._generation)
        self.say(f"goes on with generation {self._generation.number} and {len(self._members)} workers")

    def _end(self, error: str) -> None:
        self._save(over=True, error=error)
        how = worth.ending(error, self._reached(), worth.last_iteration(self.history))
        self.board.put("over", {"error": error, "how": how})
