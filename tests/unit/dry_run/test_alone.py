"""Groups of absent ranks: what their work says of itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

# In a process of its own, because nothing of it is undone.
_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from megatron_het.dry_run.alone import join_alone
from megatron_het.runtime.channels import Channels
from megatron_het.distributed import Link
join_alone(0, 2, sys.argv[1])
channels = Channels({(0, 1): Link(None, 0)}, sys.argv[1], 1.0, 0)
held = []
for _ in range(3):
    channels.send(torch.ones(4), 1, "test")
    held.append(len(channels._sends))
print(json.dumps(held))
"""


@pytest.mark.parametrize(("backend", "held"), [("nccl", [1, 1, 1]), ("gloo", [1, 2, 3])])
def test_what_was_sent_is_free_at_the_next_send_over_nccl_only(backend: str, held: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, backend],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == held
