"""A checkpoint that cannot be written is one error of the system, and the process lives."""

import subprocess
import sys

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_het.runtime import training

# As Megatron's writer does: the error is put aside in the frame that its traceback holds.
SCRIPT = """
import gc, io, resource, signal, sys, tempfile
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from megatron_het.megatron_patches import torch_checkpoints

torch_checkpoints.guard_writes()
torch_checkpoints.guard_writes()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def write(file, items):
    try:
        with open(file, "wb") as stream:
            for item, data in items:
                _write_item(_StorageWriterTransforms(), stream, data, item, "x", SerializationFormat.TORCH_SAVE)
        found = None
    except Exception as error:
        found = error
    return found

kind, size = sys.argv[1], int(sys.argv[2])
gc.disable()
for limit in (100, 6000, 1 << 30):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    data = [io.BytesIO(b"x" * size) if kind == "BYTE_IO" else torch.zeros(size // 4) for _ in range(20)]
    items = [(WriteItem(MetadataIndex(str(i)), WriteItemType[kind]), one) for i, one in enumerate(data)]
    with tempfile.NamedTemporaryFile() as file:
        torch_checkpoints.forget_failed_writes()
        error = write(file.name, items)
        if limit < 1 << 30:
            assert isinstance(error, OSError) and "File too large" in str(error), repr(error)
            assert torch_checkpoints.failed_write().endswith(repr(file.name)), torch_checkpoints.failed_write()
        else:
            assert error is None and not torch_checkpoints.failed_write()
    del data, items, error
    gc.collect()
print("alive")
"""


@pytest.mark.parametrize(("kind", "size"), [("BYTE_IO", 400), ("BYTE_IO", 20_000), ("TENSOR", 400), ("TENSOR", 20_000)])
def test_the_systems_error_comes_and_the_process_lives(kind: str, size: int):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(size)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "alive" in done.stdout, (done.returncode, done.stderr[-2000:])


def test_a_write_that_failed_in_another_process_is_told_too():
    """In that of ``--async-save``, or on another rank."""
    failed, other = CheckpointException("write", {}), RuntimeError()
    for error in (failed, other):
        training._add_failed_write(error)
    assert "the checkpoint is not complete" in failed.__notes__[0] and not hasattr(other, "__notes__")
