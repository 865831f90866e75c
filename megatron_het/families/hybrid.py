"""Megatron's ``HybridModel``: every layer is of one kind, which its symbol in a pattern says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_het.families.base import ModelFamily, RestPerAttention
from megatron_het.families.gpt import layers_by_number
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.schema import (
    CHUNK,
    EXPERTS,
    GATED_DELTA_NET,
    KINDS,
    LATENT_ATTENTION,
    MAMBA,
    MLP,
    RECURRENT,
    SPARSE_ATTENTION,
    WITH_ATTENTION,
    layers_of,
    problem_of,
    sizes_of,
    with_chunks,
    without_chunks,
)

LOCAL_SPEC = ("megatron_het.hybrid_layers", "local_stack_spec")
"""``--spec`` of a hybrid model without Transformer Engine."""
_MODELS = "megatron.core.models.hybrid"
_STATES = "megatron.core.ssm"
_FLAG = "--hybrid-layer-pattern"


class HybridFamily(ModelFamily):
    """The pattern says the layers, and where the chunks begin."""

    model = "HybridModel"
    builder = "megatron_het.runtime.building.ChunkedHybridModelBuilder"
    window_builder = "megatron_het.features.window.shards.WindowHybridModelBuilder"
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_MODELS}.hybrid_model.HybridModel.forward": (
            "195ddb83d0a514f4a1acf403285e52adf999578bd0a208c2ca03f711a5d3da09"
        ),
        f"{_MODELS}.hybrid_block.HybridStack.forward": (
            "87d56215a97047fb16c02908fdd19125b10cdb94e9e5969e26ef5a209f6a928b"
        ),
        # What is built in its place without Transformer Engine.
        f"{_MODELS}.hybrid_block.HybridStack.__init__": (
            "02b6574bc59d5b37a1b5e02102b6ca8245eda2e497d90cc91e5ab2b2fe206cde"
        ),
        f"{_MODELS}.hybrid_layer_allocation.select_pipeline_segment": (
            "ad4ba1fba1b8a5b64380deec2dd66e94c444613b2cc2cd992192efd6c982bfcf"
        ),
        f"{_MODELS}.hybrid_layer_allocation.parse_hybrid_pattern": (
            "2a9bbee6b1914910c52dc56c5f50455b2e157e09cbe25f63ef2643fcbeffe96f"
        ),
        "megatron.training.models.hybrid.HybridModelBuilder.build_distributed_models": (
            "d135f82f521103d9c8b191ed8c07ece963cd77bc46e12302ad8c6f01f2df5cfc"
        ),
        # What recurrent layers over slices compute in their place.
        f"{_STATES}.gated_delta_net.gdn.GatedDeltaNet.forward": (
            "53343d60909c2072d637c833b842eb3f4da837286965f01a37cd3a04773e5aba"
        ),
        f"{_STATES}.gated_delta_net.common._GDNBase._gated_norm_and_a2a": (
            "85c3dfb6987a8d95c40c32d5071911719a451e2ea6a1d4b6c6841bf2f6bf0320"
        ),
        f"{_STATES}.mamba_mixer.MambaMixer.forward": (
            "1bc195f63bbb803f546397e66417d9ba6e17a6bdc2995e37dcb79b66802e5037"
        ),
        f"{_STATES}.mamba_mixer.MambaMixer._ssm_training": (
            "51570310435a6ec1d96c644fdb5ac6637ceab91b081fab4e5faac682a611fb20"
        ),
    }

    def complete(self, plan: Plan, args: Any) -> None:
        """The pattern decides over the number of layers, those for multi-token prediction, and latent attention."""
        given: str = args.hybrid_layer_pattern
        problem = problem_of(given)
        if problem:
            raise PlanError(_FLAG, given, problem)
        planned = with_chunks(given, layers_by_number(plan))
        if CHUNK in given and given != planned:
            raise PlanError(
                _FLAG,
                given,
                f"chunks begin at other layers than in the plan, which has {planned}",
                f"Leave {CHUNK} out",
            )
        for symbol in (*RECURRENT, SPARSE_ATTENTION):
            if symbol in given and args.spec is None and args.transformer_impl == "local":
                raise PlanError(
                    _FLAG,
                    given,
                    f"Megatron has layers {symbol} ({KINDS[symbol]}) of Transformer Engine only",
                    "Use --transformer-impl transformer_engine, or give layers of your own with --spec",
                )
        _check_recurrent(plan, given, args)
        args.hybrid_layer_pattern = without_chunks(given)  # where chunks begin, the plan says
        vars(args).update({name: count or None for name, count in sizes_of(given).items()})
        if LATENT_ATTENTION in given or SPARSE_ATTENTION in given:
            args.multi_latent_attention = True

    def pattern(self, args: Any) -> str:
        """Without boundaries of chunks."""
        found: str = without_chunks(args.hybrid_layer_pattern)
        return found

    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """Returns the numbers of layers with a symbol of attention."""
        return tuple(
            number for number, kind in enumerate(layers_of(args.hybrid_layer_pattern), 1) if kind in WITH_ATTENTION
        )

    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """Counted in the pattern."""
        layers = layers_of(args.hybrid_layer_pattern)
        attention = max(1, sum(layers.count(kind) for kind in WITH_ATTENTION))
        return RestPerAttention(layers.count(MLP) / attention, layers.count(EXPERTS) / attention)

    def write_layout(self, plan: Plan, args: Any) -> None:
        """Write the boundaries of chunks into the pattern."""
        args.hybrid_layer_pattern = with_chunks(args.hybrid_layer_pattern, layers_by_number(plan))

    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """Megatron has layers of Transformer Engine only."""
        return LOCAL_SPEC if args.transformer_impl == "local" else None

    def model_config(self, args: Any) -> Any:
        """See :class:`ModelFamily`."""
        from megatron.training.argument_utils import hybrid_config_from_args

        return hybrid_config_from_args(args)

    def needs_builder(self, chunks: int) -> bool:
        """A chunk finds its layers in the pattern by the rank that torch says."""
        return True

    def recurrent_layers(self, model: Any) -> list[Any]:
        """Returns what layers with such a symbol compute with, those for multi-token prediction last."""
        decoder, *others = self.blocks(model)
        later = [layer for block in others for each in block.layers for layer in self._inner(each.mtp_model_layer)]
        found = [getattr(layer, "mixer", getattr(layer, "self_attention", None)) for layer in (*decoder.layers, *later)]
        return [module for module in found if hasattr(module, "gated_delta_rule") or hasattr(module, "d_conv")]

    def _inner(self, later: Any) -> Sequence[Any]:
        layers: Sequence[Any] = later.layers
        return layers

    def _attending(self, layers: Sequence[Any]) -> list[Any]:
        return [layer for layer in layers if hasattr(getattr(layer, "self_attention", None), "core_attention")]


def _check_recurrent(plan: Plan, pattern: str, args: Any) -> None:
    """Refuse TP sizes that do not divide the heads of recurrent layers, and CP sizes that leave ranks without any."""
    sizes = {replica.tp for stage in plan.stages for replica in stage.replicas}
    if GATED_DELTA_NET in pattern and max(sizes) > 1 and not plan.training.sequence_parallel:
        raise PlanError(
            _FLAG,
            pattern,
            f"with TP, Megatron adds up what TP ranks find for the norm in layers {GATED_DELTA_NET} "
            f"({KINDS[GATED_DELTA_NET]}) only under sequence parallelism",
            "Use --sequence-parallel, with training.sequence_parallel in the plan",
        )
    counted = {
        MAMBA: ("mamba_num_heads", "mamba_num_groups"),
        GATED_DELTA_NET: ("linear_num_key_heads", "linear_num_value_heads"),
    }
    for name in (name for symbol, names in counted.items() if symbol in pattern for name in names):
        count = getattr(args, name, None)
        if name == "mamba_num_heads" and count is None:  # as Megatron derives them
            count = 2 * args.hidden_size // args.mamba_head_dim
        for tp in sorted(sizes):
            if count and count % tp:
                raise PlanError(f"--{name.replace('_', '-')}", count, f"TP ranks divide them, and the plan has TP {tp}")
        most = max(replica.tp * replica.cp for stage in plan.stages for replica in stage.replicas)
        if count and name in ("mamba_num_heads", "linear_num_value_heads") and count < most:
            raise PlanError(
                f"--{name.replace('_', '-')}",
                count,
                f"the ranks of a replica divide them, and the plan has one of {most} ranks",
            )


HYBRID = HybridFamily()
