"""CUDA graphs of layers (``--cuda-graph-impl``), and what they cannot be combined with."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron_het.families import family_of
from megatron_het.features.base import Feature, flag_of
from megatron_het.features.experts.spec import GLOBAL, SINKHORN, balancing_of
from megatron_het.features.registry import cuts_sequences, features_of, packing_argument
from megatron_het.plan import Plan, PlanError

NONE, LOCAL, BY_TE = "none", "local", "transformer_engine"
"""Values of ``--cuda-graph-impl`` that a plan supports: no graphs, Megatron's own, Transformer Engine's."""
TRY = "HET_TRY_GRAPHS"  # environment variable that permits combinations without correct results on a GPU so far
_ASKED = f"with {TRY}=1 in the environment: parts of layers have not been right on a GPU yet"
_FLAG, _PARTS_FLAG = "--cuda-graph-impl", "--cuda-graph-modules"
_GRAPHS, _LAYER = (
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer.transformer_layer.TransformerLayer",
)
_POSITIONS = ("rope", "learned_absolute", "none")


class LayerGraphs(Feature):
    """CUDA graphs of layers, or of parts of them.

    Every forward and backward of a layer in an iteration has a graph of its own, captured in the order of the plan's
    program.  The graphs share memory, which is correct if they run in the order in which they were captured.
    """

    name = "layer_graphs"
    title = "CUDA graphs of layers"
    always = True
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_GRAPHS}.create_cudagraphs": "f3e8ce233f0b39e6",
        f"{_GRAPHS}.set_current_microbatch": "5549f8678af1fe2d",
        f"{_LAYER}._te_cuda_graph_capture": "eb0c33a3ab0eb49a",
        f"{_LAYER}._te_cuda_graph_replay": "a33f124f4b541f1d",
    }

    def runs_with(self, args: Any) -> bool:
        """Whether layers are captured; see :class:`Feature`."""
        return getattr(args, "cuda_graph_impl", NONE) != NONE

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse arguments with which layers cannot be captured."""
        kind = getattr(args, "cuda_graph_impl", NONE)
        if kind == NONE:
            return
        for flag, value, problem, hint in _problems(plan, args, kind, captured(args)):
            raise PlanError(flag, value, problem, hint)


def captured(args: Any) -> frozenset[str]:
    """Megatron's names of the parts of layers to capture; empty for whole layers."""
    parts = getattr(args, "cuda_graph_modules", None) or getattr(args, "cuda_graph_scope_deprecated", None) or ()
    return frozenset(getattr(part, "name", part) for part in parts) - {"full"}


def _problems(plan: Plan, args: Any, kind: str, parts: frozenset[str]) -> Iterator[tuple[str, Any, str, str]]:
    """Yields problems, each as (flag, value, problem, remedy)."""
    if kind not in (LOCAL, BY_TE) or "full_iteration" in parts:
        problem = "the host posts transfers and waits for them all through an iteration of a plan"
        yield _FLAG, kind, problem, f"Capture layers: {BY_TE} or {LOCAL}"
    if getattr(args, "recompute_granularity", None) == "full" or plan.training.recompute == "full":
        problem = "full recomputation runs layers again in their backward, outside of graphs"
        yield _FLAG, kind, problem, "Recompute selectively, or not at all"
    for feature, _ in features_of(plan):
        if feature.no_graphs:
            yield _FLAG, kind, feature.no_graphs, "Leave one of them out"
    if family_of(args).pattern(args):
        yield _FLAG, kind, "the layers of a hybrid model have not been tried in graphs", "Leave it out"
    yield from _problems_of_local(plan, args, parts) if kind == LOCAL else _problems_of_te(args, parts)
    yield from _problems_of_attention(plan, args, kind, not parts or "attn" in parts or kind == LOCAL)
    if getattr(args, "num_experts", None):
        yield from _expert_flags(plan, args, kind, parts)
    if os.environ.get(TRY) == "1":
        return
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(args, name, False):
            problem = "a training with it and graphs of layers has ended on a GPU with an illegal access to memory"
            yield (
                flag_of(name),
                True,
                problem,
                f"Leave one of them out; {TRY}=1 in the environment tries it all the same",
            )
    if parts or kind == LOCAL:
        failed = "trainings with parts of layers in graphs have failed on a GPU, for a reason that is not known yet"
        problem = failed if parts else "it has failed on a GPU, where outputs were views that Megatron cannot let go"
        hint = f"Capture whole layers with {_FLAG} {BY_TE}; {TRY}=1 in the environment tries it all the same"
        yield _PARTS_FLAG if parts else _FLAG, " ".join(sorted(parts)) or kind, problem, hint


def _problems_of_local(plan: Plan, args: Any, parts: frozenset[str]) -> Iterator[tuple[str, Any, str, str]]:
    if parts & {"attn", "mlp"}:
        problem = f"{LOCAL} graphs of a GPTModel hold whole layers, whatever part of them is named"
        yield _PARTS_FLAG, " ".join(sorted(parts)), problem, f"Leave the flag out, or use {_FLAG} {BY_TE}"
    for feature, _ in features_of(plan):
        if feature.no_local_graphs:
            yield _FLAG, LOCAL, feature.no_local_graphs, f"Use {BY_TE}, which leaves these layers out"


def _problems_of_te(args: Any, parts: frozenset[str]) -> Iterator[tuple[str, Any, str, str]]:
    layers = getattr(args, "transformer_impl", BY_TE)
    if layers != BY_TE:
        problem = "Transformer Engine captures its own layers"
        yield _FLAG, BY_TE, problem, f"Use --transformer-impl {BY_TE}, or {_FLAG} {LOCAL}"


def _problems_of_attention(plan: Plan, args: Any, kind: str, inside: bool) -> Iterator[tuple[str, Any, str, str]]:
    """Yields problems of capturing attention."""
    if not inside:
        return
    outside = f"Leave attention outside: {_FLAG} {BY_TE} {_PARTS_FLAG} mlp (of experts: moe_router), {_ASKED}"
    if cuts_sequences(plan):
        problem = (
            "a slice attends to the keys of the slices before it, as many as have been computed, and a graph has one "
            "number of keys"
        )
        yield _FLAG, kind, problem, outside
    if flag := packing_argument(args):
        yield (
            flag_of(flag),
            True,
            "where documents begin is different in every iteration, and a graph has it once",
            outside,
        )
    positions = getattr(args, "position_embedding_type", "rope")
    if positions not in _POSITIONS and not getattr(args, "multi_latent_attention", False):
        problem = f"Megatron captures attention with positions {', '.join(_POSITIONS)} only"
        yield "--position-embedding-type", positions, problem, outside


def _expert_flags(plan: Plan, args: Any, kind: str, parts: frozenset[str]) -> Iterator[tuple[str, Any, str, str]]:
    padded = getattr(args, "moe_expert_capacity_factor", None) and getattr(
        args, "moe_pad_expert_input_to_capacity", False
    )
    if not parts and not padded:
        problem = "the host waits for the number of tokens of every expert, and a graph cannot wait"
        yield _FLAG, kind, problem, f"Name what can be captured: {_PARTS_FLAG} attn moe_router, {_ASKED}"
    routed = not parts or parts & {"moe", "moe_router"}
    if routed and (cuts_sequences(plan) or {GLOBAL, SINKHORN} & set(balancing_of(args))):
        problem = "balancing losses of several passes, and steps of sinkhorn, are put together by the host"
        yield (
            _PARTS_FLAG,
            " ".join(sorted(parts)) or "(whole layers)",
            problem,
            f"Capture dense parts: {_PARTS_FLAG} attn, {_ASKED}",
        )
