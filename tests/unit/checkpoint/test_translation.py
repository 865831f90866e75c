"""Names and places of a run's tensors in a checkpoint of the other family of models."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from megatron_het.checkpoint.choice import CheckpointError
from megatron_het.checkpoint.loading import Translation, translation_for

FOLDER = Path("iter_0000001")


def saved_as(monkeypatch: pytest.MonkeyPatch, names: list[str], layers: int, pattern: str | None = None) -> None:
    found = {name: SimpleNamespace(global_shape=(layers, 4)) for name in names}
    common = {"args": SimpleNamespace(hybrid_layer_pattern=pattern)}
    monkeypatch.setattr(dist_checkpointing.serialization, "load_sharded_metadata", lambda _: found)
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda _: common)
    monkeypatch.setattr(Path, "exists", lambda _: True)


STACKED = [
    "decoder.final_layernorm.weight",
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.self_attention.linear_qkv.weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
]
NUMBERED = [
    "decoder.final_norm.weight",
    *(f"decoder.layers.{at}.self_attention.linear_qkv.weight" for at in (0, 2)),
    *(f"decoder.layers.{at}.mlp.linear_fc1.weight" for at in (1, 3)),
]


def asked(translation: Translation, name: str, layer: tuple[int, int] | None = None) -> ShardedTensor:
    """What is asked of the checkpoint for a tensor, which has the layers ``(this one, all)`` as a dimension."""
    offsets = () if layer is None else ((0, *layer),)
    entry = ShardedTensor.from_rank_offsets(name, torch.zeros(4), *offsets, prepend_axis_num=len(offsets))
    found: ShardedTensor = translation.of_state({"model": entry})["model"]
    return found


def test_layers_of_a_hybrid_model_are_found_in_one_tensor_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, STACKED, 2)
    made = translation_for(SimpleNamespace(hybrid_layer_pattern="M*-*-", num_layers=5), FOLDER)
    assert made is not None and made.layers == 2
    for name, key, at in (
        ("decoder.layers.3.self_attention.linear_qkv.weight", STACKED[2], 1),
        ("decoder.layers.1.input_layernorm.weight", STACKED[1], 0),
        ("optimizer.state.exp_avg.decoder.layers.4.mlp.linear_fc1.weight", STACKED[4], 1),
    ):
        found = asked(made, name)
        assert (found.key, found.global_shape, found.global_offset) == (key, (2, 4), (at, 0))
        assert found.prepend_axis_num == 1
    assert asked(made, "decoder.final_norm.weight").key == STACKED[0]
    assert isinstance(asked(made, "decoder.layers.0.mixer.D"), LocalNonpersistentObject)
    assert asked(made, "embedding.word_embeddings.weight").key == "embedding.word_embeddings.weight"


def test_what_a_tensor_is_made_of_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, STACKED, 2)
    made = translation_for(SimpleNamespace(hybrid_layer_pattern="*-*-", num_layers=4), FOLDER)

    def halves(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, half, (0, i, 2)) for i, half in enumerate(data.chunk(2))]

    name = "decoder.layers.3.mlp.linear_fc1.weight"
    factory = ShardedTensorFactory(name, torch.zeros(4), halves, torch.cat)
    first, second = made.of_state({"model": factory})["model"].build()
    assert first.key == second.key == STACKED[3]
    assert (first.global_offset, second.global_offset) == ((1, 0), (1, 2))


def test_layers_of_a_gpt_model_are_found_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, NUMBERED, 4, "*-*-")
    made = translation_for(SimpleNamespace(hybrid_layer_pattern=None, num_layers=2), FOLDER)
    assert made is not None and made.layers == 4
    found = asked(made, "decoder.layers.mlp.linear_fc1.weight", (1, 2))
    assert (found.key, found.global_shape, found.global_offset) == (NUMBERED[4], (4,), (0,))
    assert found.prepend_axis_num == 0
    assert asked(made, "decoder.layers.1.self_attention.linear_qkv.weight").key == NUMBERED[2]


def test_a_gpt_model_has_attention_at_every_second_place(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, NUMBERED, 4, "*--*")
    with pytest.raises(CheckpointError, match="in turn"):
        translation_for(SimpleNamespace(hybrid_layer_pattern=None, num_layers=2), FOLDER)


def test_the_same_family_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, NUMBERED, 4, "*-*-")
    assert translation_for(SimpleNamespace(hybrid_layer_pattern="*-*-", num_layers=4), FOLDER) is None
    saved_as(monkeypatch, STACKED, 2)
    assert translation_for(SimpleNamespace(hybrid_layer_pattern=None, num_layers=2), FOLDER) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("*-*-*-", "2 layers of a GPTModel"),
        ("*--*", None),
        ("*-*", "2 layers of attention and 1 of MLP"),
        ("*-*-/*-", "multi-token prediction"),
        ("+-+-", "latent attention"),
    ],
)
def test_models_that_differ_are_refused(pattern: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_as(monkeypatch, STACKED, 2)
    args = SimpleNamespace(hybrid_layer_pattern=pattern, num_layers=4)
    if reason is None:
        assert translation_for(args, FOLDER) is not None
        return
    with pytest.raises(CheckpointError, match=reason):
        translation_for(args, FOLDER)
