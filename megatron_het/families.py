"""Properties of the model's class for plans and features: Megatron's ``GPTModel`` or ``HybridModel``.

All code that depends on the class is behind :class:`ModelFamily`.  Functions of arguments need no torch.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from megatron_het.plan import Placement, Plan, PlanError, schema


class AttentionLayer(NamedTuple):
    """A layer of a chunk that has keys and values."""

    layer: Any  # Megatron's module; its attention is ``self_attention``
    is_later: bool  # whether it is for multi-token prediction; such a layer may run several times in a pass


class RestPerAttention(NamedTuple):
    """Numbers of dense MLPs and of layers of experts per layer with attention."""

    dense: float
    experts: float


class ModelFamily(abc.ABC):
    """Interface for code that depends on the class of the model."""

    model: ClassVar[str]  # name of Megatron's class, for messages
    builder: ClassVar[str]  # dotted name of the builder of several chunks per rank
    window_builder: ClassVar[str]  # dotted name of the builder of chunks for a parameter window
    # dotted names of upstream code that the family depends on, with the hashes of their sources
    upstream_names: ClassVar[Mapping[str, str]] = {}

    # -- Megatron's arguments -----------------------------------------------------------------------

    @abc.abstractmethod
    def complete(self, plan: Plan, args: Any) -> None:
        """Set arguments that Megatron derives from others only in its validation.

        Raises:
            PlanError: The arguments contradict each other, or have other chunks than the plan.
        """

    @abc.abstractmethod
    def pattern(self, args: Any) -> str:
        """The kinds of the layers in the notation of plans; empty if all layers are of one kind."""

    @abc.abstractmethod
    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """Megatron's numbers of the layers that have keys and values, from 1."""

    @abc.abstractmethod
    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """Returns the numbers of other layers per layer with attention; the most frequent ones if they differ."""

    @abc.abstractmethod
    def write_layout(self, plan: Plan, args: Any) -> None:
        """Set the arguments that define the layers of each chunk."""

    @abc.abstractmethod
    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """``--spec`` for layers that Megatron lacks, for a model without one; None if Megatron has them."""

    @abc.abstractmethod
    def model_config(self, args: Any) -> Any:
        """Megatron's configuration of the model, from validated arguments."""

    @abc.abstractmethod
    def needs_builder(self, chunks: int) -> bool:
        """Whether Megatron's own builder cannot build the model, with at most ``chunks`` chunks per rank."""

    # -- model chunks -------------------------------------------------------------------------------

    def blocks(self, model: Any) -> list[Any]:
        """Returns the modules of a chunk that have layers: the decoder, and the block for multi-token prediction."""
        later = getattr(model, "mtp", None)
        return [model.decoder] if later is None else [model.decoder, later]

    def attention_layers(self, model: Any) -> list[AttentionLayer]:
        """The layers of a chunk that have keys and values, in order, those for multi-token prediction last."""
        decoder, *others = self.blocks(model)
        later = [layer for block in others for each in block.layers for layer in self._inner(each.mtp_model_layer)]
        return [
            *(AttentionLayer(layer, is_later=False) for layer in self._attending(decoder.layers)),
            *(AttentionLayer(layer, is_later=True) for layer in self._attending(later)),
        ]

    def recurrent_layers(self, model: Any) -> list[Any]:
        """The Mamba mixers and gated delta nets of a chunk, which pass a state along the sequence, in order."""
        return []

    @abc.abstractmethod
    def _inner(self, later: Any) -> Sequence[Any]:
        """The layers inside a layer for multi-token prediction."""

    @abc.abstractmethod
    def _attending(self, layers: Sequence[Any]) -> list[Any]:
        """Returns the attention modules of layers that have keys and values."""


# Megatron's ``GPTModel``: every layer is attention and an MLP or experts.


LATENT_SPEC = ("megatron_het.latent_attention", "layer_spec")
"""``--spec`` for a model with multi-latent attention without Transformer Engine, or without compressed queries."""


class GPTFamily(ModelFamily):
    """Models whose layers all have attention; Megatron's layout string defines the layers of each chunk."""

    model = "GPTModel"
    builder = "megatron_het.runtime.building.ChunkedGPTModelBuilder"
    window_builder = "megatron_het.features.window.shards.WindowGPTModelBuilder"

    def complete(self, plan: Plan, args: Any) -> None:
        """Does nothing: no argument is missing."""

    def pattern(self, args: Any) -> str:
        """Returns an empty pattern: every layer is attention and an MLP or experts."""
        return ""

    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """Returns the numbers of all layers."""
        return tuple(range(1, args.num_layers + 1))

    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """Returns one of both per layer; a few dense layers of a model of experts do not count."""
        has_experts = bool(getattr(args, "num_experts", None))
        return RestPerAttention(int(not has_experts), int(has_experts))

    def write_layout(self, plan: Plan, args: Any) -> None:
        """Write Megatron's layout string."""
        args.pipeline_model_parallel_layout = pipeline_layout(plan)

    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """Returns the spec of latent attention without Transformer Engine or compressed queries, else None."""
        is_ours = args.transformer_impl == "local" or getattr(args, "q_lora_rank", None) is None
        return LATENT_SPEC if getattr(args, "multi_latent_attention", False) and is_ours else None

    def model_config(self, args: Any) -> Any:
        from megatron.training.argument_utils import gpt_config_from_args

        return gpt_config_from_args(args)

    def needs_builder(self, chunks: int) -> bool:
        """Whether there are several chunks; Megatron can build one."""
        return chunks > 1

    def _inner(self, later: Any) -> Sequence[Any]:
        return [later]

    def _attending(self, layers: Sequence[Any]) -> list[Any]:
        return list(layers)


GPT = GPTFamily()


def pipeline_layout(plan: Plan) -> str:
    """The plan's layers as Megatron's ``--pipeline-model-parallel-layout`` string, e.g. ``Ettt|tL``.

    Layers for multi-token prediction are last: ``tmL``.  A chunk that a stage lacks is empty.
    """
    parts = ["t" * count for count in layers_by_number(plan)]
    parts[0] = "E" + parts[0]
    parts[-1] += plan.model.layout_end
    return "|".join(parts)


def layers_by_number(plan: Plan) -> list[int]:
    """Number of layers of every chunk in Megatron's order; 0 for chunks that a stage lacks."""
    found = [0] * (plan.most_chunks * len(plan.stages))
    for (stage, chunk), number in Placement(plan).numbers.items():
        found[number] = plan.stages[stage].layers[chunk]
    return found


# Megatron's ``HybridModel``: every layer is of one kind, given by its symbol in a pattern.


LOCAL_SPEC = ("megatron_het.hybrid_layers", "local_stack_spec")
"""``--spec`` of a hybrid model without Transformer Engine."""
_MODELS = "megatron.core.models.hybrid"
_STATES = "megatron.core.ssm"
_FLAG = "--hybrid-layer-pattern"


class HybridFamily(ModelFamily):
    """Models whose pattern defines the layers and the boundaries of chunks."""

    model = "HybridModel"
    builder = "megatron_het.runtime.building.ChunkedHybridModelBuilder"
    window_builder = "megatron_het.features.window.shards.WindowHybridModelBuilder"
    upstream_names: ClassVar[Mapping[str, str]] = {
        f"{_MODELS}.hybrid_model.HybridModel.forward": "195ddb83d0a514f4",
        f"{_MODELS}.hybrid_block.HybridStack.forward": "87d56215a97047fb",
        # Upstream code that is replaced without Transformer Engine.
        f"{_MODELS}.hybrid_block.HybridStack.__init__": "02b6574bc59d5b37",
        f"{_MODELS}.hybrid_layer_allocation.select_pipeline_segment": "ad4ba1fba1b8a5b6",
        f"{_MODELS}.hybrid_layer_allocation.parse_hybrid_pattern": "2a9bbee6b1914910",
        "megatron.training.models.hybrid.HybridModelBuilder.build_distributed_models": "d135f82f521103d9",
        # Upstream code that recurrent layers over slices replace.
        f"{_STATES}.gated_delta_net.gdn.GatedDeltaNet.forward": "53343d60909c2072",
        f"{_STATES}.gated_delta_net.common._GDNBase._gated_norm_and_a2a": "85c3dfb6987a8d95",
        f"{_STATES}.mamba_mixer.MambaMixer.forward": "1bc195f63bbb803f",
        f"{_STATES}.mamba_mixer.MambaMixer._ssm_training": "51570310435a6ec1",
    }

    def complete(self, plan: Plan, args: Any) -> None:
        """Sets the number of layers, those for multi-token prediction, and latent attention from the pattern."""
        given: str = args.hybrid_layer_pattern
        problem = schema.problem_of(given)
        if problem:
            raise PlanError(_FLAG, given, problem)
        planned = schema.with_chunks(given, layers_by_number(plan))
        if schema.CHUNK in given and given != planned:
            hint = f"Leave {schema.CHUNK} out"
            raise PlanError(_FLAG, given, f"chunks begin at other layers than in the plan, which has {planned}", hint)
        for symbol in (*schema.RECURRENT, schema.SPARSE_ATTENTION):
            if symbol in given and args.spec is None and args.transformer_impl == "local":
                raise PlanError(
                    _FLAG,
                    given,
                    f"Megatron has layers {symbol} ({schema.KINDS[symbol]}) of Transformer Engine only",
                    "Use --transformer-impl transformer_engine, or give layers of your own with --spec",
                )
        _check_recurrent(plan, given, args)
        args.hybrid_layer_pattern = schema.without_chunks(given)  # the plan defines the chunks
        vars(args).update({name: count or None for name, count in schema.sizes_of(given).items()})
        if schema.LATENT_ATTENTION in given or schema.SPARSE_ATTENTION in given:
            args.multi_latent_attention = True

    def pattern(self, args: Any) -> str:
        """Returns the pattern without boundaries of chunks."""
        found: str = schema.without_chunks(args.hybrid_layer_pattern)
        return found

    def attention_numbers(self, args: Any) -> tuple[int, ...]:
        """Returns the numbers of layers with a symbol of attention."""
        return tuple(
            number
            for number, kind in enumerate(schema.layers_of(args.hybrid_layer_pattern), 1)
            if kind in schema.WITH_ATTENTION
        )

    def rest_per_attention(self, args: Any) -> RestPerAttention:
        """Returns the numbers counted in the pattern."""
        layers = schema.layers_of(args.hybrid_layer_pattern)
        attention = max(1, sum(layers.count(kind) for kind in schema.WITH_ATTENTION))
        return RestPerAttention(layers.count(schema.MLP) / attention, layers.count(schema.EXPERTS) / attention)

    def write_layout(self, plan: Plan, args: Any) -> None:
        """Write the boundaries of chunks into the pattern."""
        args.hybrid_layer_pattern = schema.with_chunks(args.hybrid_layer_pattern, layers_by_number(plan))

    def default_spec(self, args: Any) -> tuple[str, str] | None:
        """Returns the spec of local layers without Transformer Engine, which Megatron lacks."""
        return LOCAL_SPEC if args.transformer_impl == "local" else None

    def model_config(self, args: Any) -> Any:
        from megatron.training.argument_utils import hybrid_config_from_args

        return hybrid_config_from_args(args)

    def needs_builder(self, chunks: int) -> bool:
        """Returns True: a chunk finds its layers in the pattern by torch's rank in the pipeline group."""
        return True

    def recurrent_layers(self, model: Any) -> list[Any]:
        """Returns the mixers of recurrent layers, those for multi-token prediction last."""
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
    if schema.GATED_DELTA_NET in pattern and max(sizes) > 1 and not plan.training.sequence_parallel:
        raise PlanError(
            _FLAG,
            pattern,
            f"with TP, Megatron adds up what TP ranks find for the norm in layers {schema.GATED_DELTA_NET} "
            f"({schema.KINDS[schema.GATED_DELTA_NET]}) only under sequence parallelism",
            "Use --sequence-parallel, with training.sequence_parallel in the plan",
        )
    counted = {
        schema.MAMBA: ("mamba_num_heads", "mamba_num_groups"),
        schema.GATED_DELTA_NET: ("linear_num_key_heads", "linear_num_value_heads"),
    }
    for name in (name for symbol, names in counted.items() if symbol in pattern for name in names):
        count = getattr(args, name, None)
        if name == "mamba_num_heads" and count is None:  # derived as in Megatron
            count = 2 * args.hidden_size // args.mamba_head_dim
        for tp in sorted(sizes):
            if count and count % tp:
                raise PlanError(f"--{name.replace('_', '-')}", count, f"TP ranks divide them, and the plan has TP {tp}")
        most = max(replica.tp * replica.cp for stage in plan.stages for replica in stage.replicas)
        if count and name in ("mamba_num_heads", "linear_num_value_heads") and count < most:
            problem = f"the ranks of a replica divide them, and the plan has one of {most} ranks"
            raise PlanError(f"--{name.replace('_', '-')}", count, problem)


HYBRID = HybridFamily()


def family_of(args: object) -> ModelFamily:
    """The family of the model that Megatron's arguments describe."""
    return HYBRID if getattr(args, "hybrid_layer_pattern", None) is not None else GPT


def family_for(plan: Plan) -> ModelFamily:
    """The family of the model that a plan is for."""
    return HYBRID if plan.model.pattern else GPT


def family_of_config(config: object) -> ModelFamily:
    """The family of Megatron's configuration of a model."""
    return HYBRID if hasattr(config, "hybrid_stack_spec") else GPT


def family_of_model(model: object) -> ModelFamily:
    """The family of a model chunk without wrappers."""
    return HYBRID if hasattr(model, "hybrid_layer_pattern") else GPT
