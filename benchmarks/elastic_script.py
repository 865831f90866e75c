"""Processes of elastic jobs without agents: workers of a controller, and changes of plan by a script.

Every process of a script reads the same list of steps: a plan, the processes that are its ranks, the iteration after
which all of them leave (none: until the training is over), and the processes whose state is lost before it.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def work() -> None:
    """Entry point of a process, whose settings are in the file named by HET_JOB, by rank."""
    from megatron_het import gpt_training
    from megatron_het.elastic.worker import Setting, Worker

    rank = int(os.environ["RANK"])
    job = json.loads(Path(os.environ["HET_JOB"]).read_text(encoding="utf-8"))
    own = job["workers"][rank]
    folder = Path(os.environ["HET_JOB"]).parent / f"worker-{own['process']}"
    folder.mkdir(exist_ok=True)
    _wait_for(Path(os.environ["HET_JOB"]).parent / own["after"] if own["after"] else None)
    number = own["process"]
    shared: dict[str, Any] = {"host": "127.0.0.1", "copy_every": 1, "signature": "same", "folder": str(folder)}
    shared |= {key: job[key] for key in ("port", "token", "timeout_s")}
    setting = Setting(**shared, process=number, node=own["node"], device=own.get("device", ""), identity=str(number))
    code = Worker(setting, sys.argv[1:], gpt_training.main).run()
    sys.stdout.flush()
    os._exit(code)


def _wait_for(file: Path | None) -> None:
    """Wait until a file exists, as a node that joins later."""
    deadline_s = time.monotonic() + 200.0
    while file is not None and not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)


_WAIT_S = 60.0


def run() -> None:
    """Entry point of every process: carry out the steps of the script named by HET_SCRIPT."""
    from megatron_het import gpt_training
    from megatron_het.elastic.copies import Copies
    from megatron_het.elastic.job import Generation
    from megatron_het.elastic.sessions import ElasticBoundary, Kept, open_links, run_session
    from megatron_het.elastic.state import give
    from megatron_het.plan import load_plan
    from megatron_het.store.job import job_store

    script = json.loads(Path(os.environ["HET_SCRIPT"]).read_text(encoding="utf-8"))
    process, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    flags, folder = sys.argv[1:], Path(os.environ["HET_SCRIPT"]).parent
    store = job_store(process, _WAIT_S)
    copies = Copies(every=0)
    datasets: Kept = {}
    vocabulary, holders = None, ()
    for number, step in enumerate(script):
        ranks = tuple(step["ranks"])
        generation = Generation(number, load_plan(step["plan"]), ranks, holders, loads=number > 0)
        holders = ranks
        own = folder / f"process-{process}"
        own.mkdir(exist_ok=True)
        if process in step.get("lost", ()):
            copies = Copies(every=0)
        if process in ranks:
            leaves = functools.partial(int.__eq__, step["until"]) if step["until"] else lambda _: False
            boundary = ElasticBoundary(generation, process, store, _WAIT_S, copies, leaves, vocabulary, datasets)
            outcome = run_session(boundary, flags, own, gpt_training.main)
            if outcome.how == "failed":
                raise SystemExit(f"step {number} failed: {outcome.error}")
            left = _models_left()
            if left:
                raise SystemExit(f"step {number} is over and left {left} models in the process")
            copies = Copies(every=0)
            if outcome.snapshot is not None:
                copies.add(outcome.snapshot)
            vocabulary = boundary.padded_vocab_size
        elif process in generation.movers:
            links = open_links(generation, process, store, _WAIT_S)
            give(links, copies.snapshots)
            links.close()
    store.count("ended")
    deadline_s = time.monotonic() + _WAIT_S
    while process == 0 and store.count("ended", 0) < size and time.monotonic() < deadline_s:
        time.sleep(0.05)  # this process serves the store
    sys.stdout.flush()
    os._exit(0)  # as a worker does: threads may wait in the store


def _models_left() -> int:
    """Counts the models that a closed session has not released, which hold memory and connections."""
    import gc

    from megatron.core.distributed import DistributedDataParallel

    return sum(isinstance(found, DistributedDataParallel) for found in gc.get_objects())
