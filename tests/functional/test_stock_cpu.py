"""Stock Megatron on CPU over gloo: trains, saves, and resumes in other layouts to equal losses.

No feature of this project takes part but the platform and the patches that stock Megatron needs.
"""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_het import device as platform
from testing.runner import Job, Runner
from tests.functional.launch import launch

ENTRY = ("-m", "megatron_het.pretrain_gpt")
ITERATIONS = 8
SAVED_AT = 4
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 90,10,0"
)
TRAINING = f"""
    --micro-batch-size 1 --global-batch-size 4 --train-iters {ITERATIONS} --lr 1e-3 --log-interval 1
    --eval-interval {ITERATIONS} --eval-iters 2 --distributed-timeout-minutes 2
    --use-distributed-optimizer
""".split()
FULLY_RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]

_STEP = re.compile(r" iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")
_EVALUATION = re.compile(rf"validation loss at iteration {ITERATIONS}\b.*lm loss value: (\S+)")

pytestmark = pytest.mark.skipif(
    platform.activate().is_cuda, reason="tests the CPU support, which CUDA machines do not use"
)


@dataclass(frozen=True)
class Losses:
    """What one run logged."""

    losses: dict[int, float]  # by iteration
    gradient_norms: dict[int, float]  # by iteration
    evaluations: tuple[float, ...]  # after the last iteration, on the validation and on the test set


def read_log(text: str) -> Losses:
    steps = [(int(i), float(loss), float(norm)) for i, loss, norm in _STEP.findall(text)]
    losses, norms = {i: loss for i, loss, _ in steps}, {i: norm for i, _, norm in steps}
    return Losses(losses, norms, tuple(map(float, _EVALUATION.findall(text))))


Run = Callable[..., Losses]


@pytest.fixture(scope="module")
def run(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(world_size: int, name: str, flags: Sequence[str]) -> Losses:
        argv = (*MODEL, *TRAINING, *platform.activate().default_flags(), *flags)
        folder = tmp_path_factory.mktemp(name)
        if name == "whole":  # starts as a user does; forks of one process go on
            return read_log(launch(1, [*ENTRY, *argv], folder / "log.txt", timeout_s=400))
        return read_log(runner.run(Job(name, world_size, argv, folder, timeout_s=400)).log())

    return run


@dataclass(frozen=True)
class Saved:
    """A run from start to end and the folder of its checkpoints."""

    whole: Losses
    checkpoints: Path

    @property
    def load_flags(self) -> list[str]:
        words = f"--load {self.checkpoints} --ckpt-step {SAVED_AT} --exit-on-missing-checkpoint"
        return words.split()


def _save(run: Run, folder: Path, flags: Sequence[str]) -> Saved:
    saving = f"--save {folder} --save-interval {SAVED_AT} --ckpt-format torch_dist".split()
    return Saved(run(1, "whole", [*saving, *flags]), folder)


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _save(run, tmp_path_factory.mktemp("reshardable"), FULLY_RESHARDABLE)


def assert_resumed(resumed: Losses, whole: Losses, tolerance: float) -> None:
    """The resumed iterations log what the whole run logged there.

    Megatron reports the mean of two iterations as the second loss of every run, so that one is
    left out; its gradient norm is compared, which a wrong first update changes.
    """
    assert sorted(resumed.losses) == list(range(SAVED_AT + 1, ITERATIONS + 1))
    for iteration, loss in resumed.losses.items():
        if iteration != SAVED_AT + 2:
            assert math.isclose(loss, whole.losses[iteration], rel_tol=tolerance), iteration
        # Logged with three decimals.
        norm = whole.gradient_norms[iteration]
        assert abs(resumed.gradient_norms[iteration] - norm) < 2e-3, iteration
    assert resumed.evaluations == pytest.approx(whole.evaluations, rel=tolerance, abs=0.0)


def test_trains(saved: Saved):
    losses = saved.whole.losses
    assert sorted(losses) == list(range(1, ITERATIONS + 1))
    assert abs(losses[1] - math.log(128)) < 0.2
    assert losses[ITERATIONS] < losses[1] - 0.2
    # In the loop on the validation set, and at the end on both sets.
    assert len(saved.whole.evaluations) == 3
    assert all(abs(loss - math.log(128)) < 0.5 for loss in saved.whole.evaluations)
    assert (saved.checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)


def test_resumes_bit_for_bit(run: Run, saved: Saved):
    resumed = run(1, "resumed", [*saved.load_flags, *FULLY_RESHARDABLE])
    assert_resumed(resumed, saved.whole, tolerance=0.0)


def test_resumes_bit_for_bit_from_the_default_optimizer_format(run: Run, saved: Saved, tmp_path: Path):
    default = _save(run, tmp_path / "default", [])
    assert default.whole == saved.whole
    assert_resumed(run(1, "resumed", default.load_flags), default.whole, tolerance=0.0)


@pytest.mark.parametrize(
    "layout",
    [
        # The vocabulary is padded to a multiple of divisor x TP: to 128 entries, as with TP 1.
        "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64",
        "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 2",
    ],
    ids=["tp", "tp-sp", "pp", "dp"],
)
def test_resumes_in_another_layout_of_two_ranks(run: Run, saved: Saved, layout: str):
    flags = [*saved.load_flags, *FULLY_RESHARDABLE, *layout.split()]
    # What is logged has seven digits.
    assert_resumed(run(2, "layout", flags), saved.whole, tolerance=1e-6)
