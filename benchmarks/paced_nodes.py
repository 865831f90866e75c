"""``het-run`` with paced devices: ``python -m benchmarks.paced_nodes`` takes the words of ``het-run``.

A layer takes a set time on every device, as on an accelerator that does not use its host's cores: a pass computes, and
then its process sleeps for the rest of the time (``benchmarks.drift_stand_ins.Pace``).  All else is ``het-run``'s own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

FORWARD_S, BACKWARD_S = 0.012, 0.024
"""Of one layer and microbatch."""
_PRODUCT, _OWN, _WORKER = "megatron_het.elastic.worker", "benchmarks.paced_nodes", "--worker"


def worker_command(command: Sequence[str]) -> list[str]:
    """What an agent starts here in place of its own command for a worker."""
    module = list(command).index(_PRODUCT)
    return [*command[:module], _OWN, _WORKER, *command[module + 1 :]]


def _work() -> int:
    """Be a worker whose layers take their time."""
    from megatron_het.elastic import worker

    warm_up = worker.warm_up

    def prepare() -> None:
        from benchmarks.drift_stand_ins import Pace

        warm_up()
        Pace(FORWARD_S, BACKWARD_S).install()

    worker.warm_up = prepare
    worker.main()
    return 1  # it has ended the process


def main() -> int:
    """Command line; the exit code is ``het-run``'s."""
    if sys.argv[1:2] == [_WORKER]:
        del sys.argv[1]
        return _work()
    from megatron_het.elastic import agent
    from megatron_het.elastic.__main__ import main as het_run

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(worker_command(command), **options)

    own = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    agent.subprocess = SimpleNamespace(**own, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
    return het_run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
