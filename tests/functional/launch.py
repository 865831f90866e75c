"""Starts the ranks of a functional test as users do: by torchrun, as new processes."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_het.store import free_port
from testing.runner import REPOSITORY, run_in_session

_TAIL_LINES = 40


def launch(
    world_size: int,
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    python: str = sys.executable,
    folder: Path = REPOSITORY,
) -> str:
    """Run a Python command line once per rank; returns what all ranks wrote.

    Args:
        world_size: Number of ranks.
        command: Arguments of torchrun, such as ``["-m", "package.module", "--flag"]``.
        log: File for the output of all ranks; its folder is created.
        environment: More environment variables, for every rank.
        timeout_s: Bound on the whole launch.
        python: The interpreter.
        folder: Where the ranks run and import from.

    Raises:
        AssertionError: A rank failed or the launch took too long; with the end of the log.
    """
    ranks = ["--nproc-per-node", str(world_size), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    words = [python, "-m", "torch.distributed.run", *ranks, *command]
    code = run_in_session(words, log, timeout_s, {**os.environ, **own, **(environment or {})}, folder)
    text = log.read_text(errors="replace")
    assert code == 0, "\n".join([f"exit code {code} (None: after {timeout_s} s)", *text.splitlines()[-_TAIL_LINES:]])
    return text
