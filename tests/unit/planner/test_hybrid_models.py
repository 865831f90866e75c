"""Hybrid models: prices of each kind of layer, stages cut between them, and what is written of them."""

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.configs import FILES
from megatron_het.plan.schema import later_layers, layers_of, with_chunks
from testing.planner_cases import LLAMA_8B, estimator_of
from tools.planner.costs.build import build_plan, check_same_model
from tools.planner.costs.candidate import Candidate, Group, Stage, layers_at
from tools.planner.costs.catalogcost import CatalogCosts
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import Spread
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.costs.stages import carried_bytes
from tools.planner.emit.flags import model_arguments
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model, load_model
from tools.planner.inputs.model_arguments import from_arguments
from tools.planner.inputs.model_configs import from_config
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal

SIZES: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 32000,
    "seq_length": 4096,
    "global_batch_size": 32,
    "micro_batch_sizes": (1,),
    "recompute": ("none",),
}
EXPERTS: dict[str, Any] = {"count": 8, "top_k": 2, "ffn_hidden_size": 4096}
MAMBA = {"heads": 128}
NEMOTRON_H_8B: dict[str, Any] = {
    "pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "ffn_hidden_size": 21504,
    "vocab_size": 131072,
    "gated": False,
    "mamba": MAMBA,
}


def hybrid_of(pattern: str, **more: Any) -> Model:
    layers, later = len(layers_of(pattern)), len(later_layers(pattern))
    return Model(pattern=pattern, num_layers=layers, mtp_num_layers=later, **SIZES | more)


def priced(model: Model, *nodes: tuple[str, int]) -> Estimator:
    cluster = Cluster(nodes=tuple(NodeGroup(gpu=gpu, count=1, gpus_per_node=n) for gpu, n in nodes))
    return estimator_of(cluster, model)


def two_stages(*layers: int, **more: Any) -> Candidate:
    return Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in layers), 1, **more)


def test_attention_and_mlp_are_together_a_layer_of_a_gpt_model():
    gpt, hybrid = Model(num_layers=4, **SIZES), hybrid_of("*-*-*-*-")
    assert hybrid.num_layers == 8 and hybrid.kinds == (("*", 4), ("-", 4))
    assert hybrid.parameters == gpt.parameters and hybrid.iteration_flops == pytest.approx(gpt.iteration_flops)
    for recompute in ("none", "full"):
        ours, theirs = (
            CatalogCosts(m, lambda gpu: catalog()[gpu]).cost("H100-SXM", "layer", 1, 2, recompute)
            for m in (hybrid, gpt)
        )
        assert 2 * ours.forward_s == pytest.approx(theirs.forward_s)
        assert 2 * ours.backward_s == pytest.approx(theirs.backward_s)
        if recompute == "none":
            assert 2 * ours.activation_bytes == pytest.approx(theirs.activation_bytes)


def test_cuts_between_whole_layers_are_priced_as_those_of_a_gpt_model():
    gpt, hybrid = Model(num_layers=4, **SIZES), hybrid_of("*-*-*-*-")
    ours, theirs = priced(hybrid, ("H100-SXM", 2)), priced(gpt, ("H100-SXM", 2))
    found, wanted = ours.estimate(two_stages(6, 2)), theirs.estimate(two_stages(3, 1))
    assert found.iteration_s == pytest.approx(wanted.iteration_s)
    for mine, other in zip(found.memory, wanted.memory, strict=True):
        assert mine.parameter_bytes == other.parameter_bytes
        assert mine.activation_bytes == pytest.approx(other.activation_bytes)


def test_a_stage_takes_what_its_own_layers_take():
    e = priced(hybrid_of("EE**", experts=EXPERTS), ("H100-SXM", 2))
    experts, attention = e.estimate(two_stages(2, 2)).memory
    assert experts.parameter_bytes > 2 * attention.parameter_bytes - 2 * 32000 * 4096 * 2
    c = two_stages(2, 2)
    first, second = (e.unit_of(c, Group(0, 1, 1), s) for s in (0, 1))
    mean = e.unit_of(c, Group(0, 1, 1))
    assert first.layer_parameters + second.layer_parameters == pytest.approx(2 * mean.layer_parameters, abs=2)
    assert first.layer_parameters > 9 * second.layer_parameters


def test_chunks_take_what_their_own_layers_take():
    e = priced(hybrid_of("**--**--"), ("H100-SXM", 2))
    c = two_stages(4, 4, schedule="interleaved", chunks=2)
    assert layers_at(c, e.model.pattern) == (("**", "**"), ("--", "--"))
    unit = e.unit_of(c, Group(0, 1, 1), 0)
    attention = e.unit(0, 1, 1, "none", kind="*")
    assert unit.chunks_s((2, 2), 0, 0, False) == pytest.approx([2 * attention.layer_f] * 2)
    found = e.estimate(c)
    plan = build_plan(e, c, found)
    assert simulate_candidate(e, c, found, plan).iteration_s == pytest.approx(found.iteration_s, rel=0.05)


def test_the_search_cuts_between_attention_and_mlp():
    e = priced(hybrid_of("*-*-*-"), ("H100-SXM", 1), ("A40", 1))
    best = search("auto", e, Goal(schedules=("1f1b",))).best
    (one, two) = (Group(0, 1, 1),), (Group(1, 1, 1),)
    found = {
        (n, order): e.estimate(Candidate((Stage(n, order[0]), Stage(6 - n, order[1])), 1)).iteration_s
        for n in range(1, 6)
        for order in ((one, two), (two, one))
    }
    least = min(found, key=found.__getitem__)
    assert least[0] % 2 == 1 and best.iteration_s <= found[least] * 1.0001


def test_no_bound_is_claimed_and_slices_of_recurrent_layers_are_planned():
    e = priced(hybrid_of(**NEMOTRON_H_8B), ("H100-SXM", 4), ("A100-80", 4))
    outcome = search("sailor", e, Goal())
    assert outcome.best is not None and outcome.gap(Goal()) is None
    candidate = two_stages(26, 26, schedule="slimpipe", slices=2)
    from tools.planner.costs.schedules import schedule_of

    assert schedule_of(candidate).runs(e, candidate)


def test_plan_and_flags_have_the_pattern():
    model = hybrid_of("*-E*/*-", experts=EXPERTS)
    e = priced(model, ("H100-SXM", 2))
    c = two_stages(3, 1)
    plan = build_plan(e, c, e.estimate(c))
    assert plan.model.pattern == "*-E*/*-" and with_chunks(plan.model.pattern, (3, 1)) == "*-E|*/*-"
    check_same_model(plan, model, "plan.json", "model.yaml")
    other = dataclasses.replace(plan, model=dataclasses.replace(plan.model, pattern="*E-*/*-"))
    with pytest.raises(PlannerError, match="pattern"):
        check_same_model(other, model, "plan.json", "model.yaml")
    words = model_arguments(plan, model)
    assert words[words.index("--hybrid-layer-pattern") + 1] == "*-E*/*-"
    assert not {"--num-layers", "--mtp-num-layers", "--moe-layer-freq"} & set(words)
    recurrent = hybrid_of("M-G*", mamba=MAMBA, delta_net={"key_heads": 16, "value_heads": 32})
    e = priced(recurrent, ("H100-SXM", 2))
    words = " ".join(model_arguments(build_plan(e, two_stages(2, 2), e.estimate(two_stages(2, 2))), recurrent))
    assert "--mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128" in words
    assert "--linear-num-key-heads 16 --linear-num-value-heads 32" in words


def test_a_profile_of_recurrent_layers_is_refused():
    with pytest.raises(PlannerError, match="are not measured"):
        _ = hybrid_of(**NEMOTRON_H_8B).profiled
    assert hybrid_of("*-*E", experts=EXPERTS).profiled.kinds == "*-E"


def test_a_checkpoint_says_the_pattern():
    arguments = {
        "hybrid_layer_pattern": "M-|*-/*-",
        "num_layers": 4,
        "mtp_num_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "mamba_state_dim": 16,
        "position_embedding_type": "rope",
    }
    document = from_arguments(arguments, "common.pt")
    assert document["pattern"] == "M-*-/*-"
    assert document["mamba"] == {"heads": 2, "head_size": 64, "groups": 8, "state_size": 16}


@pytest.mark.parametrize(
    ("name", "billions"), [("nemotron-h-8b", 8.1), ("nemotron-3-nano-30b-a3b", 31.6), ("qwen3-next-80b-a3b", 79.7)]
)
def test_published_hybrid_models_are_read(name, billions, tmp_path):
    """Their files say that steps have no upper bound, by a word that is no number of JSON."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FILES[name]), encoding="utf-8")
    model = load_model(file, seq_length=4096, global_batch_size=8)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-2)
    estimator = priced(model, ("H100-SXM", 8))
    assert estimator.unit(0, 2, 1, "none", Spread(expert_tp=2)) is not None
    assert estimator.unit(0, 1, 1, "none", Spread(2, 1, 1)) is not None


@pytest.mark.parametrize(
    ("symbol", "more", "travels"),
    [
        ("M", {"mamba": MAMBA}, 128 * 64 * 2 + 2 * 8 * 128 + 128 + 128 * 64),
        ("G", {"delta_net": {"key_heads": 16, "value_heads": 32}}, 2 * 16 * 128 + 32 * 128 + 2 * 32 + 32 * 128),
    ],
)
def test_ranks_that_share_sequences_send_each_other_tokens_of_recurrent_layers(symbol, more, travels):
    model = hybrid_of(f"{symbol}-*-", **more)
    estimator = priced(model, ("H100-SXM", 8))
    one, two = (estimator.unit(0, 1, 1, "none", Spread(cp), symbol) for cp in (1, 2))
    moved = 4096 / 2 * travels * 2 / 2 / catalog()["H100-SXM"].collective_rate
    assert two.layer_f - moved == pytest.approx(one.layer_f / 2, rel=0.15)
    assert two.layer_f > moved and two.layer_b - moved == pytest.approx(one.layer_b / 2, rel=0.15)
    assert two.layer_bytes == pytest.approx(one.layer_bytes / 2)
    # Ranks divide heads, and every one needs some.
    few = {"mamba": {"heads": 2, "groups": 1}} if symbol == "M" else {"delta_net": {"key_heads": 2, "value_heads": 2}}
    estimator = priced(hybrid_of(f"{symbol}-*-", **few), ("H100-SXM", 8))
    assert estimator.unit(0, 1, 1, "none", Spread(2), symbol) is not None
    assert estimator.unit(0, 1, 1, "none", Spread(4), symbol) is None


def test_files_with_layers_of_no_kind_are_refused():
    assert from_config({**FILES["nemotron-h-8b"], "attention_head_dim": 64}, "config.json")["head_size"] == 64
    for changed in ({"hybrid_override_pattern": "M-X"}, {"num_hidden_layers": 3}):
        with pytest.raises(PlannerError, match="layers are"):
            from_config({**FILES["nemotron-h-8b"], **changed}, "config.json")


def test_slices_hold_the_states_that_they_leave():
    model = hybrid_of("M-*-" * 4, mamba=MAMBA)
    estimator = priced(model, ("H100-SXM", 2))
    sliced = two_stages(8, 8, schedule="slimpipe", slices=4)
    state = 128 * 64 * 128
    assert carried_bytes(estimator, sliced, Group(0, 2, 1), 0) == 4 * 4 * 2 * state / 2
    assert estimator.estimate(sliced) is not None
    shared = sliced._replace(cp=2)
    assert carried_bytes(estimator, shared, Group(0, 2, 1), 0) == 4 * 4 * 2 * state / 4
    dense = hybrid_of("*-" * 4)
    assert carried_bytes(priced(dense, ("H100-SXM", 2)), two_stages(4, 4, slices=4), Group(0, 1, 1), 0) == 0
