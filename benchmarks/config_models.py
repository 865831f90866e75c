"""Compares small models of every family of ``model_configs`` in Hugging Face's and in Megatron's implementation."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml

from megatron_het.families import LATENT_SPEC
from tools.planner.costs.build import model_shape
from tools.planner.emit.flags import model_arguments
from tools.planner.inputs.model import Model, load_model

# Weights of a Hugging Face model under the names and in the layout of Megatron's GPTModel on one rank, for tests.

_LAYER = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.(\d+)\.(.+)")
_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8"))


def megatron_weights(state: Mapping[str, torch.Tensor], kind: str, config: Any) -> dict[str, torch.Tensor]:
    """Returns all weights of a model under Megatron's names."""
    found: dict[str, torch.Tensor] = {}
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        if match := _LAYER.fullmatch(name):
            # the names that most families use
            part = match[2].replace("feed_forward.", "mlp.").replace("mlp.shared_expert.", "mlp.shared_experts.")
            layers.setdefault(int(match[1]), {})[part.replace("self_attn.qkv_proj.", "attn.c_attn.")] = value
        else:
            found[_renamed(name, _DATA["outside"])] = value
    for layer, parts in layers.items():
        for name, value in _layer(parts, kind, config).items():
            found[f"decoder.layers.{layer}.{name}"] = value
    return found


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next(old for old in names if name.startswith(old))
    return names[old] + name[len(old) :]


def _layer(parts: dict[str, torch.Tensor], kind: str, config: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    is_latent = "self_attn.kv_a_proj_with_mqa.weight" in parts
    for name, given in parts.items():
        value = given.T if kind == "gpt2" and given.dim() == 2 else given
        if name.startswith("attn.c_attn."):
            found[f"self_attention.linear_qkv.{name.rsplit('.', 1)[1]}"] = _by_group(value, config)
        elif is_latent and name == "self_attn.q_proj.weight":
            found["self_attention.linear_q_proj.weight"] = value
        elif name.startswith("self_attn.q_proj."):
            end = name.rsplit(".", 1)[1]
            whole = torch.cat([parts[f"self_attn.{part}_proj.{end}"] for part in "qkv"])
            found[f"self_attention.linear_qkv.{end}"] = _by_group(whole, config)
        elif name.startswith(("self_attn.k_proj.", "self_attn.v_proj.")):
            continue  # with the one before
        elif ".up_proj." in name:
            if name.replace("up_proj", "gate_proj") not in parts:
                found[name.replace("up_proj", "linear_fc1")] = value
        elif ".gate_proj." in name:
            whole = torch.cat([value, parts[name.replace("gate_proj", "up_proj")]])
            found[name.replace("gate_proj", "linear_fc1")] = whole
        elif name.startswith("mlp.experts."):
            found |= _experts(name, value, kind)
        else:
            found[_renamed(name, _DATA["inside"])] = value
    return found


def _by_group(whole: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns the fused weight: queries, keys and values, group of heads by group."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = whole.shape[0] // (heads + 2 * groups)
    parts = whole.split([heads * width, groups * width, groups * width])
    by_group = [part.reshape(groups, -1, *whole.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(whole.shape)


def _experts(name: str, value: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Yields the experts of a layer one by one; ``value`` has all of them."""
    layer, end = ("linear_fc1", "gate_up_proj") if "gate_up_proj" in name else ("linear_fc2", "down_proj")
    suffix = "bias" if name.endswith("_bias") else "weight"
    found = {}
    for expert, given in enumerate(value):
        own = given.T if kind in ("gpt_oss", "llama4_text") and given.dim() == 2 else given
        if kind == "gpt_oss" and end == "gate_up_proj":  # gate and up take turns
            own = torch.cat([own[::2], own[1::2]])
        found[f"mlp.experts.local_experts.{expert}.{layer}.{suffix}"] = own
    return found


SEQ_LENGTH = 32
SMALL: dict[str, dict[str, Any]] = _DATA["small"]
"""Fields of the small models beyond those of their family and of the common shape."""


def small_config(name: str) -> dict[str, Any]:
    """Returns the ``config.json`` of a small model."""
    own = SMALL[name]
    shape = {} if own["model_type"] == "gpt2" else _DATA["shape"]
    has_base = "rope_parameters" in own or "rotary_emb_base" in own
    return {key: value for key, value in shape.items() if key != "rope_theta" or not has_base} | own


def small_model(name: str) -> tuple[Any, Model]:
    """Returns a small Hugging Face model with random weights, and the planner's model of its ``config.json``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = small_config(name)
    torch.manual_seed(1)
    kind = config["model_type"]
    theirs = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"})
    theirs._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)):
            # No weight is 0 or 1, so that a missing one changes the result.
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    with tempfile.TemporaryDirectory(prefix="het-config-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        read = load_model(file, seq_length=SEQ_LENGTH, global_batch_size=1)
    return model, read


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialize Megatron in this process alone, over gloo."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_het import megatron_patches

    megatron_patches.install("torch_norm")  # as in a run: zero-centred norms without Transformer Engine
    with tempfile.TemporaryDirectory(prefix="het-rank-") as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
            megatron_patches.uninstall("torch_norm")


def _arguments(words: list[str]) -> Any:
    """Returns Megatron's arguments, parsed by its own parser."""
    from megatron.training.arguments import parse_args, validate_args

    one_rank = mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with one_rank, mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]):
        args = parse_args()
        validate_args(args, {})
    return args


def megatron_model(read: Model, weights: Mapping[str, torch.Tensor]) -> Any:
    """Returns Megatron's model for the emitted flags, with weights loaded; every weight must be used exactly once."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_het.device import activate
    from megatron_het.runtime.training import complete_model_config

    emitted = model_arguments(SimpleNamespace(model=model_shape(read)), read)  # type: ignore[arg-type]
    words = [*emitted, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"]
    words += ["--vocab-size", str(read.vocab_size), "--make-vocab-size-divisible-by", str(read.vocab_size)]
    words += ["--tokenizer-type", "NullTokenizer", "--attention-dropout", "0", "--hidden-dropout", "0"]
    words += activate().default_flags()
    if read.latent is not None and "--spec" not in words:
        words += ["--spec", *LATENT_SPEC]
    args = _arguments(words)
    config = gpt_config_from_args(args)
    complete_model_config(config, args)
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups(), True, True)
    own = {k: v for k, v in model.state_dict().items() if v is not None and "_extra_state" not in k}
    ours = {k: v for k, v in weights.items() if k in own or not (k == "output_layer.weight" and read.tied_embeddings)}
    if set(own) != set(ours):
        raise AssertionError(f"Megatron has {sorted(set(own) - set(ours))}, the file {sorted(set(ours) - set(own))}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(ours[name])
    return model.eval()


def logit_difference(name: str) -> float:
    """Largest difference of logits of a small model between Hugging Face and Megatron, relative to the largest logit.

    Call it inside :func:`one_rank`.
    """
    theirs, read = small_model(name)
    weights = megatron_weights(theirs.state_dict(), theirs.config.model_type, theirs.config)
    ours = megatron_model(read, weights)
    tokens = torch.randint(0, read.vocab_size, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, use_cache=False).logits
        hidden = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
        found = ours(tokens, positions, hidden)
    return float((found - wanted).abs().max() / wanted.abs().max())
