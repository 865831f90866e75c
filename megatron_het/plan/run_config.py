"""The configuration of a run: the ``--het-*`` flags, plans that take turns, and the plan of a run without a file."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.plan import schema
from megatron_het.schedule.ir import path_of, placement_of


@dataclass(frozen=True, slots=True)
class HetConfig:
    """The ``--het-*`` flags, which launch reads and everything on a rank is given.

    Without a plan the extension is off; with ``auto_batch`` the plan is yet to be made.
    """

    plan: schema.Plan | None = None
    plan_path: str = ""
    transport: str = "auto"
    report_dir: Path | None = None
    trace_dir: Path | None = None
    trace_iteration: int = 3
    auto_batch: Path | None = None
    least_zero: int = 0
    measured_cp_shares: bool = False  # whether the plan gets its context-parallel parts from measurements at the start
    turns: tuple[
        schema.Plan, ...
    ] = ()  # all plans of the job, where several take turns, one for each global batch size
    turn_files: tuple[str, ...] = ()
    trust_checkpoint: bool = False
    """Whether the description of a checkpoint may name classes that are no part of its format."""

    def report_file(self, rank: int) -> Path | None:
        """Where a rank's report goes; None when none was asked for."""
        return self.report_dir / f"rank-{rank}.json" if self.report_dir else None

    def trace_file(self, rank: int) -> Path | None:
        """Where a rank's trace goes; None when none was asked for."""
        return self.trace_dir / f"trace-rank-{rank}.json" if self.trace_dir else None


# Plans that take turns in one job, one for each global batch size: what they must have in common.
#
# ``elastic/sessions.py`` changes from one to the next.


@contextlib.contextmanager
def errors_of(name: object, plans: Sequence[object]) -> Iterator[None]:
    """An error that has to do with one of several plans says with which; raises PlanError.

    Args:
        plans: All of them; an error of an only plan stays as it is.
    """
    try:
        yield
    except schema.PlanError as error:
        if len(plans) < 2 or error.value == name:
            raise
        raise schema.PlanError(f"{name}: {error.where}", error.value, error.problem, error.hint) from None


def check_turns(plans: Sequence[schema.Plan], files: Sequence[str]) -> None:
    """Plans that take turns are for one training, and differ in the global batch size; raises PlanError."""
    first, sizes = plans[0], dict[int, str]()
    for plan, file in zip(plans, files, strict=True):
        for name, value, wanted in (
            ("model", plan.model, first.model),
            ("number of ranks", plan.world_size, first.world_size),
            ("training.precision", plan.training.precision, first.training.precision),
            (
                "training.distributed_optimizer",
                plan.training.distributed_optimizer,
                first.training.distributed_optimizer,
            ),
        ):
            if value != wanted:
                raise schema.PlanError("--het-plan", file, f"its {name} is {value}, that of {files[0]} is {wanted}")
        size = plan.training.global_batch_size
        if size in sizes:
            hint = "Several plans take turns: give one for each global batch size"
            raise schema.PlanError("--het-plan", file, f"has the global batch size {size}, as {sizes[size]} has", hint)
        sizes[size] = file


def check_batch_schedule(plans: Sequence[schema.Plan], args: Any) -> None:
    """Compare Megatron's schedule of batch sizes with the plans of a job, of which each has one size; raises PlanError.

    Args:
        plans: All of them.
    """
    given, flag = getattr(args, "step_batch_size_schedule", None), "--step-batch-size-schedule"
    known = sorted({plan.training.global_batch_size for plan in plans})
    if not given:
        if len(plans) > 1:
            raise schema.PlanError(
                "--het-plan", f"{len(plans)} plans", f"plans take turns as {flag} says", f"Give {flag}"
            )
        return
    if phases := getattr(args, "phase_transition_iterations", None):
        problem = f"Megatron counts samples of phases by one batch size, and {flag} has several"
        raise schema.PlanError("--phase-transition-iterations", phases, problem, "Leave one of them out")
    sizes = [word.rpartition(":")[2] for word in given.split()]
    if unknown := [size for size in sizes if not size.isdecimal() or int(size) not in known]:
        raise schema.PlanError(
            flag,
            given,
            f"a plan routes a fixed number of microbatches, and none is for a global batch size of {unknown[0]}; there "
            f"are plans for {', '.join(map(str, known))}",
            "Give a plan for each size: --het-plan PLAN PLAN ...",
        )
    for name, what in (("use_precision_aware_optimizer", "main parameters"), ("fp8_param_gather", "weights")):
        if len(plans) > 1 and getattr(args, name, False):
            problem = f"its {what} are where a change of plan cannot move them"
            raise schema.PlanError(f"--{name.replace('_', '-')}", True, problem, "Leave it out, or keep one batch size")
    if not args.train_samples:
        problem = f"with {flag} Megatron counts learning rates by samples"
        hint = "Give --train-samples, and --lr-decay-samples and --lr-warmup-samples in place of iterations"
        raise schema.PlanError("--train-samples", args.train_samples, problem, hint)


# The even plan that Megatron's own layout flags describe, for runs without a plan file.
#
# ``--het-schedule`` without ``--het-plan`` takes the sizes from the ordinary flags.  The plan that comes out is the one
# a person would write: equal layers, equal replicas, ranks in Megatron's order.

_BY_PIPELINE = "use-tp-pp-dp-mapping"  # the ranks of one pipeline follow each other, in place of those of a stage
_CHUNK_FLAGS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
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
    other = "micro_batch_size global_batch_size ffn_hidden_size num_query_groups expert_tensor_parallel_size"
    for name in (*schema.MODEL_SIZES, *other.split()):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    for name in (*_CHUNK_FLAGS, _GROUP):
        parser.add_argument(name, type=int)
    for name in (
        "group-query-attention",
        "sequence-parallel",
        "use-distributed-optimizer",
        "bf16",
        "fp16",
        "recompute-activations",
        "untie-embeddings-and-output-weights",
        _BY_PIPELINE,
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--hybrid-layer-pattern")
    return parser


def _read_pattern(flags: argparse.Namespace) -> None:
    """A hybrid model's pattern says how many layers there are, whatever other flags do."""
    problem = schema.problem_of(flags.hybrid_layer_pattern)
    if problem:
        raise schema.PlanError("--hybrid-layer-pattern", flags.hybrid_layer_pattern, problem)
    vars(flags).update(schema.sizes_of(flags.hybrid_layer_pattern))


def plan_from_flags(
    words: Sequence[str], world_size: int, schedule: schema.ScheduleSpec
) -> tuple[schema.Plan, list[str]]:
    """The even plan for a command line.

    Args:
        schedule: The schedule to run.

    Returns:
        The plan (not yet checked), and the words without the flags that only the plan may say.

    Raises:
        PlanError: A flag is missing, or the sizes do not divide.
    """
    for flag in _UNEVEN_FLAGS:
        if any(word.split("=")[0] == flag for word in words):
            raise schema.PlanError(flag, "given", "layers are divided evenly without a plan", "Write a plan")
    flags, _ = _parser().parse_known_args(list(words))
    if flags.hybrid_layer_pattern is not None:
        _read_pattern(flags)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(flags, name) is None:
            raise schema.PlanError("--" + name.replace("_", "-"), None, "required with --het-schedule")
    stages = _stages(flags, world_size, schedule.name)
    model = schema.ModelShape(
        **{name: getattr(flags, name) or 0 for name in schema.MODEL_SIZES},
        num_query_groups=(flags.num_query_groups or 1) if flags.group_query_attention else flags.num_attention_heads,
        ffn_hidden_size=flags.ffn_hidden_size,
        tied_embeddings=not flags.untie_embeddings_and_output_weights,
        pattern=schema.without_chunks(flags.hybrid_layer_pattern or ""),
    )
    recompute = flags.recompute_granularity or ("selective" if flags.recompute_activations else "none")
    training = schema.TrainingShape(
        flags.micro_batch_size,
        _global_batch_size(flags, world_size),
        "bf16" if flags.bf16 else "fp16" if flags.fp16 else "fp32",
        flags.sequence_parallel,
        recompute,
        flags.use_distributed_optimizer,
    )
    group, is_interleaved = flags.microbatch_group_size_per_virtual_pipeline_stage, schedule.name == "interleaved"
    taken = (*_CHUNK_FLAGS, _GROUP) if is_interleaved else _CHUNK_FLAGS
    if is_interleaved and group is not None:
        schedule = replace(schedule, parameters={"group": group, **schedule.parameters})
    # Chunks are in the plan, and Megatron takes them from the plan's layout.
    left = [word for word in without_flags(words, *taken) if word != f"--{_BY_PIPELINE}"]
    return schema.Plan(model, training, stages, schedule), left


def _global_batch_size(flags: argparse.Namespace, world_size: int) -> int:
    replicas = world_size // (_replica_size(flags) * flags.pipeline_model_parallel_size)
    size = flags.global_batch_size or flags.micro_batch_size * replicas
    if size % (flags.micro_batch_size * replicas):
        problem = f"is not a multiple of micro batch size {flags.micro_batch_size} x {replicas} replicas"
        raise schema.PlanError("--global-batch-size", size, problem)
    return size


def _replica_size(flags: argparse.Namespace) -> int:
    """Ranks of one replica of a stage."""
    return flags.tensor_model_parallel_size * flags.context_parallel_size


def _stages(flags: argparse.Namespace, world_size: int, schedule: str) -> tuple[schema.Stage, ...]:
    size, pp = _replica_size(flags), flags.pipeline_model_parallel_size
    if world_size % (size * pp):
        tp, cp = flags.tensor_model_parallel_size, flags.context_parallel_size
        named = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        raise schema.PlanError("WORLD_SIZE", world_size, f"is not a multiple of {named} parallel size")
    replicas = world_size // (size * pp)
    microbatches = _global_batch_size(flags, world_size) // flags.micro_batch_size
    layers = _piped_layers(flags, pp, schedule) or [_layers(flags, pp)] * pp
    stages = []
    for s in range(pp):
        places = [q * pp + s if flags.use_tp_pp_dp_mapping else s * replicas + q for q in range(replicas)]
        stages.append(
            schema.Stage(
                layers[s],
                tuple(
                    schema.Replica(
                        tuple(range(place * size, (place + 1) * size)),
                        tuple(range(q, microbatches, replicas)),
                        cp=flags.context_parallel_size,
                        ep=flags.expert_model_parallel_size,
                        etp=flags.expert_tensor_parallel_size or 0,
                    )
                    for q, place in enumerate(places)
                ),
            )
        )
    return tuple(stages)


def _piped_layers(flags: argparse.Namespace, pp: int, schedule: str) -> list[tuple[int, ...]]:
    """Layers of each chunk of every stage, where a pattern says where they begin; empty otherwise."""
    chunks = (flags.hybrid_layer_pattern or "").split(schema.LATER)[0].split(schema.CHUNK)
    if len(chunks) == 1:
        return []
    if len(chunks) % pp:
        problem = f"its {len(chunks)} chunks do not divide over {pp} stages"
        hint = f"Give a multiple of {pp} chunks, or leave {schema.CHUNK} out"
        raise schema.PlanError("--hybrid-layer-pattern", flags.hybrid_layer_pattern, problem, hint)
    path = path_of([len(chunks) // pp] * pp, placement_of(schedule))
    sizes = {place: len(chunk) for place, chunk in zip(path, chunks, strict=True)}
    return [tuple(sizes[s, c] for c in range(len(chunks) // pp)) for s in range(pp)]


def _layers(flags: argparse.Namespace, pp: int) -> tuple[int, ...]:
    per_chunk = flags.num_layers_per_virtual_pipeline_stage
    chunks = flags.num_virtual_stages_per_pipeline_rank or 1
    if per_chunk is not None:
        flag, value, pieces = _CHUNK_FLAGS[0], per_chunk, pp * per_chunk
        chunks = flags.num_layers // (pp * per_chunk) if per_chunk > 0 else 0
    else:
        flag, value, pieces = _CHUNK_FLAGS[1], chunks, pp * chunks
    if pieces < 1 or chunks < 1 or flags.num_layers % pieces:
        problem = f"{flags.num_layers} layers do not divide evenly over {pp} stages"
        raise schema.PlanError(flag, value, problem, "Choose sizes that divide, or write a plan")
    return (flags.num_layers // (pp * chunks),) * chunks


def no_eval_interval(value: int | None) -> schema.PlanError:
    """The error of a training without ``--eval-interval``."""
    problem = "Megatron divides by it when it counts samples, also where nothing is evaluated"
    return schema.PlanError("--eval-interval", value, problem, "Give it; --eval-iters 0 evaluates nothing")


def without_flags(words: Sequence[str], *flags: str, several: bool = False) -> list[str]:
    """The words of a command line without some flags and their values: one of each, or all up to the next flag."""
    kept: list[str] = []
    left = 0  # values that are still to come
    for word in words:
        name, equals, _ = word.partition("=")
        if name in flags:
            left = len(words) if several else int(not equals)
        elif left and not (several and word.startswith("-")):
            left -= 1
        else:
            left = 0
            kept.append(word)
    return kept
