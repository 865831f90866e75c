"""Automatic batches until memory is full: ``python -m benchmarks.gpu.auto_batch --json OUT``.

Two ranks that share a GPU search for the largest pass that fits.  A limit on the allocations of each rank makes CUDA's
allocator refuse within seconds, and the search continues below.  It must end with times of several sizes on every
rank and log its progress, and the training that follows must have the losses of one process.

"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.cases import Case, CaseError, Setting, command, run_part
from megatron_het.safe_io import read_json
from megatron_het.store import free_port
from testing.cases import platform_words
from testing.compare import BOUNDS, relative, reported_losses

_RANKS, _ITERATIONS = 2, 3


@dataclass(frozen=True)
class Size:
    """Dimensions of the model, and bytes that a rank may allocate: a few sequences fit beside the optimizer's state."""

    hidden: int
    heads: int
    tokens: int
    vocabulary: int
    batch: int
    limit_bytes: int


LARGE = Size(1024, 16, 2048, 32000, 64, 8 << 30)
SMALL = Size(64, 4, 64, 255, 24, 9_000_000)


def flags(size: Size, is_cuda: bool) -> list[str]:
    """Returns Megatron's flags without a plan and without the size of microbatches."""
    text = f"""
        --num-layers 4 --hidden-size {size.hidden} --num-attention-heads {size.heads} --seq-length {size.tokens}
        --max-position-embeddings {size.tokens} --untie-embeddings-and-output-weights --position-embedding-type rope
        --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {size.vocabulary} --mock-data --split 100,0,0
        --global-batch-size {size.batch} --train-iters {_ITERATIONS} --lr 1e-4 --eval-iters 0 --eval-interval 100
        --log-interval 1 --distributed-timeout-minutes 1
        """
    words = text.split() + ["--bf16"] * is_cuda
    return words + platform_words(is_cuda=is_cuda)


def search(setting: Setting) -> dict[str, Any]:
    """Returns the curves, and the difference of the losses from those of one process."""
    is_cuda = setting.device == "cuda"
    size = LARGE if is_cuda else SMALL
    own = flags(size, is_cuda)
    searching = [*own, "--het-auto-batch", str(setting.folder)]
    limit = {"HET_MEMORY_LIMIT_BYTES": str(size.limit_bytes)}
    alone = [*own, "--het-schedule", "1f1b", "--micro-batch-size", "1", "--calculate-per-token-loss"]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(_run, setting, "searched", _RANKS, searching, limit),
            pool.submit(_run, setting, "alone", 1, alone, {}),
        ]
    text, _ = [run.result() for run in runs]
    found = read_json(setting.folder / "auto_batch" / "measured.json")
    curves = [curve["sizes"] for curve in found["curves"]]
    full = [line for line in text.splitlines() if "does not fit" in line]
    most = size.batch - _RANKS + 1
    if len(curves) != _RANKS or not all(len(sizes) > 1 and max(sizes) < most for sizes in curves):
        raise CaseError(f"the search did not come to the limit of memory: sizes {curves} of at most {most}")
    if not full or (is_cuda and not all("out of memory" in line for line in full)):
        raise CaseError("\n".join(["nothing says that memory was full", *text.splitlines()[-10:]]))
    found_losses, expected = (list(reported_losses(setting.folder / name).values()) for name in ("searched", "alone"))
    apart = relative(found_losses, expected, "losses")
    bound = BOUNDS[setting.device]["bf16" if is_cuda else "fp32"]["loss"]
    result = {"zero": found["zero"], "curves": found["curves"], "passes": found["passes"], "full": full}
    if not apart <= bound:
        raise CaseError(f"losses are {apart:.1e} from those of one process (bound {bound:g}): {result}")
    return result | {"loss_difference": apart, "measured_in_s": found["measured_in_s"]}


def _run(setting: Setting, name: str, ranks: int, words: Sequence[str], more: Mapping[str, str]) -> str:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
    launch += ["--master-port", str(free_port()), "-m", "megatron_het.pretrain_gpt", *words]
    launch += ["--het-report", str(setting.folder / name)]
    log = setting.folder / f"{name}.log"
    return command([sys.executable, *launch], log, setting.left_s(110.0), setting.environment() | dict(more))


def cases(setting: Setting, _options: argparse.Namespace) -> Mapping[str, Case]:
    """Returns the one case."""
    return {"two ranks": partial(search, setting)}


if __name__ == "__main__":
    raise SystemExit(run_part("benchmarks.gpu.auto_batch", __doc__, cases))
