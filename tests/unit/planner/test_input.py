"""Cluster and model files: bad input gets one error that names file, key and value."""

import pytest

from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import cluster_from_document, load_cluster
from tools.planner.inputs.model import load_model, model_from_document

NODE = {"gpu": "A100-40", "count": 2, "gpus_per_node": 4}
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "seq_length": 128,
    "global_batch_size": 16,
}


@pytest.mark.parametrize(
    ("document", "key", "text"),
    [
        ({"nodes": [{**NODE, "gpu": "A100-4"}]}, "nodes[0].gpu", "A100-40"),
        ({"nodes": [{**NODE, "count": -1}]}, "nodes[0].count", "-1"),
        ({"nodes": [{**NODE, "colour": 1}]}, "nodes[0].colour", "unknown key"),
        ({"nodes": [{"gpu": "T4", "count": 1}]}, "nodes[0].gpus_per_node", "required"),
        ({"nodes": []}, "nodes", "at least 1"),
        ({"nodes": [{**NODE, "max_gpus": 0}, {**NODE, "max_gpus": 0}]}, "nodes", "no GPU"),
        ({"nodes": [{**NODE, "hosts": ["a"]}]}, "nodes", "1 hosts"),
        ({"nodes": [NODE], "gpus": {"X": {"flops": {}}}}, "gpus.X.memory_bytes", "required"),
        ({"nodes": [NODE, {**NODE, "zone": "b-1"}]}, "links", "nothing says how"),
        ({"nodes": [NODE], "links": [{"between": ["local", "mars"], "bytes_per_s": 1}]}, "links[0].between", "mars"),
        ([], "(document)", "mapping"),
    ],
)
def test_bad_clusters(document, key, text):
    with pytest.raises(PlannerError) as caught:
        cluster_from_document(document, "c.yaml")
    assert caught.value.key == key
    assert text in str(caught.value)
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 66}, "num_attention_heads = 4 does not divide"),
        ({"num_query_groups": 3}, "num_query_groups"),
        ({"micro_batch_sizes": [3]}, "3 does not divide"),
        ({"precision": "fp7"}, "precision"),
        ({"learned_positions": 64}, "learned_positions = 64 is less than seq_length = 128"),
        ({"layers": 3}, "unknown key"),
    ],
)
def test_bad_models(change, text):
    with pytest.raises(PlannerError) as caught:
        model_from_document({**MODEL, **change}, "m.yaml")
    assert text in str(caught.value)


def test_enough_learned_positions_or_none():
    for rows in (0, 128, 256):
        assert model_from_document({**MODEL, "learned_positions": rows}, "m.yaml").learned_positions == rows


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(PlannerError, match="no such file"):
        load_cluster(tmp_path / "none.yaml")
    broken = tmp_path / "m.yaml"
    broken.write_text("a: [1\nb: 2")
    with pytest.raises(PlannerError, match="not YAML"):
        load_model(broken)


def test_parameters_of_known_models():
    llama = model_from_document(
        {
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 11008,
            "num_attention_heads": 32,
            "vocab_size": 32000,
            "seq_length": 2048,
            "global_batch_size": 8,
        },
        "m",
    )
    assert llama.parameters == 6_738_411_520


def test_profile_of_another_model_is_refused():
    from tools.planner.inputs.profile_schema import ProfiledModel

    model = model_from_document(MODEL, "m.yaml")
    with pytest.raises(PlannerError, match="another model") as caught:
        model.check_profile(ProfiledModel(64, 256, 4, 4, 512, 128, "fp16"), "p.json")
    assert caught.value.key == "model.precision"
