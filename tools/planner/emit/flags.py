"""A plan as Megatron's own command-line flags, and as a stock layout when it needs no extension."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_het.families import LATENT_SPEC, pipeline_layout
from megatron_het.features import features_of
from megatron_het.features.base import flag_of
from megatron_het.features.documents.spec import BY_DATASET
from megatron_het.features.registry import layer_flags, packing_flags
from megatron_het.plan import Plan, plan_hash
from megatron_het.plan.validate import PARTS

from ..costs.schedules import STOCK
from ..inputs.files import comment, default_of
from ..inputs.model import Model
from ..inputs.model_parts import PART_ARGUMENTS, Experts, FlagValue, flag_words


@dataclass(frozen=True, slots=True)
class Turns:
    """Batch sizes and plans of a training whose global batch size changes."""

    batch_sizes: str  # Megatron's ``--step-batch-size-schedule``
    more: tuple[tuple[str, Plan], ...] = ()  # the plans of the other sizes, with their files

    @property
    def named(self) -> dict[str, Plan]:
        """The plans of the other sizes, by their names in the run's folder."""
        return named_plans(self.more)


def named_plans(more: Sequence[tuple[str, Plan]]) -> dict[str, Plan]:
    """Further plans by their names in the run's folder, where ``plan.json`` is the first."""
    return {f"plan-{i}.json": plan for i, (_, plan) in enumerate(more, 2)}


def model_arguments(plan: Plan, options: Model, extra: Collection[str] = ()) -> list[str]:
    """Returns the flags of the model: its shape, its parts, and further flags of the model file.

    Args:
        plan: Gives the model's shape.
        options: Properties of the model that a plan does not hold.
        extra: The user's further flags, which may define documents themselves.
    """
    model = plan.model
    found: dict[str, FlagValue] = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "seq-length": model.seq_length,
        "max-position-embeddings": options.learned_positions or model.seq_length,
        "normalization": "LayerNorm" if options.biases else "RMSNorm",
        "attention-dropout": 0,
        "hidden-dropout": 0,
    }
    if model.ffn_hidden_size is not None:
        found["ffn-hidden-size"] = model.ffn_hidden_size
    if model.num_query_groups != model.num_attention_heads:
        found |= {"group-query-attention": True, "num-query-groups": model.num_query_groups}
    if options.head_size is not None:
        found["kv-channels"] = options.head_size
    found["position-embedding-type"] = "learned_absolute" if options.learned_positions else "rope"
    found["swiglu"] = options.gated and "quick-geglu" not in options.flags
    found["disable-bias-linear"] = not options.biases
    found["untie-embeddings-and-output-weights"] = not model.tied_embeddings
    if model.pattern:  # it gives the number of layers and of later tokens
        del found["num-layers"]
        found["hybrid-layer-pattern"] = model.pattern
        found |= _size_flags("mamba", options.mamba) | _size_flags("delta_net", options.delta_net)
    found |= layer_flags(model)
    if options.fp8:  # every GPU with fp8 has this recipe
        found |= {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"}
    if options.document_lengths is not None and packing_flags().isdisjoint(extra):
        found[flag_of(BY_DATASET).removeprefix("--")] = True
    found |= _attention_flags(options)
    if options.experts is not None:
        found |= _expert_flags(options.experts, model.num_layers)
        # A softmax over one expert has no gradient.
        one = options.experts.top_k == 1 and "moe-router-score-function" not in options.flags
        found["moe-router-pre-softmax"] = one
    plain = options.latent is not None and not options.latent.query_rank and not model.pattern
    return flag_words(found | options.flags) + (["--spec", *LATENT_SPEC] if plain else [])


def _size_flags(part: str, sizes: Any) -> dict[str, FlagValue]:
    """Flags of the sizes of a part of the model, if it has the part; a size of 0 has no flag."""
    found = {name: getattr(sizes, size, 0) for size, (name, _) in PART_ARGUMENTS[part].items()}
    return {name.replace("_", "-"): value for name, value in found.items() if value}


def _attention_flags(options: Model) -> dict[str, FlagValue]:
    """Flags of sliding windows and latent attention."""
    found: dict[str, FlagValue] = {}
    if options.attention_window is not None:
        found["window-size"] = f"{options.attention_window - 1},0"  # Megatron does not count a token's own key
        if options.window_period:
            found["window-attn-skip-freq"] = options.window_period
    if options.latent is not None:
        found["multi-latent-attention"] = True
        if options.flags.get("rope-type") == "rope":
            found["no-rope-fusion"] = True  # Megatron's fused kernel of latent attention knows yarn only
    return found | _size_flags("latent", options.latent)


def _expert_flags(experts: Experts, num_layers: int) -> dict[str, FlagValue]:
    """Flags of the layers of experts; load balancing is set by the model file or the user."""
    found: dict[str, FlagValue] = {
        "num-experts": experts.count,
        "moe-router-topk": experts.top_k,
        "moe-ffn-hidden-size": experts.ffn_hidden_size,
        "moe-token-dispatcher-type": "alltoall",
    }
    if experts.shared_ffn_hidden_size:
        found["moe-shared-expert-intermediate-size"] = experts.shared_ffn_hidden_size
    if experts.dense_layers:
        found["moe-layer-freq"] = f"[0]*{experts.dense_layers}+[1]*{num_layers - experts.dense_layers}"
    return found


def common_arguments(plan: Plan) -> list[str]:
    """Flags that all plans of one training have in common; the other flags come from the current plan."""
    return [*_batch_and_precision(plan), "--dist-ckpt-optim-fully-reshardable"]


def _batch_and_precision(plan: Plan, batch_sizes: str = "") -> list[str]:
    training = plan.training
    size = ["--global-batch-size", str(training.global_batch_size)]
    # Any routing of microbatches gives the same training only with this.
    words = [*(["--step-batch-size-schedule", batch_sizes] if batch_sizes else size), "--calculate-per-token-loss"]
    return words + ([f"--{training.precision}"] if training.precision in ("bf16", "fp16") else [])


def plan_arguments(plan: Plan, batch_sizes: str = "") -> list[str]:
    """Flags of batch, precision, recompute and optimizer that the plan fixes.

    Args:
        plan: The plan, or the first of several.
        batch_sizes: Megatron's schedule of global batch sizes, which replaces the plan's size.
    """
    training = plan.training
    words = ["--micro-batch-size", str(training.micro_batch_size), *_batch_and_precision(plan, batch_sizes)]
    if training.sequence_parallel:
        words.append("--sequence-parallel")
    if training.recompute == "full":
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    elif training.recompute != "none":
        words += ["--recompute-granularity", "selective"]
        words += ["--recompute-modules", training.recompute] if training.recompute in PARTS else []
        words += ["--moe-grouped-gemm"] if training.recompute == "moe_act" else []
    if training.distributed_optimizer:
        words += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    return words


def extension_reasons(plan: Plan, turns: Turns | None = None) -> list[str]:
    """Reasons why stock Megatron cannot run the plan or plans; empty if it can."""
    reasons = ["plans take turns"] if turns and turns.more else []
    if plan.schedule.name not in STOCK:
        reasons.append(f"schedule {plan.schedule.name}")
    # Slack only matters if stages divide microbatches differently, which is listed anyway.
    reasons += [
        f"its schedule sets '{name}'" for name, value in plan.schedule.parameters.items() if value and name != "slack"
    ]
    reasons += filter(None, (feature.beyond_stock(plan, options) for feature, options in features_of(plan)))
    replicas = [r for s in plan.stages for r in s.replicas]
    if any(r.recompute_layers for r in replicas):
        reasons.append("it recomputes some layers only")
    sizes = (
        ("tensor-parallel sizes {} differ", {r.tp for r in replicas}),
        ("expert-parallel sizes {} differ", {r.ep for r in replicas}),
        ("expert-tensor-parallel sizes {} differ", {r.cut.etp for r in replicas}),
        ("stages have {} replicas", {len(s.replicas) for s in plan.stages}),
        ("replicas get {} microbatches", {len(r.microbatches) for r in replicas}),
        ("stages have different numbers of chunks", {len(s.layers) for s in plan.stages}),
    )
    reasons += [text.format(sorted(found)) for text, found in sizes if len(found) > 1]
    if not reasons and list(range(plan.world_size)) != [k for r in replicas for k in r.ranks]:
        reasons.append("ranks are not numbered in Megatron's order (TP, then replicas, then stages)")
    return reasons


def stock_arguments(plan: Plan) -> list[str]:
    """Flags with which stock Megatron runs the plan.

    Raises:
        ValueError: The plan needs the extension; the message says why.
    """
    reasons = extension_reasons(plan)
    if reasons:
        raise ValueError("stock Megatron cannot run this plan: " + "; ".join(reasons))
    stages, cut = len(plan.stages), plan.stages[0].replicas[0].cut
    words = ["--tensor-model-parallel-size", str(cut.tp), "--pipeline-model-parallel-size", str(stages)]
    if cut.ep > 1 or cut.etp:
        words += ["--expert-model-parallel-size", str(cut.ep), "--expert-tensor-parallel-size", str(cut.expert_tp)]
    if stages > 1:
        # With one stage Megatron silently ignores a layout, so none is given.
        words += ["--pipeline-model-parallel-layout", layout_string(plan)]
    return words


def layout_string(plan: Plan) -> str:
    """The layers in Megatron's notation, repetitions shortened: ``Et*3|t*5L``."""
    parts = []
    for part in pipeline_layout(plan).split("|"):
        count = part.count("t")
        layers = "t" * count if count < 3 else f"t*{count}"
        parts.append(("E" if "E" in part else "") + layers + ("L" if "L" in part else ""))
    return "|".join(parts)


def lines_of(words: Sequence[str]) -> list[str]:
    """Words as shell-quoted lines, a flag and its values on one line."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]


def bash_array(name: str, words: Sequence[str]) -> str:
    """A bash array with one flag per line."""
    if not words:
        return f"{name}=()\n"
    return f"{name}=(\n" + "".join(f"    {line}\n" for line in lines_of(words)) + ")\n"


def args_sh(
    plan: Plan,
    plan_file: str,
    groups: Mapping[str, Sequence[str]],
    header: Sequence[str] = (),
    *,
    elastic: bool = False,
    turns: Turns | None = None,
) -> str:
    """A file to ``source``: one bash array per group and ``MEGATRON_ARGS`` with all of them.

    Args:
        plan_file: Path of plan.json as ranks see it.
        groups: Flags by name, e.g. ``{"MODEL": [...], "TRAINING": [...]}``.
        elastic: Whether there is ``ELASTIC_ARGS`` as well, for an elastic job, whose plan changes.
    """
    arrays = {f"{name}_ARGS": list(words) for name, words in groups.items()}
    arrays["PLAN_ARGS"] = plan_arguments(plan, turns.batch_sizes if turns else "")
    reasons = extension_reasons(plan, turns)
    folder = plan_file.removesuffix("/plan.json")
    others = "".join(f" {shlex.quote(f'{folder}/{name}')}" for name in (turns.named if turns else ()))
    text = "# shellcheck shell=bash disable=SC2034\n"
    text += f'# Megatron arguments of plan {plan_hash(plan)}.  Use: source args.sh; ... "${{MEGATRON_ARGS[@]}}"\n'
    text += "".join(f"# {comment(line)}\n" for line in header)
    text += default_of("HET_PLAN", plan_file) + "\n\n"
    text += "\n".join(bash_array(name, words) for name, words in arrays.items())
    text += '\nHET_ARGS=(--het-plan "$HET_PLAN"' + others + ")\n"
    if reasons:
        text += "# Stock Megatron cannot run this plan: " + comment("; ".join(reasons)) + ".\n"
    else:
        text += "# This plan needs no extension: with STOCK_ARGS instead of HET_ARGS stock Megatron runs it.\n"
        text += bash_array("STOCK_ARGS", stock_arguments(plan))
    everything = " ".join(f'"${{{name}[@]}}"' for name in [*arrays, "HET_ARGS"])
    text += f"MEGATRON_ARGS=({everything})\n"
    if elastic:
        text += (
            "\n# An elastic job gets its plan from the controller; these flags go with every plan of the training.\n"
        )
        text += bash_array("COMMON_ARGS", common_arguments(plan))
        parts = " ".join(f'"${{{name}[@]}}"' for name in [*(f"{group}_ARGS" for group in groups), "COMMON_ARGS"])
        text += f"ELASTIC_ARGS=({parts})\n"
    return text
