"""How a session that fails is told."""

import ast
import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_het.device import activate
from megatron_het.elastic import copies as copying
from megatron_het.elastic import sessions
from megatron_het.elastic import worker as workers
from megatron_het.elastic.__main__ import main
from megatron_het.elastic.agent import end_all
from megatron_het.elastic.copies import Copies
from megatron_het.elastic.job import Generation
from megatron_het.elastic.pool import GivenPlans, NoPlanError, Process, assign
from megatron_het.elastic.searched import limited
from megatron_het.elastic.sessions import ElasticBoundary, Outcome
from megatron_het.elastic.worker import Setting, Worker
from megatron_het.lowering.programs import Choice
from megatron_het.plan import Placement, Plan, save_plan
from megatron_het.plan.run_config import HetConfig
from megatron_het.report import RunReport
from megatron_het.store import StoreError, StoreServer
from megatron_het.store.torch_store import TorchStore
from tests.unit.elastic.notes import plan, runs, until
from tests.unit.store.memory import MemoryStore


class Session:
    """Stands for the boundary of a session."""

    def __init__(self, is_saving: bool) -> None:
        self.generation, self.process = Generation(0, plan([[1]]), (1,), (), ("n1",)), 1
        self.saving, self.iteration = 5 if is_saving else None, 4

    def closed(self) -> None:
        pass


@pytest.fixture
def enters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions leave nothing behind in this process."""
    monkeypatch.setattr(sessions, "end_session", lambda: None)
    monkeypatch.setattr(sessions.sys, "argv", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("is_saving", [True, False])
@pytest.mark.usefixtures("enters")
def test_trouble_of_one_node_is_no_failed_checkpoint(is_saving: bool, tmp_path: Path) -> None:
    entry = Mock(side_effect=OSError(errno.EIO, "input/output error\nof the disk"))
    boundary: Any = Session(is_saving)
    if is_saving:
        outcome = sessions.run_session(boundary, ["--save", "x"], tmp_path, entry)
        assert (outcome.how, outcome.unsaved) == ("failed", 5) and outcome.error.endswith("output error of the disk")
    else:
        with pytest.raises(OSError, match="input/output"):
            sessions.run_session(boundary, ["--save", "x"], tmp_path, entry)


@pytest.mark.usefixtures("enters")
def test_a_change_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next session begins after the report of this one is written; a busy disk takes half a second to sync."""
    synced: list[int] = []

    def entry(_: Any) -> None:
        one = Placement(plan([[1]]))
        platform: Any = SimpleNamespace(device_name="cpu")
        RunReport(HetConfig(report_dir=tmp_path), one, 0, "hash", Choice("gloo", "test"), platform).write()

    monkeypatch.setattr(os, "fsync", synced.append)
    boundary: Any = Session(is_saving=False)
    assert sessions.run_session(boundary, [], tmp_path, entry).how == "finished"
    assert (tmp_path / "plan-0.json").exists()
    assert (tmp_path / "rank-0.json").exists()
    assert not synced


def test_a_world_that_could_not_be_made_uses_up_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for a process that died numbers its groups as one that has just come; else they never meet."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    shared = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    shared.start()
    shared.put("lost", "the other one")
    with pytest.raises(RuntimeError, match="is lost"):
        dist.init_process_group("gloo", store=TorchStore(shared, 60.0, name="here", lost="lost"), rank=0, world_size=2)
    sessions.end_session()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    finally:
        sessions.end_session()
        shared.close()


def test_a_world_that_cannot_be_closed_is_no_hindrance_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "destroy_process_group", Mock(side_effect=RuntimeError("communicator was aborted")))
    sessions.end_session()
    assert not dist.is_initialized()


def test_no_layer_of_a_session_is_scaled_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine would reduce over the groups of the session before, with delayed scaling.  Memory is free."""
    engine = Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", engine.empty_cache)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", engine.empty_host_cache, raising=False)
    for name in ("fp8", "module.base"):
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", engine)
    sessions.end_session()
    found = [name for name, *_ in engine.mock_calls]
    assert found == ["FP8GlobalStateManager.reset", "destroy_ub", "empty_cache", "empty_host_cache"]


@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True)])
def test_random_states_go_on_where_cuda_graphs_use_generators(kinds: tuple[bool, bool]) -> None:
    activate()
    from megatron.core.tensor_parallel import random

    from megatron_het.elastic import state

    states = None
    for seed, of_graphs in enumerate((*kinds, False)):
        random.initialize_rng_tracker(use_cudagraphable_rng=of_graphs, force_reset=True)
        random.get_cuda_rng_tracker().add("model", seed)
        if states is not None:
            state.set_random_states(states)
        states = states or state.random_states()
        assert isinstance(random.get_cuda_rng_tracker().get_states()["model"], torch.Generator) is of_graphs
        assert state.random_states()["tracker"] == states["tracker"]


def test_no_module_of_a_session_stays_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each held a process group, with its threads and connections, for as many sessions as the cache has places."""
    activate()  # Megatron binds on import what the platform replaces
    from megatron.core.models.common.embeddings import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "get_emb", lambda *_: torch.zeros(16, 1, 1, 8))  # by itself it asks for CUDA
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.new_group([0])
        module = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
        module(16)
        ends: list[Any] = [weakref.ref(module), weakref.ref(group)]
        del module, group
        assert ends[0]() is not None, "Megatron's cache does not hold it any more: what clears the cache can go"
    finally:
        sessions.end_session()
    assert [end() for end in ends] == [None, None]


@pytest.mark.parametrize(("loads", "began", "stays"), [(True, None, True), (True, 4, False), (False, None, False)])
@pytest.mark.usefixtures("enters")
def test_a_plan_that_the_flags_refuse_does_not_end_a_worker_that_holds_state(
    loads: bool, began: int | None, stays: bool, tmp_path: Path
) -> None:
    entry = Mock(side_effect=SystemExit(2))
    boundary: Any = Session(is_saving=False)
    boundary.generation, boundary.began = Generation(1, plan([[1]]), (1,), (), ("n1",), loads), began
    if not stays:
        with pytest.raises(SystemExit):
            sessions.run_session(boundary, [], tmp_path, entry)
    else:
        outcome = sessions.run_session(boundary, [], tmp_path, entry)
        assert outcome.how == "failed" and outcome.is_refused


# What a session opens when it begins.


class Connections:
    """Stands for connections between some processes."""

    def __init__(self, _store: Any, rank: int, size: int, _timeout_s: float) -> None:
        self.rank, self.size, self.is_open = rank, size, True

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize(
    ("holders", "every", "is_shared"), [((1, 2), 1, True), ((1, 2, 7), 1, False), ((1, 2), 0, False)]
)
def test_copies_go_over_the_connections_of_the_change(
    holders: tuple[int, ...], every: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where a node has left, its process is a member of the change, and no rank."""
    monkeypatch.setattr(sessions, "Links", Connections)
    generation = Generation(1, plan([[1], [1, 1]]), (5, 2, 1), holders, ("n5", "n2", "n1"), loads=True)
    assert generation.movers == (5, 2, 1, *(number for number in holders if number == 7))
    store, copies = MemoryStore(), Copies(every)
    boundary = ElasticBoundary(generation, 2, store, 5.0, copies, lambda _: False, None, {})
    change: Any = Connections(None, 1, len(generation.movers), 5.0)
    boundary._open_copies(1, change)
    assert change.is_open == is_shared
    assert (copies._links is change) == is_shared
    found: Any = copies._links
    assert (found is None) == (every == 0)
    assert found is None or (found.rank, found.size, found.is_open) == (1, 3, True)


def test_a_checkpoint_that_could_not_be_written_goes_elsewhere() -> None:
    generation = Generation(1, plan([[1]]), (1,), (), ("n1",), True, (3,), (6,), "/other")
    assert Generation.from_json(generation.to_json()) == generation
    boundary = ElasticBoundary(generation, 1, MemoryStore(), 5.0, Copies(0), lambda _: False, None, {})
    args = SimpleNamespace(save="/saved", save_interval=3, train_iters=9, padded_vocab_size=None)
    boundary.prepare(args)
    found = []
    for iteration in (3, 6, 9):
        boundary._choose_folder(args, iteration)
        found.append((args.save, args.save_interval))
    assert found == [("/saved", None), ("/other", 3), ("/saved", 3)]


def test_what_a_lost_rank_leaves_on_the_device_is_neither_kept_nor_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that is aborted ends its kernels with wrong values, and without an error."""
    has_aborted, forgotten = [False], list[int]()

    def packed(_pieces: Any) -> tuple[None, list[Any]]:
        has_aborted[0] = True  # while the state is on its way to host memory
        return None, []

    copies = Copies(1)
    boundary = ElasticBoundary(
        Generation(1, plan([[1]]), (1,), (), ("n1",), True), 1, MemoryStore(), 5.0, copies, lambda _: False, None, {}
    )
    copies._links, boundary.has_aborted = Connections(None, 0, 1, 5.0), lambda: has_aborted[0]  # type: ignore[assignment]
    boundary.trainee = SimpleNamespace(models=(), optimizer=None, args=SimpleNamespace(save=None))  # type: ignore[assignment]
    monkeypatch.setattr(copying, "blocks_of", lambda *_: ())
    monkeypatch.setattr(copying, "collect", lambda *_, **__: SimpleNamespace(pieces=()))
    monkeypatch.setattr(copying, "_packed", packed)
    monkeypatch.setattr(Copies, "_agree", lambda *_: None)
    monkeypatch.setattr(sessions, "communicators", list)
    report = SimpleNamespace(forget_after=forgotten.append)
    session = SimpleNamespace(feature=lambda _: None, materialise_parameters=lambda: None, report=report)
    with pytest.raises(RuntimeError, match="is lost"):
        boundary.reached(session, 4)
    assert copies.snapshots == []
    with pytest.raises(RuntimeError, match="is lost"):
        boundary.reached(session, 5)
    boundary.failed(session)
    assert boundary.iteration == 4 and forgotten == [4]


@pytest.mark.parametrize("came", [False, True])
def test_the_next_turn_lets_go_of_the_state_in_host_memory_and_knows_of_signals_and_the_start(
    came: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import training

    monkeypatch.setattr("megatron.core.num_microbatches_calculator.update_num_microbatches", Mock())
    monkeypatch.setattr(ElasticBoundary, "load", lambda *_: (3, 0.0))
    handler = SimpleNamespace(_signal_received=False)
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_SIGNAL_HANDLER", handler)
    monkeypatch.setattr(training, "_TRAIN_START_TIME", 90.0)  # the script was run again
    copies = Copies(0)
    copies.add(Mock(iteration=3))
    turn = sessions.TurnBoundary(1, plan([[1]]), (), 0, MemoryStore(), copies, None, {})
    turn.listened, turn.began_s = SimpleNamespace(_signal_received=came), 10.0
    assert turn.load(None, Mock(), (), None, None) == (3, 0.0) and turn.copies.snapshots == []
    assert handler._signal_received is came and training._TRAIN_START_TIME == 10.0


# What a worker does once is not done again in a change.


def test_sources_are_found_once(monkeypatch: pytest.MonkeyPatch):
    asked, original = [], inspect.getsource

    def getsource(thing):
        asked.append(thing)
        return original(thing)

    monkeypatch.setattr(inspect, "getsource", getsource)
    for _ in range(2):
        workers.remember_sources()
        assert "Stands for connections" in inspect.getsource(Connections)
    assert asked == [Connections]


def test_configurations_are_parsed_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspect, "getsource", inspect.unwrap(inspect.getsource))
    monkeypatch.setattr(ast, "parse", inspect.unwrap(ast.parse))
    workers.remember_sources()
    source = "@dataclass\nclass Thing:\n    x: int = 1\n"
    assert ast.parse(source) is ast.parse(source)
    assert ast.dump(ast.parse(source)) == ast.dump(inspect.unwrap(ast.parse)(source))
    other = "class Thing:\n    x: int = 1\n"
    assert ast.parse(other) is not ast.parse(other), "somebody may change it"
    assert ast.parse(source, type_comments=True) is not ast.parse(source)


# What a worker tells the controller, and when.


@pytest.mark.parametrize("is_away", [False, True])
def test_a_rank_says_that_it_leaves_before_its_session_is_taken_down(
    is_away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Once, also where the controller is away at that moment."""
    board: Any = MemoryStore()
    monkeypatch.setattr(Setting, "board", lambda _: board)
    worker = Worker(Setting("127.0.0.1", 1, "t", 4, "n1", "", str(tmp_path), 1, 1.0, "s"), [], lambda _: None)
    early: list[Any] = []

    def session(boundary: Any, *_unused: Any) -> Outcome:
        boundary.iteration = 7
        with monkeypatch.context() as patched:
            if is_away:
                patched.setattr(board, "post", _refuse)
            boundary.leaving()
        early.append(board.get("inbox/1"))
        return Outcome("left")

    monkeypatch.setattr(workers, "run_session", session)
    worker._take_part(Generation(3, plan([[1]]), (4,), (), ("n1",)))
    told = {"type": "ended", "process": 4, "generation": 3, "how": "left", "error": "", "unsaved": None, "iteration": 7}
    told["refused"] = False
    assert early == [None if is_away else told]
    assert worker._ended == told, "signs of life say it again"
    assert not board.has("inbox/2")


def _refuse(_document: Any, **_: Any) -> None:
    raise StoreError("away")


# What a worker has started ends with it.

SOON_S = 20.0
WORKER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_worker_has_started_ends_with_it(is_killed: bool):
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as worker:
        child = int(worker.stdout.readline())
        assert runs(child)
        if is_killed:
            worker.send_signal(signal.SIGKILL)
            worker.wait(SOON_S)
        end_all(worker)
        worker.wait(SOON_S)
    until(lambda: not runs(child))
    end_all(worker)  # nothing is there any more


# Which processes become which ranks, and what a command line that cannot work says.


def pool(*nodes: str) -> list[Process]:
    return [Process(i + 1, node) for i, node in enumerate(nodes)]


def test_a_tensor_parallel_group_stays_inside_of_a_node():
    processes = pool("a", "b", "b", "a", "a")
    found = assign(plan([[1], [2, 2]]), processes)
    assert found is not None and len(set(found)) == 5
    node = {p.number: p.node for p in processes}
    assert node[found[1]] == node[found[2]] and node[found[3]] == node[found[4]]
    assert assign(plan([[1], [2]]), pool("a", "b", "c")) is None


def test_kinds_count_where_everybody_has_one():
    base = plan([[1], [1]])
    document = base.to_json()
    document["stages"][0]["replicas"][0]["device"] = "new"
    document["stages"][1]["replicas"][0]["device"] = "old"
    kinds = Plan.from_json(document)
    processes = [Process(1, "a", "old"), Process(2, "b", "new")]
    assert assign(kinds, processes) == (2, 1)
    assert assign(kinds, [Process(1, "a", "old"), Process(2, "b", "old")]) is None
    assert assign(base, processes) == (1, 2)


def test_the_best_plan_that_fits():
    plans = GivenPlans([plan([[1], [1, 1]]), plan([[1], [1]])])
    assert plans.plan(pool("a", "b", "c"))[0].world_size == 3
    assert plans.plan(pool("a", "b"))[0].world_size == 2
    with pytest.raises(NoPlanError, match="3, 2 ranks"):
        plans.plan(pool("a"))
    assert plans.is_better(plan([[1]]), plan([[1], [1], [1]]))  # the one that runs is of another list


def test_plans_are_searched_where_no_given_one_fits():
    given, other = plan([[1], [1, 1]]), plan([[1]])

    class Searches(GivenPlans):
        prepared: Any = ()

        def prepare(self, pools: Any) -> None:
            self.prepared = pools

        def is_ready(self, pool: Any) -> bool:
            return False

    searches = Searches([other])
    both = GivenPlans([given], searches)
    assert both.plan(pool("a", "b", "c", "d"))[0] is given and both.is_ready(pool("a", "b", "c"))
    assert both.plan(pool("a", "b"))[0] is other and not both.is_ready(pool("a", "b"))
    both.prepare([pool("a", "b", "c"), pool("a", "b")])
    assert searches.prepared == [pool("a", "b")]
    assert both.is_better(given, other)


def test_a_cluster_file_for_the_nodes_that_are_there():
    cluster = {"nodes": [{"gpu": "A", "count": 4, "gpus_per_node": 2, "hosts": ["h"]}, {"gpu": "B", "count": 1}]}
    there = [Process(1, "a", "A"), Process(2, "a", "A"), Process(3, "b", "A"), Process(4, "b", "A")]
    assert limited(cluster, there)["nodes"] == [{"gpu": "A", "count": 2, "gpus_per_node": 2}]
    with pytest.raises(NoPlanError, match="which has A, B"):
        limited(cluster, [Process(1, "a", "C")])


BAD = {
    "address": (["--controller", "nowhere", "--", "--lr", "1"], "HOST:PORT"),
    "no flags": (["--controller", "127.0.0.1:29400"], "after --"),
    "a plan among the flags": (["--controller", "127.0.0.1:29400", "--", "--het-plan", "x"], "--plans"),
    "no plans": (["--controller", "127.0.0.1:29400", "--start-controller", "--", "--lr", "1"], "--cluster"),
    "no token": (["--controller", "127.0.0.1:29400", "--", "--lr", "1"], "token"),
    "bound": (["--controller", "127.0.0.1:29400", "--lost-s", "0", "--", "--lr", "1"], "--lost-s"),
    "endless bound": (["--controller", "127.0.0.1:29400", "--timeout-s", "inf", "--", "--lr", "1"], "--timeout-s inf"),
    "with and without workers": (["--start-controller", "--controller-only", "--plans", "a.json"], "give one of them"),
    "node": (["--controller", "127.0.0.1:29400", "--node", "../a", "--", "--lr", "1"], "--node '../a'"),
    "plans of two trainings": (
        ["--controller", "127.0.0.1:29400", "--controller-only", "--plans", "a.json", "b.json"],
        "global_batch_size",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    save_plan(plan([[1], [1]]), "a.json")
    other = json.loads(Path("a.json").read_text())
    other["training"]["global_batch_size"] += 1
    for stage in other["stages"]:
        stage["replicas"][0]["microbatches"].append(other["training"]["global_batch_size"] - 1)
    Path("b.json").write_text(json.dumps(other))
    words, expected = BAD[name]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("het-run: ") and expected in error and "Traceback" not in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.json"], "nothing is started or written"


def test_no_process_imports_megatron_before_it_has_its_platform() -> None:
    """On a CPU the platform takes the compiler away, which Megatron's kernels ask for when they are imported."""
    code = (
        "import sys, megatron_het.elastic.worker, megatron_het.launch.start, megatron_het.gpt_training\n"
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    words = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
