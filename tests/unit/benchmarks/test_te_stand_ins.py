"""Transformer Engine's layers on fake tensors of a CUDA device."""

import os
import subprocess
import sys

RUN = """
import sys, tempfile
from pathlib import Path
from benchmarks import te_stand_ins
te_stand_ins.install()
from benchmarks.cuda_iterations import run_all
chosen = te_stand_ins.iterations(["llama3"])[:1]
with tempfile.TemporaryDirectory() as folder:
    found = list(run_all(chosen, Path(folder)))
print(found[0].get("error", "trained"))
"""


def test_layers_of_transformer_engine_train():
    """bf16: torch's ``rms_norm`` stays on the device of its input."""
    words = [sys.executable, "-W", "ignore", "-c", RUN]
    # Megatron writes its choice of attention there, and refuses another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1:] == ["trained"], done.stdout + done.stderr
