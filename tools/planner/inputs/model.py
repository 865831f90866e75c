"""The model file: the shape of a decoder-only transformer, its batch and its numerics, and what they imply."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_het import safe_io as untrusted
from megatron_het.plan.validate import LARGEST
from megatron_het.safe_io.reading import Inert, read_pickled

from ..errors import PlannerError, command, from_file_error, validated
from .catalog import Format, Precision
from .documents import Lengths, lengths_problem, read_lengths, share_left
from .files import read_yaml
from .model_configs import from_config, is_config
from .model_parts import MODEL_FLAGS, Experts, FlagValue, Latent, are_first, check_sizes, flag_words, pattern_text
from .names import text_problem
from .profile_schema import ProfiledExperts, ProfiledLatent, ProfiledModel

# Models from the arguments in a Megatron checkpoint.


Config = Mapping[str, Any]


def checkpoint_arguments(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The arguments of the run that wrote a Megatron checkpoint, and the file that holds them.

    Args:
        path: The folder of all checkpoints, of one iteration, or the file ``common.pt``.

    Raises:
        PlannerError: No checkpoint in the folder, or one without arguments.
    """
    given = Path(path)
    file = given if given.suffix == ".pt" else _common_file(given)
    try:
        value = read_pickled(file)
    except untrusted.FileError as error:
        raise from_file_error(error) from None
    found = value.get("args") if isinstance(value, dict) else None
    if not isinstance(found, Inert) or not found.state:
        raise PlannerError(str(file), "args", None, "this checkpoint does not hold the arguments of its run")
    return {str(name): plain for name, plain in found.state.items()}, str(file)


def _common_file(folder: Path) -> Path:
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        try:
            word = untrusted.read_text(tracker, 100).strip()
        except untrusted.FileError as error:
            raise from_file_error(error) from None
        if word != "release" and not (word.isascii() and word.isdigit()):
            raise PlannerError(str(tracker), "(file)", word[:50], "expected the number of an iteration, or 'release'")
        folder /= word if word == "release" else f"iter_{int(word):07}"
    if not (folder / "common.pt").is_file():
        raise PlannerError(
            str(folder),
            "(folder)",
            None,
            "neither a Megatron checkpoint (common.pt) nor a Hugging Face model (config.json)",
            "Name a folder that --save wrote with --ckpt-format torch_dist, or a model file",
        )
    return folder / "common.pt"


def from_arguments(arguments: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Our model document from the arguments of a Megatron run."""

    def number(name: str, default: int | None = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    def switched(name: str) -> bool:
        return arguments.get(name) is True

    document: dict[str, Any] = {
        "name": Path(file).resolve().parent.name or "checkpoint",
        "num_query_groups": number("num_query_groups") if switched("group_query_attention") else None,
        "vocab_size": number("padded_vocab_size", number("vocab_size")),
        "precision": "bf16" if switched("bf16") else "fp16" if switched("fp16") else "fp32",
        "gated": switched("swiglu"),
        "biases": switched("add_bias_linear"),
        "tied_embeddings": not switched("untie_embeddings_and_output_weights"),
        "distributed_optimizer": switched("use_distributed_optimizer"),
        # Megatron clears it where TP is 1, and with experts TP needs it.
        "sequence_parallel": switched("sequence_parallel") or bool(arguments.get("num_experts")),
    }
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"):
        document[name] = number(name)
    document["global_batch_size"] = number("global_batch_size")
    document["mtp_num_layers"] = number("mtp_num_layers", 0)
    if arguments.get("position_embedding_type") == "learned_absolute":
        document["learned_positions"] = number("max_position_embeddings")
    document |= _parts(arguments, number, document)
    document["flags"] = _flags(arguments, document) or None
    return {key: value for key, value in document.items() if value is not None}


def _flags(arguments: Mapping[str, Any], document: Config) -> dict[str, FlagValue]:
    """Flags of the model that differ from Megatron's defaults, and those whose value a document implies otherwise."""
    found: dict[str, FlagValue] = {}
    for name, (argument, default) in MODEL_FLAGS.items():
        value = arguments.get(argument, default)
        if isinstance(value, list | tuple):
            numbers = all(isinstance(item, int) for item in value)
            value = pattern_text(value) if value and numbers else value[0] if len(value) == 1 else None
        if name == "no-yarn-correction-range-round-to-int":
            value = False if value is False else None
            found |= {} if value is None else {name: True}
            continue
        if value is None or value == default or not isinstance(value, bool | int | float | str):
            continue
        found[name] = True if isinstance(default, bool) or name.startswith("no-yarn") else value
    found["normalization"] = str(arguments.get("normalization") or "LayerNorm")
    for name in ("attention-dropout", "hidden-dropout"):  # emit's default is 0, Megatron's is not
        value = arguments.get(MODEL_FLAGS[name][0], 0)
        found.pop(name, None)
        if isinstance(value, int | float) and value:
            found[name] = float(value)
    if document.get("learned_positions") or found.get("position-embedding-type") == "rope":
        found.pop("position-embedding-type", None)
    dense = document.get("experts", {})
    if not dense.get("dense_layers") or dense.get("dense_first"):
        found.pop("moe-layer-freq", None)
    if isinstance(found.get("window-attn-skip-freq"), int):
        found.pop("window-attn-skip-freq")  # windowed_layers says it
    return found


def _parts(arguments: Mapping[str, Any], number: Callable[..., Any], document: Config) -> dict[str, Any]:
    """Experts, latent attention and wide heads."""
    found: dict[str, Any] = {}
    width, heads = arguments.get("kv_channels"), document["num_attention_heads"]
    latent = arguments.get("multi_latent_attention") is True
    if isinstance(width, int) and isinstance(heads, int) and not latent and width * heads != document["hidden_size"]:
        found["head_size"] = width
    if arguments.get("num_experts"):
        pattern = arguments.get("moe_layer_freq")
        if isinstance(pattern, int) and isinstance(document["num_layers"], int) and pattern > 0:
            pattern = [int(layer % pattern == 0) for layer in range(min(document["num_layers"], 10_000))]
        dense = [i for i, sparse in enumerate(pattern) if not sparse] if isinstance(pattern, list) else []
        found["experts"] = {
            "count": arguments["num_experts"],
            "top_k": number("moe_router_topk", 2),
            "ffn_hidden_size": number("moe_ffn_hidden_size", document["ffn_hidden_size"]),
            "shared_ffn_hidden_size": number("moe_shared_expert_intermediate_size", 0),
            "dense_layers": len(dense),
            "dense_first": are_first(dense),
        }
    window, period = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if isinstance(window, list | tuple) and window:
        found["attention_window"] = window[0] + 1
        if isinstance(period, list) and period:
            found["windowed_layers"] = sum(map(bool, period)) / len(period)
        else:
            found["windowed_layers"] = 1 - 1 / period if period else 1.0
    if latent:
        found["latent"] = {
            "query_rank": number("q_lora_rank", 0),
            "key_value_rank": number("kv_lora_rank"),
            "nope_size": number("qk_head_dim"),
            "rope_size": number("qk_pos_emb_head_dim"),
            "value_size": number("v_head_dim"),
        }
    return found


Recompute = Literal["none", "selective", "full"]


def _size(name: str) -> Any:
    """A size that is required, within the bounds that plans have too."""
    return Field(ge=1, le=LARGEST[name])


class Model(BaseModel):
    """A model file.

    Attributes:
        global_batch_size: Sequences per iteration; the planner never changes it.
        micro_batch_sizes: Allowed micro batch sizes; all powers of two when empty.
        gated: SwiGLU or similar (three matrices in the MLP instead of two).
        learned_positions: Rows of a learned position table, at least ``seq_length``; 0 without one (RoPE).
        distributed_optimizer: Whether optimizer state may be sharded over data parallelism.
        sequence_parallel: Whether norms and residuals are split over TP; on by default with experts.
        recompute: Allowed activation recompute granularities.
        attention: ``flash`` where GPU and precision (fp16, bf16) have it, else unfused; ``unfused`` everywhere;
            or ``fused`` everywhere.
        head_size: Width of one attention head, where it is not ``hidden_size / num_attention_heads``.
        attention_window, windowed_layers: Keys that a query sees in layers with a sliding window, and the share
            of such layers.
        document_lengths: Of documents packed into sequences that do not see each other: a mean, or a sample; none
            where a sequence is one document.
        experts: Mixture of experts in place of the MLP.
        latent: Multi-head latent attention.
        fp8: Linear layers compute in fp8 (attention, output layer and the rest in ``precision``).
        fp4: The same in fp4 (NVFP4).
        mtp_num_layers: Layers for multi-token prediction on the last stage, which ``num_layers`` does not count; 0
            trains without them.
        flags: Megatron's flags of the model that no other field stands for, without dashes: ``rotary-base: 500000``,
            ``qk-layernorm: true`` (``model_parts.MODEL_FLAGS``).
        lost: Fields of another format that Megatron has no flag for, with the reason: the model can be priced, and
            not be trained.
        unread: Fields of another format that are not known here, with their values, and small differences that stay.
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
    global_batch_size: int = _size("global_batch_size")
    micro_batch_sizes: tuple[int, ...] = ()
    precision: Precision = "bf16"
    gated: bool = True
    biases: bool = False
    tied_embeddings: bool = False
    learned_positions: int = Field(default=0, ge=0, le=LARGEST["seq_length"])
    distributed_optimizer: bool = False
    experts: Experts | None = None
    # Megatron trains experts with TP under sequence parallelism only.
    sequence_parallel: bool = Field(default_factory=lambda given: given.get("experts") is not None)
    recompute: tuple[Recompute, ...] = ("none", "full")
    attention: Literal["flash", "unfused", "fused"] = "flash"
    head_size: int | None = Field(default=None, ge=1)
    attention_window: int | None = Field(default=None, ge=1)
    windowed_layers: float = Field(default=0.0, ge=0, le=1)
    document_lengths: Lengths | None = None
    latent: Latent | None = None
    fp8: bool = False
    fp4: bool = False
    mtp_num_layers: int = Field(default=0, ge=0, le=LARGEST["num_layers"])
    flags: dict[str, FlagValue] = {}
    lost: dict[str, str] = {}
    unread: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if problem := text_problem(value):
            raise ValueError(problem)
        return value

    @field_validator("document_lengths")
    @classmethod
    def _are_lengths(cls, value: Lengths | None) -> Lengths | None:
        if value is not None and (problem := lengths_problem(value)):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        check_sizes(self)
        return self

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
        """Fields of this model that are priced, but that no run with a plan has yet."""
        has_pattern = "window-attn-skip-freq" in self.flags or self.window_period is not None
        parts = ["attention_window"] if self.attention_window is not None and not has_pattern else []
        parts += ["fp4"] if self.fp4 else []
        x = self.experts
        runs = x is None or x.runs or (x.dropless and "moe-layer-freq" in self.flags)
        return parts + ([] if runs else ["experts"]) + list(self.lost)

    @property
    def notes(self) -> list[str]:
        """Returns what people should know of the file that the model was read from, one line each."""
        found = []
        if self.flags:
            found.append(f"flags of the model: {' '.join(flag_words(self.flags))}")
        if self.lost:
            found.append("Megatron cannot train this model: " + "; ".join(f"{k} = {v}" for k, v in self.lost.items()))
        if self.unread:
            found.append("not taken over: " + "; ".join(self.unread))
        return found

    @property
    def window_period(self) -> int | None:
        """Every so many layers one sees all keys, 0 if none does; None where the share of layers does not say which."""
        if self.windowed_layers == 1:
            return 0
        period = round(1 / (1 - self.windowed_layers))
        return period if period > 1 and abs(1 - 1 / period - self.windowed_layers) < 1e-6 else None

    def check_dry_run(self, hint: str) -> None:
        """Raise a PlannerError when a dry run cannot train the model.

        Args:
            hint: What to do.
        """
        if self.not_run:
            name, problem = self.not_run[0], "is priced, but no run with a plan has it yet"
            self._check_lost("model")
            raise PlannerError("model", name, str(getattr(self, name)), problem, hint)
        if self.fp8:
            raise PlannerError("model", "fp8", True, "without a GPU nothing stands in for layers in fp8", hint)

    def _check_lost(self, file: str) -> None:
        for key, reason in self.lost.items():
            raise PlannerError(
                file,
                key,
                None,
                f"{reason}, so Megatron would train another model",
                "A plan can be made and priced; to train another model on purpose, write a model file (docs/models.md)",
            )

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values)."""
        return self.head_dim * self.groups

    @property
    def linear_precision(self) -> Format:
        """Returns what linear layers compute in."""
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
            tp: Tensor-parallel size.
            ep: Parts over which the experts are divided.
            expert_tp: Ranks that cut one expert, 0 for the rest of the TP group.
        """
        h, f = self.hidden_size, self.ffn_hidden_size
        matrices = 3 if self.gated else 2
        total = (self._attention_parameters() + h * f * matrices) // tp + 2 * h * (2 if self.biases else 1)
        if self.biases:
            total += (self.attention_size + 2 * self.kv_size + f) // tp + 2 * h
        x = self.experts
        if x is not None:
            parts = ep * (expert_tp or max(1, tp // ep))
            routed = h * matrices * x.ffn_hidden_size * x.count // parts + h * matrices * x.shared_ffn_hidden_size // tp
            share = 1 - min(1.0, x.dense_layers / self.num_layers)
            total += round(share * (routed + h * x.count - h * f * matrices // tp))
        return total

    def _attention_parameters(self) -> int:
        h, x = self.hidden_size, self.latent
        if x is None:
            return h * (self.attention_size + 2 * self.kv_size) + self.attention_size * h
        heads = self.num_attention_heads
        return (
            sum(int(outputs * inputs) for outputs, inputs in x.query_products(h, heads))
            + h * (x.key_value_rank + x.rope_size)
            + heads * x.key_value_rank * (x.nope_size + x.value_size)
            + heads * x.value_size * h
        )

    def embedding_parameters(self, tp: int = 1) -> int:
        """Parameters of the token and position tables on one rank."""
        return self._rows(tp) * self.hidden_size + self.learned_positions * self.hidden_size

    def head_parameters(self, tp: int = 1) -> int:
        """Final norm and output projection on one rank (tied: held a second time on the last stage)."""
        return self._rows(tp) * self.hidden_size + self.hidden_size * (2 if self.biases else 1)

    def _rows(self, tp: int) -> int:
        """Rows of the vocabulary on one rank, padded as Megatron does (to a multiple of 128 * TP)."""
        return -(-self.vocab_size // (128 * tp)) * 128

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model (a tied table counts once)."""
        head = self.hidden_size if self.tied_embeddings else self.vocab_size * self.hidden_size
        later = self.layer_parameters() + 2 * self.hidden_size**2 + 3 * self.hidden_size * (2 if self.biases else 1)
        return (
            self.num_layers * self.layer_parameters()
            + self.mtp_num_layers * later
            + self.vocab_size * self.hidden_size
            + self.learned_positions * self.hidden_size
            + head
        )

    def layer_flops(self, tokens: int, context: float | None = None) -> float:
        """Forward FLOPs of one layer for ``tokens`` tokens of one sequence (with experts: the mean layer).

        Args:
            tokens: Tokens of the slice.
            context: Average number of keys per query; half the sequence by default (causal).
        """
        x, width = self.experts, float(self.ffn_hidden_size)
        if x is not None:
            share = 1 - min(1.0, x.dense_layers / self.num_layers)
            width += share * (x.top_k * x.ffn_hidden_size + x.shared_ffn_hidden_size - self.ffn_hidden_size)
        matrices = self._attention_parameters() + self.hidden_size * width * (3 if self.gated else 2)
        keys = self.mean_keys() if context is None else context
        return 2.0 * tokens * matrices + 2.0 * tokens * keys * self.score_size

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
        """Returns what documents leave of the attention of whole sequences."""
        if self.document_lengths is None:
            return 1.0
        return share_left(self.document_lengths, self.seq_length, self.attention_window, self.windowed_layers)

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
            raise PlannerError(
                file,
                key,
                str(getattr(self, key)),
                "the planner prices this, but runs with a plan do not have it yet",
                f"Remove {', '.join(self.not_run)} to write launch files",
            )
        if self.experts is not None and not self.sequence_parallel:
            problem = "with experts Megatron trains TP under sequence parallelism only"
            raise PlannerError(
                file, "sequence_parallel", False, problem, "Set sequence_parallel to true and plan again"
            )

    @property
    def profiled(self) -> ProfiledModel:
        """Returns what ``profile`` measures of it."""
        x, latent = self.experts, self.latent
        experts, attention = None, None
        if x is not None:
            widths = x.ffn_hidden_size, x.shared_ffn_hidden_size
            experts = ProfiledExperts(x.count, x.top_k, *widths, dense=x.dense_layers > 0)
        if latent is not None:
            attention = ProfiledLatent(**latent.model_dump())
        return ProfiledModel(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.groups,
            vocab_size=self.vocab_size,
            seq_length=self.seq_length,
            precision=self.precision,
            name=self.name,
            head_size=self.head_size or 0,
            experts=experts,
            latent=attention,
            window=self.attention_window or 0 if self.windowed_layers else 0,
            windowed=self.windowed_layers == 1,
            sequence_parallel=self.sequence_parallel,
        )

    def check_profile(self, other: ProfiledModel, file: str) -> None:
        """Raise a PlannerError when a profile belongs to another model or precision."""
        keys = "hidden_size ffn_hidden_size num_attention_heads num_query_groups vocab_size seq_length precision"
        for key in [*keys.split(), "experts", "latent", "window"]:
            found, mine = getattr(other, key), getattr(self.profiled, key)
            if found != mine:
                raise PlannerError(
                    file,
                    f"model.{key}",
                    found,
                    f"the profile is of another model (this one: {mine!r})",
                    f"Profile this model with '{command()} profile'",
                )


def load_model(
    path: str | os.PathLike[str],
    *,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    document_lengths: Lengths | None = None,
    precision: Precision | None = None,
) -> Model:
    """Read a model file (YAML or JSON), a Hugging Face ``config.json`` or the arguments in a Megatron checkpoint.

    Args:
        path: The file, or a folder with a ``config.json`` or a checkpoint.
        seq_length, global_batch_size, document_lengths, precision: In place of what the file says, or where it says
            nothing.

    Raises:
        PlannerError: naming file, key and value.
    """
    file = str(path)
    if Path(path).is_dir() and (Path(path) / "config.json").is_file():
        file = str(Path(path) / "config.json")
    if Path(file).is_dir() or Path(file).suffix == ".pt":
        arguments, file = checkpoint_arguments(file)
        document: Any = from_arguments(arguments, file)
    else:
        document = read_yaml(file)
        if is_config(document):
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


def model_of(options: argparse.Namespace) -> Model:
    """The model that a command line names; see :func:`load_model`."""
    return load_model(
        options.model,
        seq_length=getattr(options, "seq_length", None),
        global_batch_size=getattr(options, "global_batch_size", None),
        document_lengths=read_lengths(given) if (given := getattr(options, "document_lengths", None)) else None,
        precision=getattr(options, "precision", None),
    )


def model_from_document(document: Any, file: str) -> Model:
    """A Model from parsed YAML; see ``load_model``."""
    if not isinstance(document, dict):
        raise PlannerError(file, "(document)", type(document).__name__, "expected a mapping")
    return validated(Model, document, file)
