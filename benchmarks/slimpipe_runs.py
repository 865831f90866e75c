"""One run of a small Llama model, stock or sliced, with a probe in it: shared by two benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cases import machine_flags
from testing.runner import Job, Runner, words


@dataclass(frozen=True)
class Model:
    """A Llama-like model for measurements; the vocabulary is small because logits are not the point."""

    layers: int = 8
    hidden: int = 128
    ffn: int = 352
    heads: int = 8
    groups: int = 1
    vocabulary: int = 63

    def flags(self) -> tuple[str, ...]:
        """Megatron's flags for it."""
        return words(
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn} "
            f"--num-attention-heads {self.heads} --group-query-attention "
            f"--num-query-groups {self.groups} --normalization RMSNorm --swiglu "
            "--position-embedding-type rope --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
            f"--tokenizer-type NullTokenizer --vocab-size {self.vocabulary} "
            "--make-vocab-size-divisible-by 32 --mock-data --split 100,0,0 "
            "--no-create-attention-mask-in-dataloader"
        )


@dataclass(frozen=True)
class Setting:
    """Holds what a run does.

    Attributes:
        schedule: ``stock`` for unmodified Megatron (1F1B, interleaved with several chunks), else the
            value of ``--het-schedule``.
        stages: Pipeline stages, one rank each.
        seq_length: Tokens per sequence.
        microbatches: Per iteration, of one sequence each.
        slices: Slices per sequence.
        chunks: Chunks per stage.
        flags: More ``--het-*`` flags.
    """

    schedule: str
    stages: int
    seq_length: int
    microbatches: int
    slices: int = 1
    chunks: int = 1
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique, for folders."""
        return (
            f"{self.schedule}-p{self.stages}-s{self.seq_length}-m{self.microbatches}"
            f"-n{self.slices}-v{self.chunks}{''.join(self.flags).replace('--', '-')}"
        )


def job(
    setting: Setting,
    model: Model,
    folder: Path,
    *,
    iterations: int,
    memory: bool,
    more: tuple[str, ...] = (),
    timeout_s: float = 900.0,
) -> Job:
    """The run of a setting; its ranks write ``watch-<rank>.json`` into ``folder``."""
    s = setting
    flags = [
        *model.flags(),
        *machine_flags(),
        *words(
            f"--seq-length {s.seq_length} --max-position-embeddings {s.seq_length} "
            f"--micro-batch-size 1 --global-batch-size {s.microbatches} --calculate-per-token-loss "
            f"--train-iters {iterations} --lr 1e-4 --eval-iters 0 --eval-interval 1000 "
            f"--log-interval 1 --pipeline-model-parallel-size {s.stages} "
            "--distributed-timeout-minutes 10 --seed 1"
        ),
    ]
    if s.chunks > 1:
        per_chunk = model.layers // (s.stages * s.chunks)
        flags += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    if s.schedule != "stock":
        flags += ["--het-schedule", s.schedule]
        flags += ["--het-slices", str(s.slices)] if s.schedule == "slimpipe" else []
        flags += s.flags
    watch = {"out": str(folder), "memory": memory, "fused": s.schedule != "slimpipe"}
    return Job(s.name, s.stages, (*flags, *more), folder, setup=("testing.watches:watch", watch), timeout_s=timeout_s)


def run(runner: Runner, setting: Setting, model: Model, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a setting and return what each rank's probe found."""
    target = folder / setting.name
    target.mkdir(parents=True, exist_ok=True)
    runner.run(job(setting, model, target, **options))
    return [json.loads((target / f"watch-{rank}.json").read_text(encoding="utf-8")) for rank in range(setting.stages)]
