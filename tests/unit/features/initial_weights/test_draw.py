"""Random values by name: parts of a tensor are those of the whole, however it is split."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.features.initial_weights import runtime
from megatron_het.features.initial_weights.runtime import BLOCK_ROWS, InitialWeightsByName, fill
from megatron_het.lowering.ranks import Segment, segments
from megatron_het.plan import Cut
from testing.fp8_weights import quantised

ROWS, COLUMNS = 2 * BLOCK_ROWS + 40, 24


def normal(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(tensor, 0.0, 0.02)


def whole(name: str = "layer.weight", seed: int = 7) -> torch.Tensor:
    target = torch.empty(ROWS, COLUMNS)
    fill(target, normal, name, seed, full_size=ROWS, dim=0, segments=[Segment(0, 0, ROWS)])
    return target


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tp", [2, 4])
def test_rows_of_ranks_are_those_of_the_whole(tp: int, stride: int):
    for rank in range(tp):
        parts = segments(ROWS, tp, rank, stride)
        target = torch.empty(ROWS // tp, COLUMNS)
        fill(target, normal, "layer.weight", 7, full_size=ROWS, dim=0, segments=parts)
        for part in parts:
            expected = whole()[part.full : part.full + part.length]
            assert torch.equal(target[part.local : part.local + part.length], expected)


def test_columns_of_ranks_are_those_of_the_whole():
    for rank in range(3):
        target = torch.empty(ROWS, COLUMNS // 3)
        fill(target, normal, "layer.weight", 7, full_size=COLUMNS, dim=1, segments=segments(COLUMNS, 3, rank))
        assert torch.equal(target, whole()[:, rank * 8 : rank * 8 + 8])


def test_a_padded_table_begins_with_the_shorter_one():
    target = torch.empty(ROWS + 100, COLUMNS)
    fill(target, normal, "layer.weight", 7, full_size=ROWS + 100, dim=0, segments=[Segment(0, 0, ROWS + 100)])
    assert torch.equal(target[:ROWS], whole())


def test_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch):
    def drawn(draw: runtime.Draw) -> torch.Tensor:
        target = torch.empty(ROWS, COLUMNS)
        fill(target, draw, "layer.weight", 7, full_size=ROWS, dim=0, segments=[Segment(0, 0, ROWS)])
        return target

    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    of_torch = functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)
    assert runtime._takes_generator(of_torch) and not runtime._takes_generator(normal)
    assert torch.equal(drawn(of_torch), drawn(normal))


def test_name_and_seed_decide():
    assert not torch.equal(whole(), whole("other.weight"))
    assert not torch.equal(whole(), whole(seed=8))
    assert abs(float(whole().std()) - 0.02) < 1e-3


def test_the_state_of_the_default_generator_stays():
    before = torch.random.get_rng_state()
    whole()
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_depends_on_the_whole_is_drawn_whole():
    """Xavier's bounds follow from both sizes."""
    target = torch.empty(ROWS, COLUMNS)
    parts = [Segment(0, 0, ROWS)]
    fill(target, torch.nn.init.xavier_uniform_, "w", 7, full_size=ROWS, dim=0, segments=parts, in_blocks=False)
    bound = (6 / (ROWS + COLUMNS)) ** 0.5
    assert 0.95 * bound < float(target.abs().max()) <= bound


# Which parameters of a chunk get the weights that belong to their names.


class Linear(torch.nn.Module):
    """A layer that is filled as Megatron's are, or makes its parameter anew afterwards as Transformer Engine's do."""

    def __init__(self, config: Any, rewraps: bool, fp8: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8, 4), torch.nan))
        self.param_init_meta = {"weight": SimpleNamespace(init_fn=config.init_method)}
        config.init_method(self.weight)
        if rewraps:
            self.weight = torch.nn.Parameter(self.weight)
        if fp8:
            assert not self.weight.any(), "nothing is quantised that was not written"
            self.weight = quantised(self.weight)


class Model(torch.nn.Module):
    """A chunk with an output layer alone, and a parameter that nobody fills."""

    def __init__(self, config: Any, *forms: bool) -> None:
        super().__init__()
        self.output_layer = Linear(config, *forms)
        self.scale = torch.nn.Parameter(torch.zeros(8, 4))


def built(*forms: bool, seed: int = 1234) -> Model:
    config = SimpleNamespace(**dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method")))
    for name in vars(config):
        setattr(config, name, torch.nn.init.normal_)
    feature = InitialWeightsByName(seed, Cut(1), 0, 0, 0, in_blocks=True)
    feature.prepare_config(SimpleNamespace(transformer=config))
    model = Model(config, *forms)
    feature.attach([model])
    feature.close()
    return model


def test_a_parameter_that_its_layer_makes_anew_is_filled_too() -> None:
    plain, rewrapped = built(False), built(True)
    assert plain.output_layer.weight.detach().std() > 0.5
    assert torch.equal(plain.output_layer.weight, rewrapped.output_layer.weight)
    assert not rewrapped.scale.any()


def test_weights_in_fp8_are_quantised_from_the_values_of_their_names() -> None:
    weight, values = built(False, True).output_layer.weight, built(False).output_layer.weight
    assert torch.equal(weight.get_high_precision_init_val(), values), "what the optimizer begins with"
    assert 0.0 < float((weight - values).detach().norm() / values.detach().norm()) < 0.05


def test_weights_that_do_not_hold_what_is_written_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testing.fp8_weights._bytes", lambda values: torch.zeros(values.shape, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="does not hold what was written.*--fp8-param-gather"):
        built(False, True)


def test_tensors_without_memory_are_told_apart() -> None:
    """Of a dry run: what is filled there does not matter, but that nothing fails does."""
    with FakeTensorMode():
        model = built(True)
    assert model.output_layer.weight.shape == (8, 4)
