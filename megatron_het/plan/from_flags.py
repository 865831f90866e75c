"""The even plan that Megatron's own layout flags describe, for runs without a plan file.

``--het-schedule`` without ``--het-plan`` takes the pipeline, tensor and data-parallel sizes from
the ordinary flags.  The plan that comes out is the one a person would write: equal layers, equal
replicas, ranks in Megatron's order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import (
    CHUNK,
    LATER,
    MODEL_SIZES,
    ModelShape,
    Plan,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
    problem_of,
    sizes_of,
    without_chunks,
)
from megatron_het.schedule.ir import path_of, placement_of

_CHUNK_FLAGS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_UNEVEN_FLAGS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--pipeline-model-parallel-layout",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def _parser() -> argparse.ArgumentParser:
    """The flags of Megatron that decide a layout, with Megatron's defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    other = (
        "micro_batch_size",
        "global_batch_size",
        "ffn_hidden_size",
        "num_query_groups",
        "expert_tensor_parallel_size",
    )
    for name in (*MODEL_SIZES, *other):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    for name in _CHUNK_FLAGS:
        parser.add_argument(name, type=int)
    for name in (
        "group-query-attention",
        "sequence-parallel",
        "use-distributed-optimizer",
        "bf16",
        "fp16",
        "recompute-activations",
        "untie-embeddings-and-output-weights",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--hybrid-layer-pattern")
    return parser


def _read_pattern(flags: argparse.Namespace) -> None:
    """A hybrid model's pattern says how many layers there are, whatever other flags do."""
    problem = problem_of(flags.hybrid_layer_pattern)
    if problem:
        raise PlanError("--hybrid-layer-pattern", flags.hybrid_layer_pattern, problem)
    vars(flags).update(sizes_of(flags.hybrid_layer_pattern))


def plan_from_flags(words: Sequence[str], world_size: int, schedule: ScheduleSpec) -> tuple[Plan, list[str]]:
    """The even plan for a command line.

    Args:
        words: Megatron's part of the command line.
        world_size: Number of ranks.
        schedule: The schedule to run.

    Returns:
        The plan (not yet checked), and the words without the flags that only the plan may say.

    Raises:
        PlanError: A flag is missing, or the sizes do not divide.
    """
    for flag in _UNEVEN_FLAGS:
        if any(word.split("=")[0] == flag for word in words):
            raise PlanError(flag, "given", "layers are divided evenly without a plan", "Write a plan")
    flags, _ = _parser().parse_known_args(list(words))
    if flags.hybrid_layer_pattern is not None:
        _read_pattern(flags)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(flags, name) is None:
            raise PlanError("--" + name.replace("_", "-"), None, "required with --het-schedule")
    stages = _stages(flags, world_size, schedule.name)
    model = ModelShape(
        **{name: getattr(flags, name) or 0 for name in MODEL_SIZES},
        num_query_groups=(flags.num_query_groups or 1) if flags.group_query_attention else flags.num_attention_heads,
        ffn_hidden_size=flags.ffn_hidden_size,
        tied_embeddings=not flags.untie_embeddings_and_output_weights,
        pattern=without_chunks(flags.hybrid_layer_pattern or ""),
    )
    recompute = flags.recompute_granularity or ("selective" if flags.recompute_activations else "none")
    training = TrainingShape(
        flags.micro_batch_size,
        _global_batch_size(flags, world_size),
        "bf16" if flags.bf16 else "fp16" if flags.fp16 else "fp32",
        flags.sequence_parallel,
        recompute,
        flags.use_distributed_optimizer,
    )
    return Plan(model, training, stages, schedule), _without_chunk_flags(words)


def _global_batch_size(flags: argparse.Namespace, world_size: int) -> int:
    replicas = world_size // (_replica_size(flags) * flags.pipeline_model_parallel_size)
    size = flags.global_batch_size or flags.micro_batch_size * replicas
    if size % (flags.micro_batch_size * replicas):
        raise PlanError(
            "--global-batch-size",
            size,
            f"is not a multiple of micro batch size {flags.micro_batch_size} x {replicas} replicas",
        )
    return size


def _replica_size(flags: argparse.Namespace) -> int:
    """Ranks of one replica of a stage."""
    return flags.tensor_model_parallel_size * flags.context_parallel_size


def _stages(flags: argparse.Namespace, world_size: int, schedule: str) -> tuple[Stage, ...]:
    size, pp = _replica_size(flags), flags.pipeline_model_parallel_size
    if world_size % (size * pp):
        tp, cp = flags.tensor_model_parallel_size, flags.context_parallel_size
        named = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        raise PlanError("WORLD_SIZE", world_size, f"is not a multiple of {named} parallel size")
    replicas = world_size // (size * pp)
    microbatches = _global_batch_size(flags, world_size) // flags.micro_batch_size
    layers = _piped_layers(flags, pp, schedule) or [_layers(flags, pp)] * pp
    stages = []
    for s in range(pp):
        first = s * replicas * size
        stages.append(
            Stage(
                layers[s],
                tuple(
                    Replica(
                        tuple(range(first + q * size, first + (q + 1) * size)),
                        tuple(range(q, microbatches, replicas)),
                        cp=flags.context_parallel_size,
                        ep=flags.expert_model_parallel_size,
                        etp=flags.expert_tensor_parallel_size or 0,
                    )
                    for q in range(replicas)
                ),
            )
        )
    return tuple(stages)


def _piped_layers(flags: argparse.Namespace, pp: int, schedule: str) -> list[tuple[int, ...]]:
    """Layers of each chunk of every stage, where a pattern says where they begin; empty otherwise."""
    chunks = (flags.hybrid_layer_pattern or "").split(LATER)[0].split(CHUNK)
    if len(chunks) == 1:
        return []
    if len(chunks) % pp:
        raise PlanError(
            "--hybrid-layer-pattern",
            flags.hybrid_layer_pattern,
            f"its {len(chunks)} chunks do not divide over {pp} stages",
            f"Give a multiple of {pp} chunks, or leave {CHUNK} out",
        )
    path = path_of([len(chunks) // pp] * pp, placement_of(schedule))
    sizes = {place: len(chunk) for place, chunk in zip(path, chunks, strict=True)}
    return [tuple(sizes[s, c] for c in range(len(chunks) // pp)) for s in range(pp)]


def _layers(flags: argparse.Namespace, pp: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage."""
    per_chunk = flags.num_layers_per_virtual_pipeline_stage
    chunks = flags.num_virtual_stages_per_pipeline_rank or 1
    if per_chunk is not None:
        flag, value, pieces = _CHUNK_FLAGS[0], per_chunk, pp * per_chunk
        chunks = flags.num_layers // (pp * per_chunk) if per_chunk > 0 else 0
    else:
        flag, value, pieces = _CHUNK_FLAGS[1], chunks, pp * chunks
    if pieces < 1 or chunks < 1 or flags.num_layers % pieces:
        raise PlanError(
            flag,
            value,
            f"{flags.num_layers} layers do not divide evenly over {pp} stages",
            "Choose sizes that divide, or write a plan",
        )
    return (flags.num_layers // (pp * chunks),) * chunks


def _without_chunk_flags(words: Sequence[str]) -> list[str]:
    """Chunks are in the plan, and Megatron takes them from the plan's layout."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in _CHUNK_FLAGS:
            skip = True
        elif word.split("=")[0] not in _CHUNK_FLAGS:
            kept.append(word)
    return kept
