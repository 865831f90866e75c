"""The model file: shape, batch and numerics of a decoder-only transformer, and quantities derived from them."""

import argparse
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_het.plan import schema
from megatron_het.plan.validate import LARGEST

from ..errors import PlannerError, command, validated
from . import model_parts
from .catalog import Format, Precision, data
from .files import read_yaml, text_problem
from .profile_schema import MEASURED_AS, ProfiledExperts, ProfiledLatent, ProfiledModel

_TRAVELS = 0.3
"""Time of a query to another rank and back, over that of a token in its layer: of Llama-3-8B on H100 at 50 GB/s."""


def kinds_of(layers: str) -> tuple[tuple[str, int], ...]:
    """Returns the number of layers by symbol."""
    return tuple((kind, layers.count(kind)) for kind in sorted(set(layers)))


Recompute = Literal["none", "selective", "moe_act", "mlp", "full"]


def _size(name: str) -> Any:
    """A size that is required, within the bounds that plans have too."""
    return Field(ge=1, le=LARGEST[name])


class Model(BaseModel):
    """A model file.

    Attributes:
        sequence_parallel: Whether norms and residuals are split over TP; on by default with experts and gated delta
            nets.
        mamba, delta_net: Sizes of its layers of these kinds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ignored_types=(cached_property,))

    name: str = "model"
    num_layers: int = _size("num_layers")
    hidden_size: int = _size("hidden_size")
    ffn_hidden_size: int = _size("ffn_hidden_size")
    num_attention_heads: int = _size("num_attention_heads")
    num_query_groups: int | None = Field(default=None, ge=1, le=LARGEST["num_query_groups"])
    vocab_size: int = _size("vocab_size")
    seq_length: int = _size("seq_length")
    global_batch_size: int = _size("global_batch_size")  # sequences per iteration; the planner never changes it
    micro_batch_sizes: tuple[int, ...] = ()  # allowed micro batch sizes; all powers of two when empty
    precision: Precision = "bf16"
    gated: bool = True  # SwiGLU or similar (three matrices in the MLP instead of two)
    biases: bool = False
    tied_embeddings: bool = False
    # rows of a learned position table, at least ``seq_length``; 0 without one (RoPE)
    learned_positions: int = Field(default=0, ge=0, le=LARGEST["seq_length"])
    distributed_optimizer: bool = False  # whether optimizer state may be sharded over data parallelism
    experts: model_parts.Experts | None = None  # mixture of experts in place of the MLP
    delta_net: model_parts.DeltaNet | None = None
    # Megatron trains both with TP under sequence parallelism only.
    sequence_parallel: bool = Field(default_factory=lambda given: bool(given.get("experts") or given.get("delta_net")))
    recompute: tuple[Recompute, ...] = ("none", "full")  # allowed recomputation, in ascending order of memory saved
    # ``flash`` where GPU and precision (fp16, bf16) have it, else unfused; ``unfused`` everywhere; or ``fused``
    # everywhere
    attention: Literal["flash", "unfused", "fused"] = "flash"
    # width of one attention head, where it is not ``hidden_size / num_attention_heads``
    head_size: int | None = Field(default=None, ge=1)
    # attention_window, windowed_layers: keys that a query sees in layers with a sliding window, and the share of such
    # layers
    attention_window: int | None = Field(default=None, ge=1)
    windowed_layers: float = Field(default=0.0, ge=0, le=1)
    # of documents packed into sequences that do not see each other: a mean, or a sample; none where a sequence is one
    # document
    document_lengths: model_parts.Lengths | None = None
    latent: model_parts.Latent | None = None  # multi-head latent attention
    fp8: bool = False  # linear layers compute in fp8 (attention, output layer and the rest in ``precision``)
    fp4: bool = False  # the same in fp4 (NVFP4)
    # layers for multi-token prediction on the last stage, which ``num_layers`` does not count; 0 trains without them
    mtp_num_layers: int = Field(default=0, ge=0, le=LARGEST["num_layers"])
    # of a hybrid model: the kinds of its layers (``megatron_het/plan/schema.py``); ``num_layers`` and
    # ``mtp_num_layers`` may be left out of the file then
    pattern: str = ""
    mamba: model_parts.Mamba | None = None
    # Megatron's flags of the model that no other field stands for, without dashes: ``rotary-base: 500000``,
    # ``qk-layernorm: true`` (``model_parts.MODEL_FLAGS``).
    flags: dict[str, model_parts.FlagValue] = {}
    # fields of another format that Megatron has no flag for, with the reason: the model can be priced, and not be
    # trained
    lost: dict[str, str] = {}
    # fields of another format that are not known here, with their values, and small differences that stay
    unread: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if problem := text_problem(value):
            raise ValueError(problem)
        return value

    @field_validator("document_lengths")
    @classmethod
    def _are_lengths(cls, value: model_parts.Lengths | None) -> model_parts.Lengths | None:
        if value is not None and (problem := model_parts.lengths_problem(value)):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Model":
        model_parts.check_sizes(self)
        return self

    @cached_property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """Returns the number of layers by kind; empty if all are alike."""
        return kinds_of(schema.layers_of(self.pattern))

    @cached_property
    def _alone(self) -> "dict[str, Model]":
        return {}

    def of_kind(self, symbol: str) -> "Model":
        """Returns the model with layers of one kind only: parts that this kind lacks have size 0."""
        if symbol not in self._alone:
            values = {name: getattr(self, name) for name in type(self).model_fields}
            values |= {"pattern": "", "num_layers": 1, "mtp_num_layers": 0}
            if symbol != schema.EXPERTS:
                values["experts"] = None
            if symbol not in (schema.MLP, schema.EXPERTS):
                values["ffn_hidden_size"] = 0
            if symbol not in (schema.ATTENTION, schema.LATENT_ATTENTION):
                values |= {"num_attention_heads": 0, "num_query_groups": None, "head_size": self.head_dim}
                values["latent"] = None
            values["mamba"] = self.mamba if symbol == schema.MAMBA else None
            values["delta_net"] = self.delta_net if symbol == schema.GATED_DELTA_NET else None
            self._alone[symbol] = Model.model_construct(**values)
        return self._alone[symbol]

    @property
    def recurrent(self) -> model_parts.Mamba | model_parts.DeltaNet | None:
        """The recurrent part of the layers, of a model of one such kind."""
        return None if self.pattern else self.mamba or self.delta_net

    @property
    def norms(self) -> int:
        """Norms of a layer, one before attention and one before what follows it."""
        first = self.num_attention_heads or self.recurrent is not None
        return bool(first) + bool(self.ffn_hidden_size or self.experts is not None)

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of the queries of all heads."""
        return self.head_dim * self.num_attention_heads

    @property
    def not_run(self) -> list[str]:
        """Returns the fields of this model that are priced but not supported by the runtime."""
        has_pattern = "window-attn-skip-freq" in self.flags or self.window_period is not None
        parts = ["attention_window"] if self.attention_window is not None and not has_pattern else []
        parts += ["fp4"] if self.fp4 else []
        x = self.experts
        runs = x is None or x.runs or (x.dropless and "moe-layer-freq" in self.flags)
        return parts + ([] if runs else ["experts"]) + list(self.lost)

    @property
    def notes(self) -> list[str]:
        """Returns notes on the file from which the model was read, one line each."""
        found = []
        if self.flags:
            found.append(f"flags of the model: {' '.join(model_parts.flag_words(self.flags))}")
        if parts := [name.replace("_", " ") for name in self.not_run if name not in self.lost]:
            found.append(f"priced only: runs with a plan cannot train this model yet ({', '.join(parts)})")
        if self.lost:
            lost = (v if k.startswith("(") else f"{k} = {v}" for k, v in self.lost.items())
            found.append(f"priced only: Megatron cannot train this model: {'; '.join(lost)}")
        if self.unread:
            found.append("not taken over: " + "; ".join(self.unread))
        return found

    @property
    def window_period(self) -> int | None:
        """Returns n if every n-th layer has no window, 0 if none; None if the share of layers fits no period."""
        if self.windowed_layers == 1:
            return 0
        period = round(1 / (1 - self.windowed_layers))
        return period if period > 1 and abs(1 - 1 / period - self.windowed_layers) < 1e-6 else None

    def check_dry_run(self, hint: str) -> None:
        """Raise a PlannerError when a dry run cannot train the model."""
        if self.not_run:
            name, problem = self.not_run[0], "is priced, but no run with a plan has it yet"
            self._check_lost("model")
            raise PlannerError("model", name, str(getattr(self, name)), problem, hint)
        if self.fp8:
            raise PlannerError("model", "fp8", True, "without a GPU nothing stands in for layers in fp8", hint)

    def _check_lost(self, file: str) -> None:
        for key, reason in self.lost.items():
            problem, hint = f"{reason}, so Megatron would train another model", "A plan can be made and priced; "
            hint += "to train another model on purpose, write a model file (docs/models.md)"
            raise PlannerError(file, key, None, problem, hint)

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values)."""
        return self.head_dim * self.groups

    @property
    def linear_precision(self) -> Format:
        """Returns the format in which linear layers compute."""
        return "fp4" if self.fp4 else "fp8" if self.fp8 else self.precision

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Micro batch sizes to consider, ascending."""
        if self.micro_batch_sizes:
            return tuple(sorted(set(self.micro_batch_sizes)))
        return tuple(b for b in (1, 2, 4, 8, 16, 32, 64, 128) if self.global_batch_size % b == 0)

    def layer_parameters(self, tp: int = 1, ep: int = 1, expert_tp: int = 0) -> int:
        """Parameters of one transformer layer on one rank: the mean over layers with and without experts.

        Args:
            ep: Parts over which the experts are divided.
            expert_tp: Ranks that cut one expert, 0 for the rest of the TP group.
        """
        if self.kinds:
            counts = [(self.of_kind(kind).layer_parameters(tp, ep, expert_tp), count) for kind, count in self.kinds]
            return round(sum(each * count for each, count in counts) / self.num_layers)
        h, f = self.hidden_size, self.ffn_hidden_size
        matrices = 3 if self.gated else 2
        total = (self._attention_parameters() + h * f * matrices) // tp
        total += self.norms * h * (2 if self.biases else 1)
        if self.recurrent is not None:
            total += self.recurrent.small_parameters // tp
        if self.biases:
            total += (self.attention_size + 2 * self.kv_size + f) // tp + self.norms * h
        x = self.experts
        if x is not None:
            parts = ep * (expert_tp or max(1, tp // ep))
            routed = h * matrices * x.ffn_hidden_size * x.count // parts + h * matrices * x.shared_ffn_hidden_size // tp
            share = 1 - min(1.0, x.dense_layers / self.num_layers)
            total += round(share * (routed + h * x.count - h * f * matrices // tp))
        return total

    def first_layers(self, tp: int, ep: int, expert_tp: int) -> tuple[int, float]:
        """Returns the number of leading dense layers, and how many parameters fewer than the others each has."""
        x = self.experts
        if x is None or not x.dense_at_start:
            return 0, 0.0
        every = self.model_copy(update={"experts": x.model_copy(update={"dense_layers": 0})})
        more = every.layer_parameters(tp, ep, expert_tp) - self.layer_parameters(tp, ep, expert_tp)
        return x.dense_at_start, more * self.num_layers / x.dense_layers

    def expert_parameters(self, ep: int, expert_tp: int) -> int:
        """Parameters of the experts of one layer on one rank: the mean over layers with and without experts."""
        if self.kinds:
            counts = [(self.of_kind(kind).expert_parameters(ep, expert_tp), count) for kind, count in self.kinds]
            return round(sum(each * count for each, count in counts) / self.num_layers)
        x = self.experts
        if x is None:
            return 0
        share = 1 - min(1.0, x.dense_layers / self.num_layers)
        matrices = 3 if self.gated else 2
        return round(share * self.hidden_size * matrices * x.ffn_hidden_size * x.count / (ep * expert_tp))

    @property
    def query_size(self) -> int:
        """Outputs of the projection of queries, and of their gate where there is one."""
        return self.attention_size * (2 if self.flags.get("attention-output-gate") else 1)

    def _attention_parameters(self) -> int:
        """Returns the parameters of the projections of attention, or of the layer that replaces it."""
        h, x = self.hidden_size, self.latent
        if self.recurrent is not None:
            return h * (self.recurrent.projected + self.recurrent.inner)
        if x is None:
            return h * (self.query_size + 2 * self.kv_size) + self.attention_size * h
        heads = self.num_attention_heads
        return (
            sum(int(outputs * inputs) for outputs, inputs in x.query_products(h, heads))
            + h * (x.key_value_rank + x.rope_size)
            + heads * x.key_value_rank * (x.nope_size + x.value_size)
            + heads * x.value_size * h
        )

    def embedding_parameters(self, tp: int = 1) -> int:
        """Parameters of the token and position tables on one rank."""
        return self._padded_rows(tp) * self.hidden_size + self.learned_positions * self.hidden_size

    def head_parameters(self, tp: int = 1) -> int:
        """Final norm and output projection on one rank (tied: held a second time on the last stage)."""
        return self._padded_rows(tp) * self.hidden_size + self.hidden_size * (2 if self.biases else 1)

    def _padded_rows(self, tp: int) -> int:
        """Rows of the vocabulary on one rank, padded as Megatron does (to a multiple of 128 * TP)."""
        return -(-self.vocab_size // (128 * tp)) * 128

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model (a tied table counts once)."""
        head = self.hidden_size if self.tied_embeddings else self.vocab_size * self.hidden_size
        later = self.layer_parameters() + 2 * self.hidden_size**2 + 3 * self.hidden_size * (2 if self.biases else 1)
        by_kind = sum(count * self.of_kind(kind).layer_parameters() for kind, count in self.kinds)
        return (
            (by_kind or self.num_layers * self.layer_parameters())
            + self.mtp_num_layers * later
            + self.vocab_size * self.hidden_size
            + self.learned_positions * self.hidden_size
            + head
        )

    def layer_flops(self, tokens: int, context: float | None = None) -> float:
        """Forward FLOPs of one layer for ``tokens`` tokens of one sequence (with experts: the mean layer).

        Args:
            context: Average number of keys per query; half the sequence by default (causal).
        """
        if self.kinds:
            counted = (count * self.of_kind(kind).layer_flops(tokens, context) for kind, count in self.kinds)
            return sum(counted) / self.num_layers
        x, width = self.experts, float(self.ffn_hidden_size)
        if x is not None:
            share = 1 - min(1.0, x.dense_layers / self.num_layers)
            width += share * (x.top_k * x.ffn_hidden_size + x.shared_ffn_hidden_size - self.ffn_hidden_size)
        matrices = self._attention_parameters() + self.hidden_size * width * (3 if self.gated else 2)
        keys = self.mean_keys() if context is None else context
        scan = 0.0 if self.recurrent is None else self.recurrent.scan_flops
        return 2.0 * tokens * matrices + 2.0 * tokens * keys * self.score_size + tokens * scan

    @property
    def score_size(self) -> int:
        """Multiplications per query and key: the width of a query plus that of a value, over all heads."""
        if self.latent is None:
            return 2 * self.attention_size
        x = self.latent
        return self.num_attention_heads * (x.nope_size + x.rope_size + x.value_size)

    def mean_keys(self, extra: float = 0.0) -> float:
        """Keys per query, averaged over causal sequences, their documents, and layers with and without a window.

        Args:
            extra: Keys beyond the mask that a kernel computes all the same.
        """
        found = whole = self.seq_length / 2
        if self.attention_window is not None:
            near = min(whole, float(self.attention_window))
            found = self.windowed_layers * near + (1 - self.windowed_layers) * whole
        return found * self.attention_share + extra

    @cached_property
    def attention_share(self) -> float:
        """Returns the attention inside documents as a share of that of whole sequences."""
        if self.document_lengths is None:
            return 1.0
        window = self.attention_window, self.windowed_layers
        shares = model_parts.shares_left(self.document_lengths, self.seq_length, *window)
        return sum(shares) / len(shares)

    @property
    def can_split_vocabulary(self) -> bool:
        """Whether stages can share the vocabulary; layers for later tokens read whole tables."""
        return not self.mtp_num_layers

    def shared(self, cp: int, slices: int, *, cut: bool = False) -> model_parts.Shared:
        """Returns the exchange of queries between context-parallel ranks, averaged over layers.

        Args:
            cut: Whether documents are cut by places, also where they had better be whole.
        """
        if self.document_lengths is None and self.attention_window is None:
            return model_parts.Shared(1.0)
        windowed = 0.0 if self.attention_window is None else self.windowed_layers
        rest = self.layer_flops(1, 0.0)
        per_token = rest / (self.layer_flops(1, 1.0) - rest or 1.0)
        ways = [None] if cut or self.document_lengths is None else [None, per_token]
        found = []
        for keys in ways:
            parts = [
                (part, model_parts.shared(self.document_lengths, self.seq_length, cp, slices, window, keys))
                for part, window in ((windowed, self.attention_window), (1 - windowed, None))
                if part
            ]
            sent, most = (sum(part * each[i] for part, each in parts) for i in (0, 1))
            found.append(model_parts.Shared(sent, most, keys is not None))
        attention = self.mean_keys() / per_token  # over the rest of a layer
        return min(found, key=lambda each: attention * each.most + _TRAVELS * (cp - 1) * each.sent)

    def head_flops(self, tokens: int) -> float:
        """Forward FLOPs of the output projection."""
        return 2.0 * tokens * self.hidden_size * self.vocab_size

    @property
    def iteration_flops(self) -> float:
        """Model FLOPs of one iteration: forward and backward (twice), without recomputation."""
        s = self.seq_length
        later = self.layer_flops(s) + 4.0 * s * self.hidden_size**2 + self.head_flops(s)
        once = self.num_layers * self.layer_flops(s) + self.head_flops(s) + self.mtp_num_layers * later
        return 3.0 * self.global_batch_size * once

    def check_run(self, file: str) -> None:
        """Raise a PlannerError when the model has parts that are priced only."""
        self._check_lost(file)
        if self.not_run:
            key = self.not_run[0]
            problem = "the planner prices this, but runs with a plan do not have it yet"
            hint = f"Remove {', '.join(self.not_run)} to write launch files"
            raise PlannerError(file, key, str(getattr(self, key)), problem, hint)
        if (self.experts or self.delta_net) is not None and not self.sequence_parallel:
            what = "experts" if self.experts is not None else "gated delta nets"
            problem = f"with {what} Megatron trains TP under sequence parallelism only"
            hint = "Set sequence_parallel to true and plan again"
            raise PlannerError(file, "sequence_parallel", False, problem, hint)

    @property
    def profiled(self) -> ProfiledModel:
        """Returns the part of the model that ``profile`` measures.

        Raises:
            PlannerError: A hybrid model with layers that are not measured.
        """
        missing = [kind for kind, _ in self.kinds if kind not in MEASURED_AS]
        if missing:
            kind = f"{missing[0]} ({schema.KINDS[missing[0]]})"
            problem = f"layers {kind} are not measured: their kernels are priced only"
            raise PlannerError("model", "pattern", self.pattern, problem, "Plan without --profile")
        x, latent = self.experts, self.latent
        experts, attention = None, None
        if x is not None:
            widths = x.ffn_hidden_size, x.shared_ffn_hidden_size
            experts = ProfiledExperts(x.count, x.top_k, *widths, dense=x.dense_layers > 0)
        if latent is not None:
            attention = ProfiledLatent(**latent.model_dump())
        same = (
            "name",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "vocab_size",
            "seq_length",
            "precision",
        )
        return ProfiledModel(
            **{name: getattr(self, name) for name in same},
            num_query_groups=self.groups,
            head_size=self.head_size or 0,
            experts=experts,
            latent=attention,
            window=self.attention_window or 0 if self.windowed_layers else 0,
            windowed=self.windowed_layers == 1,
            kinds="".join(sorted(kind for kind, _ in self.kinds)),
        )

    def check_profile(self, other: ProfiledModel, file: str) -> None:
        """Raise a PlannerError when a profile belongs to another model or precision."""
        keys = "hidden_size ffn_hidden_size num_attention_heads num_query_groups vocab_size seq_length precision"
        for key in [*keys.split(), "experts", "latent", "window", "kinds"]:
            found, mine = getattr(other, key), getattr(self.profiled, key)
            if found != mine:
                problem = f"the profile is of another model (this one: {mine!r})"
                hint = f"Profile this model with '{command()} profile'"
                raise PlannerError(file, f"model.{key}", found, problem, hint)


def load_model(
    path: str | os.PathLike[str],
    *,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    document_lengths: model_parts.Lengths | None = None,
    precision: Precision | None = None,
) -> Model:
    """Read a model file, a Hugging Face ``config.json`` or a Megatron checkpoint's arguments; raises PlannerError.

    Args:
        path: The file, a folder with a ``config.json`` or a checkpoint, or a name in ``data/known_models.json``.
        seq_length, global_batch_size, document_lengths, precision: In place of what the file says, or where it says
            nothing; a model that is given by its name has sequences of 4096 tokens, and 256 of them.
    """
    file, known = str(path), known_models()
    body = known.get(file.lower()) if not os.path.exists(path) else None
    if body is not None:
        seq_length, global_batch_size = seq_length or 4096, global_batch_size or 256
    if Path(path).is_dir() and (Path(path) / "config.json").is_file():
        file = str(Path(path) / "config.json")
    if Path(file).is_dir() or Path(file).suffix == ".pt":
        from .model_arguments import checkpoint_arguments, from_arguments

        arguments, file = checkpoint_arguments(file)
        document: Any = from_arguments(arguments, file)
    else:
        hint = "" if os.path.lexists(path) else f"Known by name: {', '.join(known)}. Of others give the config.json"
        # Nemotron's have an upper bound that is Infinity.
        document = (body and {**body, "_name_or_path": file}) or read_yaml(file, constants_as_text=True, hint=hint)
        if not (isinstance(document, dict) and document.keys() & {"model_type", "architectures"}):
            document = read_yaml(file)
        else:  # of Hugging Face
            from .model_configs import from_config

            document = from_config(document, file, seq_length)
            for key, given in (("seq_length", seq_length), ("global_batch_size", global_batch_size)):
                if given is None:
                    option = "--" + key.replace("_", "-")
                    raise PlannerError(file, key, None, "a config.json does not say it", f"Give {option} N")
    if isinstance(document, dict):
        options = {"seq_length": seq_length, "global_batch_size": global_batch_size}
        options |= {"document_lengths": document_lengths, "precision": precision}  # type: ignore[dict-item]
        document = document | {key: value for key, value in options.items() if value is not None}
    return model_from_document(document, file)


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Returns the ``config.json`` of models that can be given by name; the file says where the sizes are from."""
    return {name: entry["config"] for name, entry in data("known_models.json").items()}


def model_of(options: argparse.Namespace) -> Model:
    """The model that a command line names; see :func:`load_model`."""
    lengths = getattr(options, "document_lengths", None)
    return load_model(
        options.model,
        seq_length=getattr(options, "seq_length", None),
        global_batch_size=getattr(options, "global_batch_size", None),
        document_lengths=model_parts.read_lengths(lengths) if lengths else None,
        precision=getattr(options, "precision", None),
    )


def model_from_document(document: Any, file: str) -> Model:
    """A Model from parsed YAML; see ``load_model``."""
    if not isinstance(document, dict):
        raise PlannerError(file, "(document)", document, "expected a mapping of keys to values")
    pattern = document.get("pattern")
    if isinstance(pattern, str) and pattern:  # which says how many layers there are
        document = schema.sizes_of(pattern) | document
    return validated(Model, document, file)
