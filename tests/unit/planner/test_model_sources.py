"""Models from a Hugging Face config.json and from a Megatron checkpoint's arguments."""

import argparse
import enum
import json
import os
import pickle
import zipfile
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.configs import FILES
from megatron_het.plan import ModelShape
from tools.planner.__main__ import main
from tools.planner.costs.layer import activation_bytes
from tools.planner.emit.flags import model_arguments
from tools.planner.errors import PlannerError
from tools.planner.inputs.model import Model, load_model
from tools.planner.inputs.model_arguments import checkpoint_arguments
from tools.planner.inputs.model_configs import from_config
from tools.planner.inputs.model_parts import Experts, Latent

LLAMA, QWEN, MIXTRAL, DEEPSEEK = (FILES[name] for name in ("llama-3-8b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"))


def write(folder, config, name="config.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder / name


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("qwen3-8b", 8.19), ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5), ("mixtral-8x7b", 46.7),
     ("deepseek-v3", 671.0)],
)  # fmt: skip
def test_published_sizes(tmp_path, name, billions):
    file = write(tmp_path / "model", FILES[name] | {"num_nextn_predict_layers": 0})
    model = load_model(file, seq_length=4096, global_batch_size=256)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.not_run == [] and model.precision == "bf16" and model.name == "model"
    assert model.distributed_optimizer and model.sequence_parallel
    assert load_model(tmp_path / "model", seq_length=4096, global_batch_size=256) == model


def test_layers_for_later_tokens_are_counted(tmp_path):
    """DeepSeek-V3 publishes 11.5 billion parameters that its module does not share; ours is a mean layer."""
    sizes = {"seq_length": 4096, "global_batch_size": 256}
    plain = load_model(write(tmp_path / "plain", {**DEEPSEEK, "num_nextn_predict_layers": 0}), **sizes)
    later = load_model(write(tmp_path / "later", {**DEEPSEEK, "num_nextn_predict_layers": 1}), **sizes)
    assert plain.mtp_num_layers == 0 and later.mtp_num_layers == 1
    assert (later.parameters - plain.parameters) / 1e9 == pytest.approx(11.5, rel=0.05)
    share = (later.iteration_flops - plain.iteration_flops) / plain.iteration_flops
    assert 1 / 61 < share < 3 / 61  # the output layer takes more than a layer
    with pytest.raises(PlannerError, match="mtp_num_layers = 62 is more than"):
        load_model(write(tmp_path / "many", {**DEEPSEEK, "num_nextn_predict_layers": 62}), **sizes)


def test_what_a_config_lacks_or_cannot_be(tmp_path):
    file = write(tmp_path, LLAMA)
    with pytest.raises(PlannerError, match="--seq-length"):
        load_model(file)
    for change, word in (
        ({"model_type": "qwen3_6"}, "unknown architecture. Near: qwen3_5, "),
        ({"model_type": ["llama"]}, "unknown architecture"),
        ({"num_hidden_layers": "many"}, "whole number"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"num_key_value_heads": 7}, "does not divide"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": "wide"}, "head_dim"),
    ):
        with pytest.raises(PlannerError, match=word):
            load_model(write(tmp_path, {**LLAMA, **change}), seq_length=8, global_batch_size=8)
    with pytest.raises(PlannerError, match="kv_lora_rank"):
        load_model(write(tmp_path, {**DEEPSEEK, "kv_lora_rank": None}), seq_length=8, global_batch_size=8)


def test_windows():
    found = from_config(WINDOWED, "config.json")
    assert (found["attention_window"], found["windowed_layers"]) == (64, 0.25)


CLUSTER = {"nodes": [{"gpu": "H200", "count": 16, "gpus_per_node": 8, "network_bytes_per_s": 4e11}]}


def words_of(folder, config):
    """Options of all commands, and of ``plan``."""
    (folder / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    common = ["--cluster", str(folder / "c.yaml"), "--model", str(write(folder, config))]
    common += ["--seq-length", "4096", "--global-batch-size", "128"]
    return common, ["--out", str(folder / "p.json"), "--schedules", "1f1b", "--limit-s", "30"]


WINDOWED = {**QWEN, "use_sliding_window": True, "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 9 + ["full_attention"] * 27}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (LLAMA, None),
        (QWEN, None),
        (DEEPSEEK, None),
        (WINDOWED, None),
        ({**LLAMA, "attn_logit_softcapping": 50.0, "torch_dtype": "float32"}, "attn_logit_softcapping = 50.0"),
    ],
)
def test_commands_take_a_config(tmp_path, capsys, config, word):
    common, plan = words_of(tmp_path, config)
    assert main(["plan", *common, *plan]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("priced only: ") == bool(word) and (", fp32 " in said) == bool(word)
    assert not word or f"Megatron cannot train this model: {word}" in said
    file, out = str(tmp_path / "p.json"), str(tmp_path / "run")
    refused = [["emit", file, *common, "--out", out, "--train-iters", "5"]]
    if not word:
        assert main(*refused) == 0, capsys.readouterr().err
    else:  # refused before a search or a rank is started, with what is missing
        for command in (*refused, ["plan", *common, *plan, "--verify"], ["dry-run", file, *common[2:]]):
            assert main(command) == 2
            assert "so Megatron would train another model" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_plan_check_and_emit_say_what_was_taken_over(tmp_path, capsys):
    common, plan = words_of(tmp_path, FILES["llama-3.2-1b"])
    file = str(tmp_path / "p.json")
    for command in (["plan", *plan], ["check", file]):
        assert main([*command, *common]) == 0
        assert "--rope-scaling-factor 32.0" in " ".join(capsys.readouterr().out.split())
    assert main(["emit", file, *common, "--out", str(tmp_path / "run")]) == 0
    arguments = (tmp_path / "run" / "args.sh").read_text()
    for line in ("--rope-scaling-factor 32.0", "--use-rope-scaling", "--norm-epsilon 1e-05", "--rotary-base 500000"):
        assert f"    {line}\n" in arguments
    assert "--untie-embeddings-and-output-weights" not in arguments


def test_a_plan_for_experts_is_emitted_with_their_flags(tmp_path, capsys):
    common, plan = words_of(tmp_path, MIXTRAL)
    assert main(["plan", *common, *plan]) == 0
    assert "priced only" not in capsys.readouterr().out
    assert json.loads((tmp_path / "p.json").read_text())["training"]["sequence_parallel"] is True
    assert main(["emit", str(tmp_path / "p.json"), *common, "--out", str(tmp_path / "run"), "--train-iters", "5"]) == 0
    written = (tmp_path / "run" / "args.sh").read_text()
    for line in ("--num-experts 8", "--moe-router-topk 2", "--moe-ffn-hidden-size 14336", "--sequence-parallel"):
        assert f"    {line}\n" in written, line
    body = json.loads((tmp_path / "p.json").read_text())
    replicas = [replica for stage in body["stages"] for replica in stage["replicas"]]
    divided = [i for i, replica in enumerate(replicas) if len(replica["ranks"]) % 2 == 0]
    assert divided
    for i in divided:
        replicas[i]["ep"] = 2
    for experts, code in ((8, 0), (7, 2)):
        write(tmp_path, {**MIXTRAL, "num_local_experts": experts})
        (tmp_path / "e.json").write_text(json.dumps(body))
        for command in (["check"], ["emit", "--out", str(tmp_path / f"run-{experts}")]):
            assert main([*command, str(tmp_path / "e.json"), *common]) == code
            assert not code or "does not divide the 7 experts" in capsys.readouterr().err
    emitted = json.loads((tmp_path / "run-8" / "plan.json").read_text())
    found = [replica.get("ep", 1) for stage in emitted["stages"] for replica in stage["replicas"]]
    assert found == [2 if i in divided else 1 for i in range(len(replicas))]


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "--moe-ffn-hidden-size 64"),
        ({"top_k": 1}, "--moe-router-pre-softmax"),
        ({"shared_ffn_hidden_size": 32}, "--moe-shared-expert-intermediate-size 32"),
        ({"dense_layers": 3}, "--moe-layer-freq [0]*3+[1]*2"),
        ({"dropless": False}, None),
        ({"dense_layers": 3, "dense_first": False}, None),
    ],
)
def test_flags_of_experts(changes, flags):
    made = Experts(**{"count": 4, "top_k": 2, "ffn_hidden_size": 64} | changes)
    assert made.runs == (flags is not None)
    assert not flags or flags in " ".join(model_arguments(PLAN, Model(**SMALL, experts=made)))


PLAN = SimpleNamespace(model=ModelShape(5, 64, 4, 4, 32, 96, None, False))
SMALL = {"num_layers": 6, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4,
         "vocab_size": 1000, "seq_length": 1024, "global_batch_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("share", "period", "flags"),
    [(1.0, 0, "--window-size 63,0"), (0.5, 2, "--window-size 63,0 --window-attn-skip-freq 2"),
     (5 / 6, 6, "--window-size 63,0 --window-attn-skip-freq 6"), (0.4, None, "")],
)  # fmt: skip
def test_flags_of_windows(tmp_path, share, period, flags):
    model = Model(**SMALL, attention_window=64, windowed_layers=share)
    assert model.window_period == period and bool(model.not_run) == (period is None)
    assert not flags or " ".join(model_arguments(PLAN, model)).endswith(flags)
    given = {"window_size": (63, 0), "window_attn_skip_freq": period or None}
    if period is not None:
        again = load_model(checkpoint(tmp_path / "run", **given))
        assert (again.attention_window, again.windowed_layers) == (64, pytest.approx(share))


def test_flags_of_latent_attention():
    x = Latent(query_rank=1536, key_value_rank=512, nope_size=128, rope_size=64, value_size=128)
    model = Model(**SMALL, latent=x)
    assert not model.not_run
    assert " ".join(model_arguments(PLAN, model)).endswith(
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128"
    )
    # Megatron refuses its fused kernel for latent attention without yarn.
    without_yarn = Model(**SMALL, latent=x, flags={"rope-type": "rope"})
    assert "--no-rope-fusion" in model_arguments(PLAN, without_yarn)
    assert "--no-rope-fusion" not in model_arguments(PLAN, model)


def test_slices_cache_what_is_compressed():
    x = Latent(query_rank=512, key_value_rank=64, nope_size=32, rope_size=16, value_size=32)
    plain, latent = Model(**SMALL), Model(**SMALL, latent=x)
    tokens = plain.seq_length
    for tp in (1, 2):
        caches = [activation_bytes(m, "layer", 1, tp, "full", True, sliced=True) for m in (plain, latent)]
        rest = [activation_bytes(m, "layer", 1, tp, "full", True) for m in (plain, latent)]
        found = [cache - other for cache, other in zip(caches, rest, strict=True)]
        assert found == [tokens * 6 * 2 * plain.kv_size / tp, tokens * 6 * (64 + 16)]


class Colour(enum.Enum):
    """Megatron's arguments hold enumerations of its own."""

    RED = 1


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["HET_TEST_EVIL"],)


def checkpoint(folder, **changes):
    arguments = {
        "num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8,
        "group_query_attention": True, "num_query_groups": 4, "kv_channels": 64, "padded_vocab_size": 32128,
        "seq_length": 1024, "max_position_embeddings": 1024, "global_batch_size": 64, "bf16": True, "fp16": False,
        "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True, "position_embedding_type": "rope", "attention_backend": Colour.RED,
        "num_experts": None, "multi_latent_attention": False,
    } | changes  # fmt: skip
    iteration = folder / "iter_0000020"
    iteration.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    body = {"args": argparse.Namespace(**arguments), "iteration": 20, "colours": {Colour.RED}, "evil": Evil()}
    with zipfile.ZipFile(iteration / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(body, protocol=2))
    return folder


@pytest.fixture(autouse=True)
def evil(tmp_path, monkeypatch):
    monkeypatch.setenv("HET_TEST_EVIL", str(tmp_path / "evil"))
    yield
    assert not (tmp_path / "evil").exists(), "a pickle has run code"


def test_arguments_of_a_checkpoint(tmp_path):
    folder = checkpoint(tmp_path / "run")
    model = load_model(folder)
    assert (model.num_layers, model.groups, model.vocab_size, model.seq_length) == (6, 4, 32128, 1024)
    assert (model.precision, model.gated, model.tied_embeddings, model.distributed_optimizer) == (
        "bf16", True, False, True,
    )  # fmt: skip
    assert model.global_batch_size == 64 and model.not_run == [] and model.head_size is None
    assert load_model(folder / "iter_0000020") == load_model(folder / "iter_0000020" / "common.pt") == model
    assert load_model(folder, global_batch_size=32).global_batch_size == 32
    other = load_model(checkpoint(tmp_path / "o", num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=99,
                                  moe_layer_freq=[0, 1, 1, 1, 1, 1], position_embedding_type="learned_absolute",
                                  bf16=False, kv_channels=32))  # fmt: skip
    assert other.experts is not None and (other.experts.dense_layers, other.experts.ffn_hidden_size) == (1, 99)
    assert other.sequence_parallel and not model.sequence_parallel
    assert (other.learned_positions, other.precision, other.head_size) == (1024, "fp32", 32)


def test_real_torch_files_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    body = {"args": argparse.Namespace(num_layers=2, dtype=torch.bfloat16), "x": torch.ones(3)}
    torch.save(body, tmp_path / "common.pt")
    assert checkpoint_arguments(tmp_path / "common.pt")[0]["num_layers"] == 2


def test_damaged_checkpoints(tmp_path):
    folder = checkpoint(tmp_path / "run")
    file = folder / "iter_0000020" / "common.pt"
    whole = file.read_bytes()
    for damage in (b"", whole[:200], b"PK" + whole[2:][::-1]):
        file.write_bytes(damage)
        with pytest.raises(PlannerError):
            load_model(folder)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"no": "arguments"}))
    with pytest.raises(PlannerError, match="does not hold the arguments"):
        load_model(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(PlannerError, match="number of an iteration"):
        load_model(folder)
    with pytest.raises(PlannerError, match="neither a Megatron checkpoint"):
        load_model(tmp_path)
