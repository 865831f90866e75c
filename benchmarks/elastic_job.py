"""Workers of an elastic job, forked from a process that has imported Megatron; tests use them in place of agents."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def work() -> None:
    """The entry of a process: its settings are in the file that HET_JOB names, by rank."""
    from megatron_het import gpt_training
    from megatron_het.elastic.worker import Setting, Worker

    rank = int(os.environ["RANK"])
    job = json.loads(Path(os.environ["HET_JOB"]).read_text(encoding="utf-8"))
    own = job["workers"][rank]
    folder = Path(os.environ["HET_JOB"]).parent / f"worker-{own['process']}"
    folder.mkdir(exist_ok=True)
    _wait_for(Path(os.environ["HET_JOB"]).parent / own["after"] if own["after"] else None)
    setting = Setting(
        "127.0.0.1",
        job["port"],
        job["token"],
        own["process"],
        own["node"],
        own.get("device", ""),
        str(folder),
        1,
        job["timeout_s"],
        "same",
        identity=str(own["process"]),
    )
    code = Worker(setting, sys.argv[1:], gpt_training.main).run()
    sys.stdout.flush()
    os._exit(code)


def _wait_for(file: Path | None) -> None:
    """A node that comes later waits until a file is there."""
    deadline_s = time.monotonic() + 200.0
    while file is not None and not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
