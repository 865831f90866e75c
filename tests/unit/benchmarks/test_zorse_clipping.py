"""Which parameters the reference of per-ministage clipping puts together."""

from dataclasses import replace

from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from testing.probe import group_of, groups_of, rows_of


def plan(*layers: tuple[int, ...]) -> Plan:
    stages = tuple(Stage(row, (Replica((s,), (0, 1)),)) for s, row in enumerate(layers))
    return Plan(
        ModelShape(sum(map(sum, layers)), 8, 2, 2, 4, 16), TrainingShape(1, 2), stages, ScheduleSpec("ministage", {})
    )


def test_layers_go_round_robin_over_the_stages() -> None:
    assert groups_of(plan((2, 1), (1, 0))) == [[0, 1], [2], [3], []]
    assert groups_of(plan((1, 2, 1))) == [[0], [1, 2], [3]]
    assert groups_of(plan((2,), (1, 1))) == [[0, 1], [2], [3]]
    assert groups_of(plan((2, 1), (1,))) == [[0, 1], [2], [3]]


def test_embeddings_are_in_the_first_and_the_output_layer_in_the_last_group() -> None:
    groups = [[0, 1], [2], [3], []]
    names = {
        "embedding.word_embeddings.weight": 0,
        "decoder.layers.1.mlp.linear_fc1.weight": 0,
        "decoder.layers.2.mlp.linear_fc1.weight": 1,
        "decoder.layers.3.self_attention.linear_qkv.weight": 2,
        "decoder.final_layernorm.weight": 3,
        "output_layer.weight": 3,
    }
    assert {name: group_of(name, groups) for name in names} == names


def test_rows_of_a_split_vocabulary_are_in_the_ministages_of_their_stages() -> None:
    whole = plan((2, 1), (1, 0))

    def split(**shares: list[int]) -> Plan:
        return replace(whole, schedule=ScheduleSpec("ministage", {"vocabulary": True, **shares}))

    assert rows_of("embedding.word_embeddings.weight", 8, split()) == [(0, 0, 4), (1, 4, 8)]
    assert rows_of("output_layer.weight", 8, split()) == [(2, 0, 4), (3, 4, 8)]
    assert rows_of("output_layer.weight", 8, split(vocabulary_shares=[3, 1])) == [(2, 0, 6), (3, 6, 8)]
    assert rows_of("output_layer.weight", 8, whole) == [(3, 0, 8)]
    assert rows_of("decoder.layers.2.mlp.linear_fc1.weight", 8, split()) == [(1, 0, 8)]
    uneven = replace(plan((2,), (1, 1)), schedule=ScheduleSpec("ministage", {"vocabulary": True}))
    assert rows_of("output_layer.weight", 8, uneven) == [(0, 0, 4), (2, 4, 8)]
