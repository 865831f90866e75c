"""Routing of samples to replicas."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_het.distributed import PairGroups, PlanGroups
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.runtime.data import (
    Reports,
    RoutedBatchSampler,
    SkippingIterator,
    draw_by_sample,
    judged_at_the_end,
    of_whole_stage,
    routed_loader,
    routed_provider,
)
from megatron_het.runtime.executor import add_all_gradients, copies_of, drop_copies


def batches(count: int) -> list[list[int]]:
    return [[2 * k, 2 * k + 1] for k in range(count)]


def test_replicas_together_read_every_microbatch_once_and_in_order() -> None:
    routes = ([0, 1, 3], [2])
    per_replica = [list(RoutedBatchSampler(batches(8), ids, [1] * 4)) for ids in routes]
    assert per_replica[1] == [[4, 5], [12, 13]]
    assert sorted(b for part in per_replica for b in part) == batches(8)


def test_routed_loader_keeps_the_loaders_settings() -> None:
    data = torch.arange(16)
    stock = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_sampler=batches(8), pin_memory=False
    )
    routed = routed_loader(stock, [1], [1, 1])
    assert [b[0].tolist() for b in routed] == batches(8)[1::2]
    assert routed.collate_fn is stock.collate_fn


def test_losses_are_judged_once_all_passes_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine:
        def validate_result(self, result: torch.Tensor, rejection_func: Any, **_more: Any) -> None:
            judged.append((result.item(), bool(rejection_func(result))))

    judged, machine = list[tuple[float, bool]](), Machine()
    monkeypatch.setattr("megatron.core.rerun_state_machine.get_rerun_state_machine", lambda: machine)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    with judged_at_the_end(args):
        for loss in (torch.tensor(4.0), torch.tensor(torch.inf)):
            machine.validate_result(result=loss, rejection_func=torch.isinf, message="found Inf", fatal=True)
            loss.div_(2)  # as Megatron does, by the number of microbatches
        assert not judged
    assert judged == [(4.0, False), (torch.inf, True)]
    with pytest.raises(RuntimeError, match="a pass"), judged_at_the_end(args):
        machine.validate_result(result=torch.tensor(1.0), rejection_func=torch.isinf)
        raise RuntimeError("a pass has failed")
    assert len(judged) == 2 and "validate_result" not in vars(machine)


def test_ranks_rearrange_a_sample_alike_whatever_they_have_read_before() -> None:
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    def dataset() -> Any:
        found = object.__new__(GPTFIMDataset)
        text = SimpleNamespace(
            ids_to_text=lambda ids, remove_special_tokens: "".join(map(chr, ids)),
            text_to_ids=lambda words: map(ord, words),
        )
        found.config = SimpleNamespace(random_seed=1, tokenizer=SimpleNamespace(_tokenizer=text))
        found.np_rng = np.random.RandomState(1)
        found.shuffle_index, found.document_index = np.arange(4)[::-1], np.arange(5)
        found.sample_index = np.array([[i, 0] for i in range(5)])
        found.dataset = SimpleNamespace(get=lambda i, offset=0, length=None: 10 + np.arange(9) + 20 * i)
        found.fim_rate, found.fim_spm_rate = 1.0, 0.5
        found.fim_split_sample, found.no_fim_prefix = None, None
        found.prefix_tok_id, found.middle_tok_id, found.suffix_tok_id, found.pad_tok_id, found.eod_tok_id = range(5)
        draw_by_sample(SimpleNamespace(datasets=[found]))
        return found._query_document_sample_shuffle_indices

    tokens, labels = dataset(), dataset()
    assert (tokens(1)[0] < 5).any()  # it is rearranged
    for sample in (3, 0, 2):
        assert tokens(sample)[0].tolist() == labels(sample)[0].tolist()
        labels(1)


class Epochs:
    """A sampler whose epochs are not whole iterations: ten batches of one sample each, no sample twice."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([sample] for sample in range(self.start, self.start + 10))
        self.start += 10


def test_an_epoch_may_end_inside_an_iteration() -> None:
    """One replica of the first stage reads the tokens of all microbatches, two of the last one their labels."""
    data = torch.utils.data.TensorDataset(torch.arange(100))

    def cyclic(microbatches: list[int]) -> Iterator[int]:
        routed = routed_loader(torch.utils.data.DataLoader(data, batch_sampler=Epochs()), microbatches, [1] * 4)
        return (int(batch[0]) for batch in itertools.chain.from_iterable(itertools.repeat(routed)))

    first, *last = cyclic([0, 1, 2, 3]), cyclic([0, 1]), cyclic([2, 3])
    for iteration in range(12):
        tokens = [next(first) for _ in range(4)]
        labels = [next(replica) for replica in last for _ in range(2)]
        assert tokens == labels == list(range(4 * iteration, 4 * iteration + 4))


def test_a_skipped_iteration_takes_a_replicas_own_microbatches() -> None:
    """Outside of the schedule an iteration of four is drawn, of which two are this replica's, each cut to one row."""
    scheduled = True
    own = SkippingIterator(iter({"sample": [k] * 3, "none": None} for k in range(12)), 2, 4, 1, lambda: scheduled)
    assert [next(own)["sample"] for _ in range(2)] == [[0] * 3, [1] * 3]
    scheduled = False
    for first in (2, 4):
        drawn = [next(own) for _ in range(4)]
        assert [batch["sample"] for batch in drawn] == [[first], *[[first + 1]] * 3]
        drawn[-1]["sample"] = None  # what a reader does to its batch stays there
    scheduled = True
    assert [next(own)["sample"] for _ in range(2)] == [[6] * 3, [7] * 3]
    nothing = SkippingIterator(None, 2, 4, 1, lambda: False)
    assert [next(nothing) for _ in range(4)] == [{}] * 4


def test_microbatches_of_different_size_are_cut_from_the_same_samples() -> None:
    """Also where an epoch of a cyclic loader ends inside a microbatch."""
    samples, sizes = [[k] for k in range(12)], [3, 1, 2]
    first, second = (list(RoutedBatchSampler(samples, ids, sizes)) for ids in ([0, 2], [1]))
    assert first == [[0, 1, 2], [4, 5], [6, 7, 8], [10, 11]] and second == [[3], [9]]
    sampler = RoutedBatchSampler([[k] for k in range(4)], [0], [3])
    assert [*sampler, *sampler] == [[0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize(
    ("loader", "ahead", "phases"), [("cyclic", 0, []), ("cyclic", 6, []), ("single", 6, []), ("single", 60, [4, 9])]
)
def test_the_order_of_samples_does_not_depend_on_the_microbatches(
    loader: str, ahead: int, phases: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may go on under a plan of other microbatches; 17 samples are no multiple of most sizes."""
    from megatron import training
    from megatron.core import mpu
    from megatron.training.datasets import data_samplers

    data = torch.utils.data.TensorDataset(torch.arange(17))
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 1)

    def read(size: int, batches_of: list[int]) -> list[int]:
        args = SimpleNamespace(
            dataloader_type="external",
            micro_batch_size=size,
            eval_micro_batch_size=size,
            global_batch_size=6,
            full_validation=False,
            hybrid_context_parallel=False,
            data_sharding=True,
            num_workers=0,
            consumed_train_samples=ahead,
            consumed_valid_samples=0,
            skip_train=False,
            iterations_to_skip=[],
            iteration=ahead // 6,
            phase_transition_iterations=phases,
        )
        for module in (training, data_samplers):
            monkeypatch.setattr(module, "get_args", lambda: args)
        provide = routed_provider(lambda _: (data, None, None), range(len(batches_of)), batches_of, loader, bool)
        train = provide((17, 0, 0))[0]
        assert (args.micro_batch_size, args.dataloader_type) == (size, "external")
        return [int(k) for _ in batches_of for k in next(train)[0]]

    expected = read(1, [1] * 6)
    assert len(set(expected)) == 6 and (loader == "cyclic" or expected == list(range(6, 12)))
    assert read(2, [1] * 3) == read(3, [1] * 2) == read(6, [1]) == read(1, [3, 1, 2]) == expected


# Loss entries of the ranks of a stage become one: sums and tokens, or means of what scripts report.

TWO_REPLICAS = (Replica((0,), (0, 1, 2)), Replica((1,), (3,)))
SHARED = (Replica((0, 1), (0, 1, 2, 3), cp=2),)


def entries(values: list[float], tokens: int) -> Reports:
    """One report per value; ``accuracy`` is a mean, as older scripts report their losses too."""
    return [{"lm loss": torch.tensor([v * tokens, tokens]), "accuracy": torch.tensor(v)} for v in values]


@pytest.mark.parametrize(
    ("replicas", "here", "there"),
    [
        pytest.param(TWO_REPLICAS, [1.0, 2.0, 3.0], [6.0], id="whole microbatches"),
        pytest.param(TWO_REPLICAS, [0.5, 1.5, 1.5, 2.5, 3.0, 3.0], [5.0, 7.0], id="two slices of each"),
        pytest.param(SHARED, [0.5, 1.5, 2.5, 5.5], [1.5, 2.5, 3.5, 6.5], id="two ranks share each"),
    ],
)
def test_means_do_not_grow_with_slices_or_ranks(
    replicas: tuple[Replica, ...], here: list[float], there: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The microbatches have means 1, 2, 3 and 6."""
    parameters = {"slices": 2} if len(here) == 6 else {}
    schedule = ScheduleSpec("slimpipe" if parameters else "1f1b", parameters)
    plan = Plan(ModelShape(2, 64, 4, 2, 32), TrainingShape(1, 4), (Stage((2,), replicas),), schedule)
    placement, parts = Placement(plan), (entries(here, 8), entries(there, 8))
    others = iter(torch.stack([e[name] for e in parts[1]]) for name in ("lm loss", "accuracy"))

    def add_the_other_ranks(value: torch.Tensor, group: object) -> None:
        mine = next(others)
        value += mine.sum(dim=0) if mine.dim() == 2 else torch.tensor([mine.sum(), len(mine)])[: len(value)]

    monkeypatch.setattr(dist, "all_reduce", add_the_other_ranks)
    world = object()
    groups = PlanGroups(placement, 0, "gloo", world, PairGroups(0, 60.0), {"stage": world})  # type: ignore[arg-type]
    [entry] = of_whole_stage(parts[0], placement, groups)
    assert entry["accuracy"].tolist() == [3.0]
    loss = entry["lm loss"]
    assert (loss[0] / loss[1]).item() == 3.0


# Weights in fp8, with stand-ins for the layers of Transformer Engine that quantise them.


class Quantised:
    """A copy of a weight: tensors, and what is none."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._data, self._transpose = weight.detach().clone(), weight.detach().t().clone()
        self._quantizer = object()


class StandIn(torch.nn.Module):
    """A linear layer that keeps a copy of its weight, and of which the first backward overwrites ``main_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.main_grad = torch.zeros(2, 2)
        self.is_first_microbatch = True
        self._fp8_workspaces: dict[str, Quantised] = {}
        self.quantised = 0

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        if self.is_first_microbatch or "weight" not in self._fp8_workspaces:
            self._fp8_workspaces["weight"] = Quantised(self.weight)
            self.quantised += 1
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return _Product.apply(source, self, self._fp8_workspaces["weight"]._data, is_first)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, layer: StandIn, weight: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.save_for_backward(source)
        ctx.layer, ctx.weight, ctx.is_first = layer, weight, is_first
        return source @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        own = grads[0].t() @ source
        ctx.layer.main_grad.copy_(own if ctx.is_first else ctx.layer.main_grad + own)
        return grads[0] @ ctx.weight, None, None, None


def _model() -> Any:
    model = torch.nn.Sequential(StandIn(), torch.nn.ReLU(), StandIn())
    add_all_gradients([model])
    return model


@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0)], ids=["in order", "last in, first out"])
def test_gradients_of_all_passes_are_added(backwards: tuple[int, ...]) -> None:
    model = _model()
    layer = model[0]
    drop_copies(model)
    outputs = [model(torch.full((1, 2), i + 1.0, requires_grad=True)).sum() for i in range(3)]
    for i in backwards:
        outputs[i].backward()
    assert layer.main_grad[0, 0] == 2 * (1 + 2 + 3)


def test_weights_are_quantised_once_per_iteration() -> None:
    """The copy of an iteration is of the weights after the update before it."""
    model = _model()
    for iteration in range(3):
        drop_copies(model)
        for _ in range(4):
            model(torch.ones(1, 2))
        assert model[0].quantised == model[2].quantised == iteration + 1
        with torch.no_grad():
            model[0].weight += 1
    assert model[0]._fp8_workspaces["weight"]._data[0, 0] == 3


def test_tensors_of_copies() -> None:
    model = _model()
    assert not list(copies_of(model))
    model(torch.ones(1, 2))
    own = [model[i]._fp8_workspaces["weight"] for i in (0, 2)]
    assert {id(t) for t in copies_of(model)} == {id(t) for one in own for t in (one._data, one._transpose)}


def test_layers_without_copies_stay() -> None:
    layer = torch.nn.Linear(2, 2)
    add_all_gradients([layer])
    drop_copies(layer)
    assert not hasattr(layer, "is_first_microbatch")
