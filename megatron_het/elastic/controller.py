"""The controller: membership, plan and generation of a job.  It is no rank and moves no state.

It reads what agents and workers post and what their signs of life say, decides, and writes the next generation.  What
it has decided is in a file as well, so that it can be started again while the job trains on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_het.elastic.alike import refusal
from megatron_het.elastic.board import Board, BoardError
from megatron_het.elastic.failures import Failures, JobError, Progress
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.lessons import Lessons
from megatron_het.elastic.members import Bounds, Member
from megatron_het.elastic.pool import NoPlanError, Planner, Process
from megatron_het.elastic.recalled import recalled
from megatron_het.elastic.standing import last_iteration, standing
from megatron_het.elastic.worth import against
from megatron_het.untrusted import write_text

_POLL_S, _CHANGE_POLL_S = 0.02, 0.004
_SHOW_S = 1.0
_SETTLE_S = 30.0


class Controller:
    """Decides which generation comes next.

    Args:
        board: Served by this process.
        planner: Makes plans.
        state: File with what was decided.
        nodes: Nodes to wait for before the first generation.
        bounds: How long to wait.
        say: Writes one line of progress.
    """

    def __init__(
        self, board: Board, planner: Planner, state: Path, nodes: int, bounds: Bounds, say: Callable[[str], None]
    ) -> None:
        self._board, self._planner, self._state, self._nodes = board, planner, state, nodes
        self._bounds, self._say = bounds, say
        self._lessons = Lessons(planner, say)
        self._members: dict[int, Member] = {}
        self._newest = 0
        self._leaving: set[str] = set()
        self._generation: Generation | None = None
        self._ended: dict[int, dict[str, Any]] = {}
        self._wanted: tuple[str, float] | None = None
        self._failed_since: float | None = None
        self._failures, self._progress = Failures(), Progress(bounds.stuck_s)
        self._told = 0
        self._unsaved: set[int] = set()
        self._missing: dict[str, int] = {}
        self._signature: str | None = None
        self._considered, self._prepared = frozenset[int](), frozenset[int]()
        self._asked = self._waits = False
        self._shown_s = 0.0
        self._read, self._unwritten = 0, False
        self._started_s = time.monotonic()
        self.history: list[dict[str, Any]] = []
        """One entry per change: why, and when what was done (wall clock)."""
        self._recover()

    def run(self) -> None:
        """Until the job is over.

        Raises:
            JobError: It cannot go on.
        """
        try:
            while not self._step():
                time.sleep(_POLL_S if self._wanted is None and self._failed_since is None else _CHANGE_POLL_S)
        except JobError as error:
            self._end(str(error))
            raise
        self._end("")

    def _step(self) -> bool:
        """One round; whether the job is over."""
        self._listen()
        self._watch()
        self._prepare()
        generation = self._generation
        if generation is None:
            self._perhaps_start()
            return False
        alive = [process for process in generation.ranks if process in self._members]
        if all(self._ended.get(process, {}).get("how") == "finished" for process in generation.ranks):
            return True
        failed = self._failed_since is not None or any(e["how"] == "failed" for e in self._ended.values())
        if failed or len(alive) < len(generation.ranks):
            self._after_failure(generation, alive)
        elif self._wanted is not None and all(process in self._ended for process in alive):
            if any(self._ended[process]["how"] == "finished" for process in alive):
                return True  # the last iteration came before the change
            reason, since_s = self._wanted
            self._next(reason, since_s)
        elif self._wanted is None:
            self._perhaps_learn(generation)
            self._perhaps_change(generation)
        return False

    # -- what others say -------------------------------------------------------------------------

    def _listen(self) -> None:
        while self._board.has(f"inbox/{self._read + 1}"):
            self._read += 1
            try:
                message = self._board.get(f"inbox/{self._read}")
                self._board.drop(f"inbox/{self._read}")
                self._hear(message)
            except (BoardError, KeyError, TypeError, ValueError) as error:
                self._say(f"a message that makes no sense is left out: {error}")
        if self._unwritten:  # once for all messages: a busy disk takes half a second each time
            self._save()

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self._welcome(message)
        elif kind == "exit":
            self._lose(int(message["process"]), f"worker {message['process']} on {message['node']} {message['why']}")
        elif kind == "ended" and self._generation is not None and message["generation"] == self._generation.number:
            self._note_ended(message)
        elif kind == "opened":
            self._note_opened(message)
        elif kind == "drift" and self._generation is not None and message["generation"] == self._generation.number:
            self._lessons.note(message, self._generation, self._pool(), self.history)
        elif kind == "leave":
            self._leaving.add(str(message["node"]))
            self._say(f"node {message['node']} is to leave")
        elif kind == "replan":
            self._planner.renew()
            self._asked, self._considered, self._prepared = True, frozenset(), frozenset()

    def _note_ended(self, message: dict[str, Any]) -> None:
        self._ended[int(message["process"])] = message
        self._told = max(self._told, int(message["iteration"]))
        if message["how"] == "failed":
            self._tell_waiting("a session failed")
        if message.get("unsaved") is not None and int(message["unsaved"]) not in self._unsaved:
            self._unsaved.add(int(message["unsaved"]))
            self._say(f"the checkpoint of iteration {message['unsaved']} is not written: {message['error']}")

    def _tell_waiting(self, why: str) -> None:
        """Those who still wait for a process of this generation need not."""
        assert self._generation is not None
        if not self._board.has(self._generation.lost_key):
            self._board.put(self._generation.lost_key, why)

    def _welcome(self, message: dict[str, Any]) -> None:
        number, signature = int(message["process"]), str(message["signature"])
        self._signature = self._signature or signature
        if differs := refusal(signature, self._signature):
            self._board.put(f"refused/{number}", differs)
            return
        self._leaving.discard(str(message["node"]))
        node = str(message["node"])
        self._members[number] = Member(Process(number, node, str(message["device"])))
        self._missing[node] = self._missing.get(node, int(message.get("workers", 1))) - 1
        self._newest = max(self._newest, number)  # a controller that is started again gives its number to nobody else
        self._unwritten = True
        self._say(f"worker {number} on {message['node']} is ready")

    def _note_opened(self, message: dict[str, Any]) -> None:
        if message["padded_vocab_size"] is not None:
            self._board.put("padded_vocab_size", message["padded_vocab_size"])
        if self.history and self._generation is not None and message["generation"] == self._generation.number:
            self._failures.over()
            self._progress.opened()
            self._release(self._generation)
            entry = self.history[-1]
            entry.setdefault("opened", {})[str(message["process"])] = {
                key: message[key] for key in ("iteration", "last", "times", "sent_bytes") if key in message
            }
            self._unwritten = True

    def _release(self, generation: Generation) -> None:
        """The next generation trains: nodes that leave have nothing any more that somebody needs."""
        for number, member in list(self._members.items()):
            if member.process.node in self._leaving and number not in generation.ranks:
                del self._members[number]
                self._board.put(f"gone/{number}", True)
                self._say(f"worker {number} on {member.process.node} has left")

    def _watch(self) -> None:
        """Signs of life."""
        now = time.monotonic()
        if now - self._shown_s > _SHOW_S:
            self._shown_s = now
            self._board.put("status", self.status())
        for number, member in list(self._members.items()):
            beat = self._board.get(f"beat/{number}")
            if beat is not None and beat["beats"] != member.beats:
                member.beats, member.seen_s, member.iteration = beat["beats"], now, int(beat["iteration"])
                ended, running = beat.get("ended"), self._generation
                if ended and running and number not in self._ended and ended["generation"] == running.number:
                    self._note_ended(ended)  # it was said to a controller that is no more
            elif now - member.seen_s > self._bounds.lost_s:
                self._board.put(f"kill/{number}", "no sign of life")
                self._lose(number, f"worker {number} on {member.process.node} gives no sign of life")
        stuck = self._progress.is_stuck(self._reached(), last_iteration(self.history))
        if stuck and self._generation is not None and self._failed_since is None:
            self._say(f"no iteration has ended for {self._bounds.stuck_s:g} s: all ranks leave their session")
            self._tell_waiting("an iteration is stuck")
            self._failed_since = time.time()

    def _lose(self, number: int, why: str) -> None:
        member = self._members.pop(number, None)
        if member is None:
            return
        self._say(why)
        if self._generation is None:
            return
        if number in self._generation.movers:
            self._tell_waiting(why)
        if number in self._generation.ranks and self._failed_since is None:
            self._failed_since = time.time()

    # -- decisions -------------------------------------------------------------------------------

    def _pool(self) -> list[Process]:
        return [m.process for m in self._members.values() if m.process.node not in self._leaving]

    def _prepare(self) -> None:
        """Have plans made for the pool that is there, and for what is left when any one node is lost."""
        pool = self._pool()
        numbers = frozenset(process.number for process in pool)
        if numbers == self._prepared or len({p.node for p in pool}) < (self._nodes if self._generation is None else 1):
            return
        self._prepared = numbers
        without = ([p for p in pool if p.node != node] for node in sorted({p.node for p in pool}))
        self._planner.prepare([pool, *(left for left in without if left)])

    def _perhaps_start(self) -> None:
        settled = max((member.came_s for member in self._members.values()), default=0.0) + _SETTLE_S
        complete = all(missing <= 0 for missing in self._missing.values()) or time.monotonic() > settled
        if len({p.node for p in self._pool()}) >= self._nodes and complete:
            self._next("start", time.time())
        elif time.monotonic() - self._started_s > self._bounds.start_s:
            found = sorted({p.node for p in self._pool()})
            raise JobError(
                f"only {len(found)} of {self._nodes} nodes came in {self._bounds.start_s:g} s ({', '.join(found)}). "
                "Start the agents of the others, or ask for fewer with --nodes"
            )

    def _perhaps_learn(self, generation: Generation) -> None:
        """A better plan for what the run has measured."""
        if reason := self._lessons.reason(generation, self._members):
            self._considered, self._prepared = frozenset(process.number for process in self._pool()), frozenset()
            self._want(reason)

    def _perhaps_change(self, generation: Generation) -> None:
        """Nodes that leave, and newcomers with whom there is a better plan; every pool is looked at once."""
        pool = self._pool()
        staying = frozenset(process.number for process in pool)
        if staying == self._considered or not self._planner.is_ready(pool):
            return  # the training goes on while a plan is made
        self._considered = staying
        if self._asked:
            self._asked = False
            self._want("a new plan was asked for")
        elif any(process not in staying for process in generation.ranks):
            self._want("a node leaves")
        elif staying - set(generation.ranks):
            try:
                plan, _ = self._planner.plan(pool)
            except NoPlanError:
                return
            if not self._planner.is_better(plan, generation.plan):
                return
            if why := against(plan, generation.plan, self.history, self._reached(), time.time()):
                self._say(f"a node joins, and nothing changes: {why}")
            else:
                self._want("a node joins")

    def _want(self, reason: str) -> None:
        if self._generation is None or self._wanted is not None:
            return
        try:
            self._planner.plan(self._pool())  # while the training goes on; a change without one would end the job
        except NoPlanError as error:
            self._say(f"{reason}, and nothing changes: {error}")
            return
        self._wanted = (reason, time.time())
        self._board.put(f"{self._generation.number}/wanted", reason)
        self._say(f"{reason}: all ranks leave after the next iteration")

    def _after_failure(self, generation: Generation, alive: Sequence[int]) -> None:
        """Wait until the survivors have left their session, in bounded time, then go on with them."""
        self._failed_since = self._failed_since or time.time()
        running = [process for process in alive if process not in self._ended]
        if running and time.time() - self._failed_since < self._bounds.leave_s:
            return
        for process in running:
            self._board.put(f"kill/{process}", "it did not leave its session")
            self._lose(process, f"worker {process} did not leave its session in {self._bounds.leave_s:g} s")
        if not self._can_go_on(self._failed_since):
            return
        dead = sum(process not in self._members for process in generation.ranks)
        self._failures.note(self._reached(), dead, {e["error"] for e in self._ended.values() if e["error"]})
        lost = "1 rank was lost" if dead == 1 else f"{dead} ranks were lost"
        self._next(lost if dead else "a session failed", self._failed_since)

    def _can_go_on(self, since_s: float) -> bool:
        """Whether there is a plan for what is left; for a while the agents' new workers are waited for."""
        try:
            self._planner.plan(self._pool())
        except NoPlanError as error:
            if time.time() - since_s >= self._bounds.return_s:
                return True  # the next step says so
            if not self._waits:
                self._say(f"{error}. Workers may come back for {self._bounds.return_s:g} s")
            self._waits = True
            return False
        self._waits = False
        return True

    def _next(self, reason: str, since_s: float) -> None:
        """Write the next generation."""
        before = self._generation
        left_s = time.time()
        try:
            plan, ranks = self._planner.plan(self._pool())
        except NoPlanError as error:
            raise JobError(f"{reason}, and there is no plan for what is left: {error}") from None
        number = 0 if before is None else before.number + 1
        holders = () if before is None else tuple(p for p in before.movers if p in self._members)
        nodes = tuple(self._members[process].process.node for process in ranks)
        loads, unsaved = before is not None, tuple(sorted(self._unsaved))
        self._generation = Generation(number, plan, ranks, holders, nodes, loads, unsaved)
        stopped_s = left_s if self._failed_since is None else since_s
        entry = {"generation": number, "why": reason, "seen": since_s, "left": left_s, "stopped": stopped_s}
        self.history.append({**entry, "reached": self._reached()})
        self._board.put(f"{number}/generation", self._generation.to_json())
        self._board.put("latest", number)
        self.history[-1]["planned"] = time.time()
        self._ended, self._wanted, self._failed_since = {}, None, None
        self._progress.begin()
        self._considered = frozenset()
        self._save()
        self._say(f"generation {number} ({reason}): {len(ranks)} ranks on {len(set(nodes))} nodes")

    # -- what is kept ----------------------------------------------------------------------------

    def _reached(self) -> int:
        return max([self._told, *(member.iteration for member in self._members.values())])

    def status(self) -> dict[str, Any]:
        """What ``het-run status`` shows; JSON values."""
        return {
            **standing(self.history, self._reached(), time.time()),
            "generation": None if self._generation is None else self._generation.to_json(),
            "signature": self._signature,
            "members": [member.to_json() for _, member in sorted(self._members.items())],
            "newest": self._newest,
            "under_way": self._wanted[0] if self._wanted else "a session failed" if self._failed_since else "",
            "leaving": sorted(self._leaving),
            "corrected": self._lessons.corrected,
            "history": self.history,
        }

    def _save(self, **more: Any) -> None:
        document = {**self.status(), **more}
        write_text(self._state, json.dumps(document, indent=1))
        self._unwritten = False
        self._board.put("status", document)

    def _recover(self) -> None:
        """Go on with the job that the file describes, if there is one."""
        if not self._state.exists():
            return
        if (found := recalled(self._state)) is None:
            return
        self._newest = found.newest
        self._board.start_count("processes", self._newest)
        if found.generation is None:
            return
        self._generation, self._signature, self.history = found.generation, found.signature, list(found.history)
        self._members = {process.number: Member(process) for process in found.processes}
        self._leaving, self._unsaved = set(found.leaving), set(self._generation.unsaved)
        self._lessons.recall(found.corrected)
        if self.history and self.history[-1].get("opened"):
            self._progress.opened()
        number = self._generation.number
        self._board.put(f"{number}/generation", self._generation.to_json())
        self._board.put("latest", number)
        self._say(f"goes on with generation {number} and {len(self._members)} workers")

    def _end(self, error: str) -> None:
        self._save(over=True, error=error)
        self._board.put("over", {"error": error})
