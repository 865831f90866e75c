"""The parameter window: options, programs, and one chunk's memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_het.features.window.chunk import ChunkWindow, WindowUse, chunk_by_chunk
from megatron_het.features.window.shards import Parts, layered_layout
from megatron_het.features.window.spec import Window, WindowOptions
from megatron_het.features.window.state import StageSums
from megatron_het.lowering.programs import build
from megatron_het.plan import PlanError, ScheduleSpec
from megatron_het.schedule.ir import Kind
from testing.groups import Group
from testing.zorse_cases import with_shares
from tests.unit.plan.feature_checks import check_feature, refused
from tests.unit.runtime.test_ministages import ministage_plan

# -- options -----------------------------------------------------------------------------------


def test_options_are_read_from_the_schedules_parameters() -> None:
    read = Window().read
    assert read(ScheduleSpec("ministage", {"window": True, "prefetch": 2, "other": 1})) == WindowOptions(prefetch=2)
    assert read(ScheduleSpec("ministage", {})) is None
    assert read(ScheduleSpec("1f1b", {"window": True})) is None


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"window": 1}, "window"),
        ({"prefetch": 1}, "prefetch"),
        ({"window": True, "prefetch": True}, "prefetch"),
        ({"window": True, "prefetch": -1}, "prefetch"),
        ({"window": True, "offload": "yes"}, "offload"),
        ({"window": True, "update": "later"}, "update"),
    ],
)
def test_bad_options_are_named(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError, match=rf"schedule\.parameters\.{field}"):
        Window().check(replace(ministage_plan(((1, 1),), (1,)), schedule=ScheduleSpec("ministage", parameters)))


def arguments(**more: Any) -> SimpleNamespace:
    given = {"clip_grad": 0.0, "log_num_zeros_in_grad": False, "rerun_mode": "disabled"}
    return SimpleNamespace(**{**given, **more})


def test_a_window_takes_the_place_of_megatrons_overlap() -> None:
    plan = ministage_plan(((1, 1), (1, 1)), (1, 1), window=True)
    given = arguments(overlap_grad_reduce=True, overlap_param_gather=True)
    check_feature("window", plan, given)
    Window().apply(plan, WindowOptions(), given)
    assert not given.overlap_grad_reduce and not given.overlap_param_gather


@pytest.mark.parametrize(("options", "more", "what"), refused("window"))
def test_what_a_window_cannot_do_is_refused(options: dict[str, Any], more: dict[str, Any], what: str) -> None:
    plan = ministage_plan(((1, 1), (1, 1)), (1, 1), window=True, **options)
    check_feature("window", plan, arguments())
    with pytest.raises(PlanError, match=what):
        check_feature("window", plan, arguments(**more))


@pytest.mark.parametrize("update", ["exact", "undo"])
def test_updates_that_can_be_taken_back_go_with_reruns(update: str) -> None:
    plan = ministage_plan(((1, 1), (1, 1)), (1, 1), window=True, update=update)
    check_feature("window", plan, arguments(rerun_mode="validate_results"))


def test_unequal_shares_need_a_window() -> None:
    shares = ((3, 1), (1, 1))
    with_window = with_shares(ministage_plan(((1, 1), (1, 1)), (2, 2), window=True), shares)
    check_feature("window", with_window, arguments())
    without = replace(with_window, schedule=ScheduleSpec("ministage", {}))
    with pytest.raises(PlanError, match=r"stages\[0\]\.replicas\[\*\]\.state_share.*parameter window"):
        check_feature("window", without, arguments())
    equal = with_shares(without, ((2, 2), (1, 1)))
    check_feature("window", equal, arguments())


# -- programs ----------------------------------------------------------------------------------


def count(plan: Any, kind: Kind, device: int = 0, forward_only: bool = False) -> int:
    program = build(plan)[forward_only]
    return sum(op.kind == kind for op in program.ops[device])


def test_every_layer_is_gathered_twice_however_many_microbatches() -> None:
    layers = ((2, 1, 3), (1, 1, 1))
    plan = ministage_plan(layers, (2, 1), window=True, keep_at_turn=False)
    for device, total in ((0, 6), (1, 6), (2, 3)):
        assert count(plan, Kind.PARAM_GATHER, device) == 2 * total
        assert count(plan, Kind.GRAD_REDUCE, device) == total
        assert count(plan, Kind.PARAM_GATHER, device, forward_only=True) == total
    kept = ministage_plan(layers, (2, 1), window=True)
    assert count(kept, Kind.PARAM_GATHER) == 2 * 6 - 3
    whole = ministage_plan(layers, (2, 1), window=True, per_layer=False, keep_at_turn=False)
    assert count(whole, Kind.PARAM_GATHER) == 2 * 3


def test_gathers_per_microbatch_grow_with_the_microbatches() -> None:
    plan = ministage_plan(((2, 1), (1, 1)), (1, 4), window=True, per_microbatch=True, keep_at_turn=False)
    check_feature("window", plan, arguments())
    assert count(plan, Kind.PARAM_GATHER, 0) == 2 * 3 * 4
    assert count(plan, Kind.PARAM_GATHER, 1) == 2 * 2 * 1
    assert count(plan, Kind.GRAD_REDUCE, 0) == 3
    uneven = ministage_plan(((2, 1),), (2,), window=True, per_microbatch=True)
    with pytest.raises(PlanError, match="per_microbatch"):
        check_feature("window", uneven, arguments())


def test_updates_are_operations_only_when_made_at_once() -> None:
    exact = ministage_plan(((1, 1),), (2,), window=True)
    early = ministage_plan(((1, 1),), (2,), window=True, update="at-once")
    assert count(exact, Kind.OPTIMIZER_STEP) == 0
    assert count(early, Kind.OPTIMIZER_STEP) == 2
    assert count(early, Kind.OPTIMIZER_STEP, forward_only=True) == 0


def test_layers_get_buckets_of_their_own_whose_offsets_need_no_padding_taken_out() -> None:
    chunk = torch.nn.Module()
    chunk.embedding = torch.nn.Embedding(5, 7)
    chunk.decoder, chunk.mtp = torch.nn.Module(), torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(7, 3) for _ in range(3))
    chunk.mtp.layers = torch.nn.ModuleList(torch.nn.Linear(7, 3) for _ in range(4))  # more than those of the decoder
    chunk.output_layer = torch.nn.Linear(7, 5)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    (layout,) = layered_layout(chunk, SimpleNamespace(intra_dp_cp=Group(3)), config).layouts.values()
    bucket = {name: layout.param_index_map[p][2] for name, p in chunk.named_parameters()}
    assert bucket["output_layer.weight"] == bucket["decoder.layers.2.weight"] == 0
    assert bucket["decoder.layers.1.bias"] == 1
    assert bucket["embedding.weight"] == bucket["decoder.layers.0.weight"] == 2
    assert bucket["mtp.layers.0.weight"] == bucket["mtp.layers.3.weight"] == 0
    begin = 0
    for (start, end), size in zip(layout.bucket_indices, layout.per_bucket_numel_unpadded, strict=True):
        assert start == begin and (end - start) % 3 == 0 and size <= end - start
        begin = end


# -- one chunk ---------------------------------------------------------------------------------


def fake_chunk() -> SimpleNamespace:
    """Two layers in one buffer of two buckets, as Megatron's DDP holds them."""
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(2))
    whole, gradients = torch.arange(12.0), torch.ones(12)
    buckets = []
    for layer, start in ((1, 0), (0, 6)):
        weight = module.layers[layer].weight
        weight.data = whole[start : start + 6].view(2, 3)
        weight.main_grad = gradients[start : start + 6].view(2, 3)
        buckets.append(
            SimpleNamespace(
                param_data=whole[start : start + 6], grad_data=gradients[start : start + 6], params_list=[weight]
            )
        )
    buffer = SimpleNamespace(param_data=whole, grad_data=gradients, buckets=buckets, reset=None)
    return SimpleNamespace(module=module, buffers=[buffer], intra_dp_cp_group=Group())


def test_a_closed_chunk_holds_no_device_memory_and_comes_back_unchanged() -> None:
    ddp, use = fake_chunk(), WindowUse()
    first, second = (layer.weight for layer in ddp.module.layers)
    before = first.detach().clone(), second.detach().clone()
    chunk = ChunkWindow(ddp, True, use)
    assert [bucket.layer for bucket in chunk.buckets] == [0, 1]
    chunk.close()
    chunk.drop_gradients()
    chunk.store()
    assert use.held_bytes == {"parameter": 0, "shard": 0, "gradient": 0}
    for tensor in (ddp.buffers[0].param_data, ddp.buffers[0].grad_data, first):
        assert tensor.untyped_storage().size() == 0
    ddp.buffers[0].reset()  # Megatron calls it at the start of an iteration
    chunk.fetch()
    chunk.open()
    chunk.gather(0, 1)
    chunk.wait()
    assert torch.equal(first, before[0])
    chunk.gather(1, 2)
    assert torch.equal(second, before[1])
    assert use.held_bytes == {"parameter": 48, "shard": 48, "gradient": 0}


def test_gradients_are_zero_when_allocated_and_their_shards_outlive_them() -> None:
    ddp, use = fake_chunk(), WindowUse()
    chunk = ChunkWindow(ddp, False, use)
    assert chunk.is_resident
    chunk.drop_gradients()
    chunk.open_gradients()
    assert not ddp.buffers[0].grad_data.any()
    ddp.module.layers[1].weight.main_grad += 2.0
    chunk.reduce(-1, -1)
    chunk.keep_gradient_shards()
    assert ddp.buffers[0].grad_data.untyped_storage().size() == 0
    assert [b.gradient.sum().item() for b in chunk.buckets] == [0.0, 12.0]
    assert use.held_bytes["gradient_shard"] == 48
    chunk.drop_gradient_shards()
    assert use.held_bytes["gradient_shard"] == 0


def closed_chunk(use: Any) -> Any:
    chunk = ChunkWindow(fake_chunk(), True, use)
    chunk.close()
    chunk.drop_gradients()
    chunk.store()
    return chunk


def test_shards_follow_what_was_loaded_into_open_parameters() -> None:
    chunk = closed_chunk(WindowUse())
    chunk.take_shards()  # nothing was loaded
    chunk.fetch()
    chunk.open()
    chunk.gather(-1, -1)
    chunk.wait()
    chunk.store()
    chunk.ddp.buffers[0].param_data += 1.0
    chunk.take_shards()
    chunk.close()
    chunk.store()
    with chunk.lent():
        assert chunk.ddp.buffers[0].param_data.tolist() == list(range(1, 13))


def test_a_closed_chunk_is_whole_only_while_a_state_is_loaded_into_it() -> None:
    """Only this rank's part of what was loaded stays; an open chunk is left open."""
    use = WindowUse()
    chunk = closed_chunk(use)
    use.restart()
    layers = chunk.ddp.module.layers
    loaded = {f"layers.{i}.weight": torch.full((2, 3), 5.0 + i) for i in range(2)}
    chunk.ddp.module.load_state_dict(loaded)
    assert use.held_bytes == {"parameter": 0, "shard": 0, "gradient": 0}
    assert use.peak_bytes == {"parameter": 48, "shard": 48, "gradient": 0}
    assert layers[0].weight.untyped_storage().size() == 0
    with chunk.lent():
        assert all(torch.equal(layers[i].weight, loaded[f"layers.{i}.weight"]) for i in range(2))
        chunk.ddp.module.load_state_dict({name: weight + 1.0 for name, weight in loaded.items()})
        assert chunk.is_open and torch.equal(layers[1].weight, torch.full((2, 3), 7.0))
    chunk.dispose()
    assert not chunk.ddp.module._load_state_dict_pre_hooks and not chunk.ddp.module._load_state_dict_post_hooks


def test_main_parameters_are_taken_with_one_chunk_open_at_a_time() -> None:
    class Upstream:
        opened: list[int] = []

        def __init__(self, buffers: list[Any], groups: list[dict[str, Any]]) -> None:
            self.buffers = buffers
            where = {p: (i, None, 0) for i, b in enumerate(buffers) for k in b.buckets for p in k.params_list}
            self.found = self._build_model_and_main_param_groups([], where, groups, None)

        @classmethod
        def _build_model_and_main_param_groups(cls, _r: Any, _w: Any, groups: Any, _c: Any) -> Any:
            cls.opened.append(use.held_bytes["parameter"])
            mains = [[p.detach().clone() for p in group["params"]] for group in groups]
            for group, members in zip(groups, mains, strict=True):
                group["orig_group"]["params"] = members
            return [list(group["params"]) for group in groups], mains

    use = WindowUse()
    chunks = [closed_chunk(use) for _ in range(3)]
    params = [[p for b in chunk.ddp.buffers[0].buckets for p in b.params_list] for chunk in chunks]
    groups = [{"params": [row[column] for row in params], "orig_group": {"lr": column}} for column in (1, 0)]
    optimizer = chunk_by_chunk(Upstream)([chunk.ddp.buffers[0] for chunk in chunks], groups)
    models, mains = optimizer.found
    assert Upstream.opened == [48, 48, 48], "one chunk is 48 bytes"
    assert all(a is b for group, kept in zip(groups, models, strict=True) for a, b in zip(group["params"], kept))
    assert [[m.flatten().tolist() for m in group] for group in mains] == [
        [[6.0, 7.0, 8.0, 9.0, 10.0, 11.0]] * 3,
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3,
    ]
    assert [group["orig_group"]["params"] for group in groups] == mains
    assert use.held_bytes["parameter"] == 0


def tied_chunk(pre_process: bool, gradient: torch.Tensor | None) -> Any:
    """A ministage at one end of the model, whose bucket has another weight before the copy of the embedding."""
    model = torch.nn.Module()
    model.pre_process, model.post_process = pre_process, not pre_process  # type: ignore[assignment]
    other, model.embedding = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 2))
    model.shared_embedding_or_output_weight = lambda: model.embedding  # type: ignore[assignment]
    places = {other: (0, 2), model.embedding: (2, 6)}
    source = SimpleNamespace(params_list=list(places), param_to_index=places, grad_data=torch.zeros(6))
    bucket = SimpleNamespace(source=source, gradient=gradient)
    group: Any = Group()
    return SimpleNamespace(ddp=model, buckets=[bucket], parts=Parts(group))


def test_copies_in_two_ministages_of_a_rank_get_one_sum() -> None:
    class Doubled:
        """Another stage has as much again."""

        def described(self, named: Any, select: Any) -> list[Any]:
            return [select(parameter) for _, parameter in named]

        def sum_parts(self, parameters: list[Any]) -> None:
            for parameter in parameters:
                parameter.mul_(2)

    ends: Any = Doubled()
    first, last = torch.arange(6.0), torch.full((6,), 10.0)
    middle = SimpleNamespace(ddp=SimpleNamespace(pre_process=False, post_process=False), buckets=[])
    chunks: Any = [tied_chunk(True, first), middle, tied_chunk(False, last)]
    sums = StageSums(None, ends)
    assert [sums.has_copy(chunk) for chunk in chunks] == [True, False, True]
    sums.over_ends(chunks)
    assert first.tolist() == [0, 1, 24, 26, 28, 30]
    assert last.tolist() == [10, 10, 24, 26, 28, 30]
    chunks[2].buckets[0].gradient = None  # a rank without a part
    sums.over_ends(chunks)
    assert first.tolist() == [0, 1, 48, 52, 56, 60]
