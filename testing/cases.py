"""Small models under many plans: the cases of the parity benchmark and of the functional tests.

A case is a plan and a few options.  Its reference is stock Megatron in one process, started from the
same checkpoint; mathematically equal cases share a reference.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from testing.families import ALL_FAMILIES, FAMILIES, MODELS, has_latent_attention, hybrid_pattern, small_flags
from testing.runner import Device, words

# Pairwise (all-pairs) selection of test cases: every two values that can occur together do.


Row = dict[str, Any]


def row_of(text: str, **more: Any) -> Row:
    """Returns a row of a table of cases.

    Args:
        text: ``name=value`` or ``name`` for True, with spaces between; values are numbers or words.
        more: Other values.
    """
    given = (word.partition("=") for word in text.split())
    found = {name: (_number(value) if equals else True) for name, equals, value in given}
    return found | more


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """All pairs of (parameter, value) in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(
    parameters: Mapping[str, Sequence[Any]], is_valid: Callable[[Row], bool], rng: random.Random, *, tries: int = 400
) -> tuple[list[Row], set[Pair]]:
    """Greedily choose rows until all pairs are covered.

    Args:
        parameters: Values of each parameter.
        is_valid: Whether a complete row can be run.
        rng: Random generator.
        tries: Random rows that are tried for a pair before it counts as impossible.

    Returns:
        The rows, and the pairs without a valid row.
    """
    names = list(parameters)
    uncovered = {
        frozenset(((a, va), (b, vb)))
        for a, b in itertools.combinations(names, 2)
        for va in parameters[a]
        for vb in parameters[b]
    }
    rows: list[Row] = []
    impossible: set[Pair] = set()
    while uncovered:
        wanted = min(uncovered, key=lambda pair: sorted(map(repr, pair)))
        candidates: list[Row] = []
        for _ in range(tries):
            row = {name: rng.choice(parameters[name]) for name in names} | dict(wanted)
            if is_valid(row):
                candidates.append(row)
                if len(candidates) == 30:
                    break
        if not candidates:
            impossible.add(wanted)
            uncovered.discard(wanted)
            continue
        best = max(candidates, key=lambda row: len(pairs_of(row) & uncovered))
        rows.append(best)
        uncovered -= pairs_of(best)
    return rows, impossible


LAYERS, HIDDEN, HEADS, GROUPS, FFN, SEQUENCE, VOCABULARY = 5, 64, 8, 4, 96, 32, 250
MICROBATCHES, STEPS, MAX_RANKS = 6, 10, 8
_FP16_SCALE = 256
_LEARNING_FLAGS = words(
    f"""
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32
    """
)
_SHAPE_FLAGS = words(
    f"""
    --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
    --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS}
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
    """
)
MODEL_FLAGS = (*_SHAPE_FLAGS, *_LEARNING_FLAGS)
TRAINING_FLAGS = words(
    f"""
    --micro-batch-size 1 --global-batch-size {MICROBATCHES} --calculate-per-token-loss
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --eod-mask-loss --split 80,20,0
    --log-interval 1 --eval-iters 1 --ckpt-format torch_dist --distributed-timeout-minutes 1
    --dist-ckpt-optim-fully-reshardable --exit-on-missing-checkpoint --seed 1234
    """
)


def plain_flags(model: Any, vocabulary: int, microbatches: int, iterations: int) -> tuple[str, ...]:
    """Megatron's flags of a Llama-like model on random tokens, in microbatches of one sequence, without evaluations.

    Args:
        model: Has the names of a :class:`ModelShape`.
        vocabulary: Size of its tokenizer's vocabulary.
        microbatches: Number per iteration.
    """
    ffn = "" if model.ffn_hidden_size is None else f"--ffn-hidden-size {model.ffn_hidden_size}"
    return words(
        f"""
        --num-layers {model.num_layers} --hidden-size {model.hidden_size} {ffn}
        --num-attention-heads {model.num_attention_heads}
        --seq-length {model.seq_length} --max-position-embeddings {model.seq_length} --normalization RMSNorm --swiglu
        --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
        --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size {vocabulary} --mock-data
        --micro-batch-size 1 --global-batch-size {microbatches} --calculate-per-token-loss
        --train-iters {iterations} --eval-iters 0 --eval-interval 1000 --log-interval 1
        """
    )


def platform_words(*, is_cuda: bool) -> list[str]:
    """Returns the options of Megatron that a training on a device needs, as words of a command line."""
    from megatron_het.device import platform_flags

    return [word for flag in platform_flags(is_cuda=is_cuda) for word in flag.words]


def machine_flags(device: Device = "cpu", *, has_te: bool = False) -> tuple[str, ...]:
    """The flags that Megatron needs on a device."""
    if device == "cpu":
        return (*platform_words(is_cuda=False), "--attention-backend", "unfused")
    if has_te:
        return ("--transformer-impl", "transformer_engine")
    return ("--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion")


@dataclass(frozen=True)
class Weights:
    """Key of a checkpoint: the fields on which a model's initial weights depend."""

    precision: str = "fp32"
    tied: bool = False
    layers: int = LAYERS
    family: str = "llama"

    def __str__(self) -> str:
        return f"{self.precision}-{'tied' if self.tied else 'untied'}-{self.layers}-{self.family}"


def with_replicas(plan: Plan, change: Callable[[int, int, Replica], Replica]) -> Plan:
    """Returns the plan with every replica changed; ``change`` gets the numbers of its stage and of itself, too."""
    stages = [
        replace(stage, replicas=tuple(change(s, q, replica) for q, replica in enumerate(stage.replicas)))
        for s, stage in enumerate(plan.stages)
    ]
    return replace(plan, stages=tuple(stages))


def recompute_some(plan: Plan) -> Plan:
    """Returns a plan with full recomputation in which every second stage recomputes only some layers of its chunks."""
    stages = list(plan.stages)
    for s in range(0, len(stages) if plan.training.recompute == "full" else 0, 2):
        again = tuple((s + c + 1) % (n + 1) for c, n in enumerate(stages[s].layers))
        stages[s] = replace(stages[s], replicas=tuple(replace(r, recompute_layers=again) for r in stages[s].replicas))
    return replace(plan, stages=tuple(stages))


@dataclass(frozen=True)
class Case:
    """A plan and how to train under it."""

    name: str  # unique within a run
    plan: Plan  # what the ranks do
    transport: str = "gloo"  # ``--het-transport``
    by_samples: bool = False  # whether training is given in samples instead of iterations
    clip: float = 1.0  # bound on the gradient norm, 0 for none
    overlap: bool = False  # ``--overlap-grad-reduce``
    chosen: Row = field(default_factory=dict)  # the values that led to this plan, for the record
    family: str = "llama"  # key of ``ALL_FAMILIES``, or one of ``MODELS``
    extra: tuple[str, ...] = ()  # more flags, of the case and its reference alike
    own: tuple[str, ...] = ()  # more flags of the run under the plan only

    @property
    def weights(self) -> Weights:
        """Key of the initial weights: cases with equal keys start from one checkpoint."""
        model = self.plan.model
        return Weights(self.plan.training.precision, model.tied_embeddings, model.num_layers, self.family)

    @property
    def reference(self) -> tuple[Weights, float, tuple[str, ...]]:
        """Key of the reference: cases with equal keys must give the same training."""
        return self.weights, self.clip, self.extra

    def plan_flags(self, device: Device = "cpu") -> tuple[str, ...]:
        """Flags of the run under the plan only, not of its reference.

        Args:
            device: Device of the ranks; GPUs use NCCL where a CPU uses gloo.
        """
        transport = "nccl" if device == "cuda" and self.transport == "gloo" else self.transport
        flags = ["--het-transport", transport, *self.own]
        if self.overlap:
            flags.append("--overlap-grad-reduce")
        if self.plan.training.precision == "fp16":  # a plan divides losses by about the tokens of a batch
            flags += ["--initial-loss-scale", str(_FP16_SCALE * self.plan.loss_divisor)]
        return tuple(flags)


def model_flags(weights: Weights) -> tuple[str, ...]:
    """Architecture and sizes, without the number of layers and ties."""
    if weights.family in MODELS:
        return (*small_flags(weights.family, weights.layers), *_LEARNING_FLAGS)
    pattern, rest = hybrid_pattern(weights.family, weights.layers), str(weights.layers - 1)
    family = (w.replace("{rest}", rest).replace("{pattern}", pattern) for w in ALL_FAMILIES[weights.family])
    grouped = ("--group-query-attention", "--num-query-groups", str(GROUPS))
    shape = [w for w in MODEL_FLAGS if not has_latent_attention(weights.family) or w not in grouped]
    return (*shape, *family)


def common_flags(
    weights: Weights,
    clip: float = 1.0,
    extra: tuple[str, ...] = (),
    *,
    by_samples: bool = False,
    steps: int = STEPS,
    device: Device = "cpu",
    has_te: bool = False,
) -> tuple[str, ...]:
    """Everything but data, checkpoints and the plan."""
    machine = machine_flags(device, has_te=has_te)
    model = list(model_flags(weights))
    if has_te and "--spec" in model:  # of layers for machines without Transformer Engine
        del model[(first := model.index("--spec")) : first + 3]
    flags = [*model, *TRAINING_FLAGS, *machine, "--clip-grad", str(clip)]
    flags += ["--num-layers", str(weights.layers)]
    flags += [] if weights.tied else ["--untie-embeddings-and-output-weights"]
    flags += [] if weights.precision == "fp32" else [f"--{weights.precision}"]
    # Losses are sums over tokens: with 4096 gradients overflow at the first step in one process already, with the
    # default for more steps than a run has.
    flags += ["--initial-loss-scale", str(_FP16_SCALE)] if weights.precision == "fp16" else []
    flags += ["--eval-interval", str(steps // 2)]
    if by_samples:
        flags += ["--train-samples", str(steps * MICROBATCHES)]
    else:
        flags += ["--train-iters", str(steps)]
    return (*flags, *extra)


# Lion takes the sign of a momentum: where that is zero but for rounding, an element goes the other way by twice the
# learning rate.  With the smaller steps that Lion wants in any case this does not show.
SMALL_STEPS = words("--lr 1e-5 --min-lr 1e-6")
# Products in bf16, the default, would round by more than the bar; blocks of matrices would depend on TP.
MUON_FLAGS = words("--optimizer muon --muon-tp-mode duplicated --muon-fp32-matmul-prec high")
# More flags of a run: (of the reference too, of the run under the plan only).
MORE_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "sgd": (words("--optimizer sgd"), ()),
    "lion": ((*words("--optimizer lion"), *SMALL_STEPS), ()),
    "muon": (MUON_FLAGS, ()),
    "no rerun checks": ((), words("--rerun-mode disabled")),
    "spike checks": ((), words("--check-for-spiky-loss --rerun-mode validate_results")),
    "gathered late": ((), words("--overlap-param-gather")),
}
OF_MATRICES = ("lion", "muon")  # flags of optimizers that need a package of their own
PARAMETERS: dict[str, Sequence[Any]] = {
    "stages": (1, 2, 3, 4),
    "layers": ("even", "uneven"),
    "replicas": ("one", "two", "by stage"),
    "tp": (1, 2, 4, "by stage", "within a stage"),
    "sequence_parallel": (False, True),
    "routing": ("even", "uneven"),
    "tied": (False, True),
    "recompute": ("none", "selective", "full"),
    "distributed_optimizer": (False, True),
    "overlap": (False, True),
    "clip": (1.0, 0.05),
    "by_samples": (False, True),
    "transport": ("gloo", "staged"),
    # More values here would change the case of every recorded seed: feature_cases.py draws those that are left out.
    "family": tuple(name for name in FAMILIES if name != "layernorm-1p"),
    "flags": tuple(name for name in MORE_FLAGS if name not in OF_MATRICES),
}


def tp_sizes(row: Row) -> list[list[int]] | None:
    """Returns the TP size of every replica of every stage, or None for an impossible row."""
    stages, tp = row["stages"], row["tp"]
    counts = {
        "one": [1] * stages,
        "two": [2] * stages,
        "by stage": [3] if stages == 1 else [(1, 2, 1, 2)[s] for s in range(stages)],
    }[row["replicas"]]
    if isinstance(tp, int):
        sizes = [[tp] * n for n in counts]
    elif tp == "by stage":
        if stages == 1:
            return None
        sizes = [[(2, 1, 1, 2)[s]] * n for s, n in enumerate(counts)]
        if sum(map(sum, sizes)) <= MAX_RANKS - 2 and stages < 4:
            sizes[-1] = [4] * counts[-1] if counts[-1] == 1 else sizes[-1]
    else:
        mixed = next((s for s in reversed(range(stages)) if counts[s] > 1), None)
        if mixed is None:
            return None
        sizes = [[1] * n for n in counts]
        sizes[mixed][0] = 2
        if sum(map(sum, sizes)) + 2 <= MAX_RANKS:
            sizes[mixed][1 if stages % 2 else 0] = 4
    return sizes if sum(map(sum, sizes)) <= MAX_RANKS else None


def is_valid(row: Row) -> bool:
    """Whether a row describes a plan that may run."""
    if tp_sizes(row) is None or (row["routing"] == "uneven" and row["replicas"] == "one"):
        return False
    return flags_fit(row)


def flags_fit(row: Row) -> bool:
    """Whether a row's flags can be combined with the rest of the row."""
    if row["flags"] in ("sgd", "muon"):
        return not row["distributed_optimizer"]
    return row["flags"] != "gathered late" or (row["distributed_optimizer"] and row["overlap"])


def split_layers(stages: int, even: bool, rng: random.Random, layers: int = LAYERS) -> list[int]:
    """Layers per stage, at least one each."""
    if even:
        return [(s + 1) * layers // stages - s * layers // stages for s in range(stages)]
    while True:
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        found = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        if stages == 1 or len(set(found)) > 1:
            return found


def route(replicas: int, even: bool, rng: random.Random) -> list[tuple[int, ...]]:
    """Microbatch ids per replica, at least one each."""
    if even:
        return [tuple(range(q, MICROBATCHES, replicas)) for q in range(replicas)]
    while True:
        owners = [rng.randrange(replicas) for _ in range(MICROBATCHES)]
        counts = [owners.count(q) for q in range(replicas)]
        if min(counts) > 0 and (replicas == 1 or len(set(counts)) > 1):
            return [tuple(m for m in range(MICROBATCHES) if owners[m] == q) for q in range(replicas)]


def _crosses(sizes: list[list[int]], order: Sequence[int]) -> bool:
    """Whether ranks in this order give a stage replicas of equal TP that no order fits."""
    left = iter(order)
    for stage in sizes:
        replicas = [sorted(next(left) for _ in range(tp)) for tp in stage]
        for i, a in enumerate(replicas):
            for b in replicas[:i]:
                if len(a) == len(b) and len({x < y for x, y in zip(a, b, strict=True)}) > 1:
                    return True
    return False


def build_plan(
    sizes: list[list[int]],
    layers: Sequence[int],
    rng: random.Random,
    *,
    even_routing: bool = True,
    shuffle_ranks: bool = False,
    tied: bool = False,
    **training: Any,
) -> Plan:
    """A plan from the TP sizes of its replicas.

    Args:
        sizes: ``sizes[s][q]``: TP size of replica q of stage s.
        layers: Layers per stage.
        rng: For routing and ranks.
        even_routing: Whether replicas get equal numbers of microbatches.
        shuffle_ranks: Scatter ranks over the stages, as far as plans allow it.
        tied: Tied embeddings.
        **training: Further fields of TrainingShape.
    """
    order = list(range(sum(map(sum, sizes))))
    while shuffle_ranks:
        middle = order[1:-1]
        rng.shuffle(middle)
        order[1:-1] = middle
        if not _crosses(sizes, order):
            break
    stages = []
    for stage_sizes, count in zip(sizes, layers, strict=True):
        routed = route(len(stage_sizes), even_routing, rng)
        busiest = max(map(len, routed))
        replicas = []
        for tp, microbatches in zip(stage_sizes, routed, strict=True):
            ranks, order = tuple(sorted(order[:tp])), order[tp:]
            replicas.append(Replica(ranks, microbatches, speed=len(microbatches) / busiest))
        stages.append(Stage((count,), tuple(replicas)))
    model = ModelShape(sum(layers), HIDDEN, HEADS, GROUPS, SEQUENCE, FFN, None, tied)
    return Plan(model, TrainingShape(1, MICROBATCHES, **training), tuple(stages))


_OF_A_PLAN = ("tied", "sequence_parallel", "recompute", "distributed_optimizer")


def case_from_row(row: Row, name: str, rng: random.Random, precision: str = "fp32") -> Case:
    """The case that a row of ``PARAMETERS`` describes."""
    sizes = tp_sizes(row)
    assert sizes is not None
    plan = build_plan(
        sizes,
        split_layers(row["stages"], row["layers"] == "even", rng),
        rng,
        even_routing=row["routing"] == "even",
        precision=precision,
        **{name: row[name] for name in _OF_A_PLAN},
    )
    return _case(name, plan, row)


def _case(name: str, plan: Plan, row: Row) -> Case:
    """The case of a plan with the rest of a row."""
    extra, own = MORE_FLAGS[row["flags"]]
    return Case(
        name,
        plan,
        row["transport"],
        row["by_samples"],
        row["clip"],
        row["overlap"],
        {"precision": plan.training.precision, **row},
        row["family"],
        extra,
        own,
    )


def random_case(name: str, rng: random.Random) -> Case:
    """Any plan of at most MAX_RANKS ranks, with ranks scattered over the stages."""
    while True:
        stages = rng.choice(PARAMETERS["stages"])
        sizes = [[rng.choice((1, 1, 1, 2, 2, 4)) for _ in range(rng.choice((1, 1, 2, 3)))] for _ in range(stages)]
        if 2 <= sum(map(sum, sizes)) <= MAX_RANKS:
            break
    row = {key: rng.choice(values) for key, values in PARAMETERS.items()}
    row.update(stages=stages, replicas="random", tp=sizes, layers="random", routing="random")
    if not flags_fit(row):
        row.update(family="gpt", flags="none")
    plan = build_plan(
        sizes,
        split_layers(stages, even=False, rng=rng),
        rng,
        even_routing=False,
        shuffle_ranks=True,
        precision=rng.choice(("fp32", "fp32", "fp32", "bf16")),
        **{name: row[name] for name in _OF_A_PLAN},
    )
    return _case(name, plan, row)


def with_schedule[C: Case](case: C, name: str, chunks: int, parameters: dict[str, Any]) -> C:
    """Returns the case under another schedule, with as many layers in each chunk as the stage had."""
    stages = tuple(replace(s, layers=s.layers * chunks) for s in case.plan.stages)
    model = replace(case.plan.model, num_layers=case.plan.model.num_layers * chunks)
    plan = replace(case.plan, model=model, stages=stages, schedule=ScheduleSpec(name, parameters))
    return replace(case, plan=plan, name=f"{name}-{case.name}")
