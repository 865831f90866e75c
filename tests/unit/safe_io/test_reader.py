"""``| head``: a command whose reader has left ends without an error, its help too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = ["tools.planner", "megatron_het.elastic", "megatron_het.doctor", "megatron_het.schedule"]
COMMANDS += ["megatron_het.dry_run", "megatron_het.megatron_patches"]


@pytest.mark.parametrize("module", COMMANDS)
def test_help_that_nobody_reads(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
