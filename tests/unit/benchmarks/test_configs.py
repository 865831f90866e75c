"""Hugging Face's config.json: every field is taken over or refused, and Megatron then computes the same logits."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import configs
from benchmarks.config_models import SMALL, logit_difference, one_rank
from benchmarks.configs import FILES
from benchmarks.machine import write_between_marks
from testing.runner import words
from tools.planner.inputs.model import load_model
from tools.planner.inputs.model_configs import from_config
from tools.planner.inputs.model_families import FAMILIES
from tools.planner.inputs.model_parts import MODEL_FLAGS

SHAPES = words(
    """model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size
    n_embd n_layer n_head n_positions num_experts num_local_experts n_routed_experts moe_intermediate_size
    shared_expert_intermediate_size kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    intermediate_size_mlp num_experts_per_tok head_dim layers_block_type layer_types"""
)


@pytest.fixture(scope="module")
def alone():
    with one_rank():
        yield


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_of_each_family_has_the_logits_of_hugging_face(alone, name):
    assert logit_difference(name) <= configs.MOST


def test_no_field_of_a_published_file_can_be_changed_unseen():
    assert len(FILES) >= 40
    found = configs.files()
    assert {
        name: entry["lost"] + entry["unread"] for name, entry in found.items() if entry["lost"] or entry["unread"]
    } == {}


# What the defaults of transformers leave out, or cannot be built with.
_COMPLETED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_shared_experts": 0},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
# Fields without effect under the defaults: others say the same, or the part is off.
_OVERRIDDEN = {
    "deepseek_v2": "head_dim qk_head_dim",
    "deepseek_v3": "head_dim qk_head_dim",
    "deepseek_v32": "head_dim qk_head_dim first_k_dense_replace index_head_dim index_n_heads index_topk layer_types",
    "dots1": "layer_types",
    "ernie4_5_moe": "moe_layer_end_index",
    "exaone4": "sliding_window_pattern",
    "gemma3_text": "_sliding_window_pattern",
    "glm4_moe_lite": "qk_head_dim",
    "glm_moe_dsa": "head_dim qk_head_dim first_k_dense_replace index_head_dim index_n_heads index_topk indexer_types"
    " layer_types",
    "llama4_text": "interleave_moe_layer_step layer_types moe_layers no_rope_layer_interval",
    "nemotron_h": "mtp_layers_block_type",
    "qwen2": "layer_types",
    "qwen2_moe": "layer_types",
    "qwen3": "layer_types",
    "smollm3": "layer_types no_rope_layer_interval",
}


def hugging_face_config(kind, **others):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**_COMPLETED.get(kind, {}), **others)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_what_a_file_leaves_out_is_what_transformers_takes(kind):
    full = hugging_face_config(kind).to_dict()
    bare = {key: value for key, value in full.items() if key in SHAPES}
    wanted, found = (from_config(config, "config.json", 512) for config in (full, bare))
    wanted["flags"].pop("init-method-std", None)
    wanted["mtp_num_layers"] = found.get("mtp_num_layers")  # transformers counts layers that it does not have
    found["mtp_num_layers"] = wanted["mtp_num_layers"]
    assert [line for line in wanted.get("unread", []) if line.partition(" = ")[0] in full] == []
    assert {**wanted, "lost": set(wanted.get("lost", {}).values())} == {
        **found,
        "lost": set(found.get("lost", {}).values()) | set(wanted.get("lost", {}).values()),
    }


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_no_field_of_a_family_can_be_changed_unseen(kind):
    lost = configs.lost_fields(hugging_face_config(kind).to_dict())
    assert set(lost) - set(configs._WITHOUT_MEANING) == set(words(_OVERRIDDEN.get(kind, "")))


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_model_has_as_many_parameters_as_in_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    config = hugging_face_config(kind, num_hidden_layers=4)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "num_nextn_predict_layers": 0}), encoding="utf-8")
    ours = load_model(file, seq_length=512, global_batch_size=1)
    # Indexers of sparse attention are not counted: 1 % of a layer.
    most = 1e-2 if "index_topk" in config.to_dict() else 5e-4
    assert ours.parameters == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=most)


def test_the_flags_of_a_model_are_those_of_megatron():
    from megatron.training.arguments import add_megatron_arguments

    actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
    known = {option: action for action in actions for option in action.option_strings}
    for name, (argument, default) in MODEL_FLAGS.items():
        action = known[f"--{name}"]
        assert action.dest == argument, name
        if not name.startswith("no-yarn"):  # which its opposite leaves open
            assert action.default == default, name
    emitted = {name for config in FILES.values() for name in configs.read(config)["flags"]}
    assert emitted <= set(MODEL_FLAGS)


def test_the_tables_of_the_documentation_are_those_of_the_code(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "models.md"
    made = Path(shutil.copy(page, tmp_path))
    write_between_marks(made, "benchmarks.configs", configs.tables())
    assert made.read_text() == page.read_text(), "run python -m benchmarks.configs --json OUT --markdown docs/models.md"
