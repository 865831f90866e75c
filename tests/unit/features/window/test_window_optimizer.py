"""Stepping one optimizer ministage by ministage equals stepping it once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_het.features.window.chunk import ChunkWindow, WindowUse
from megatron_het.features.window.optimizer import ChunkedOptimizer
from megatron_het.features.window.spec import WindowOptions
from tests.unit.features.window.test_window import fake_chunk

ITERATIONS = 6


class GroupCountingAdam(torch.optim.Optimizer):
    """Counts steps per group and passes over groups without parameters, as FusedAdam of TE and Apex does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            count = group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
                mean, square = state["exp_avg"] / (1 - first**count), state["exp_avg_sq"] / (1 - second**count)
                p.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


def empty_chunk() -> SimpleNamespace:
    chunk = fake_chunk()
    chunk.module.layers, chunk.buffers = torch.nn.ModuleList(), []
    return chunk


class Training:
    """Four ministages: the second one has parameters of both groups, the third one of the first group only.

    The first and the last one are empty.

    Args:
        options: Of the window.
        outer: The kind of distributed optimizer.
        inner: The kind of optimizer in it.
        in_shard: Whether main parameters live in the shards, as those of fp32 do.
    """

    def __init__(
        self,
        options: WindowOptions,
        outer: type = DistributedOptimizer,
        inner: type[GroupCountingAdam] = GroupCountingAdam,
        in_shard: bool = True,
    ) -> None:
        self.use = WindowUse()
        ddps = (empty_chunk(), fake_chunk(), fake_chunk(), empty_chunk())
        self.chunks = [ChunkWindow(ddp, False, self.use) for ddp in ddps]
        for chunk in self.chunks:
            chunk.drop_gradients()
        (a, b), (c, d) = ([layer.weight for layer in chunk.ddp.module.layers] for chunk in self.chunks[1:3])
        self.models = [[a, c, d], [b]]
        flat = [[p.detach().flatten() for p in group] for group in self.models]
        self.mains = [[torch.nn.Parameter(p if in_shard else p.clone()) for p in group] for group in flat]
        self.plain = [[torch.nn.Parameter(p.detach().clone()) for p in group] for group in self.mains]
        self.inner = inner([{"params": list(group)} for group in self.mains])
        self.reference = GroupCountingAdam([{"params": list(group)} for group in self.plain])
        self.outer = object.__new__(outer)
        none: list[Any] = []
        vars(self.outer).update(
            optimizer=self.inner,
            config=SimpleNamespace(clip_grad=0.0),
            grad_scaler=None,
            model_float16_groups=none if in_shard else self.models,
            shard_fp32_from_float16_groups=none if in_shard else self.mains,
            model_fp32_groups=self.models if in_shard else none,
            shard_fp32_groups=self.mains if in_shard else none,
            _get_model_param_range_map=lambda p: {"gbuf_local": SimpleNamespace(start=0, end=p.numel())},
            _filter_grads_for_norm=lambda mains: [],
        )
        self.window = ChunkedOptimizer(self.outer, self.chunks, options)
        self.early = options.updates_early

    def open_all(self) -> None:
        for c in range(len(self.chunks)):
            self.window.apply_pending(c)

    def iterate(self, factor: float | None) -> None:
        """One iteration, in both trainings.

        Args:
            factor: What clipping multiplies the gradients by; None for a step that is skipped.
        """
        self.window.begin()
        self.open_all()
        for c in reversed(range(len(self.chunks))):
            self.chunks[c].open_gradients()
            for layer in self.chunks[c].ddp.module.layers:
                layer.weight.main_grad.normal_()
            self.chunks[c].keep_gradient_shards()
        for model, plain in zip(sum(self.models, []), sum(self.plain, []), strict=True):
            bucket = next(b for c in self.chunks for b in c.buckets if model in set(b.source.params_list))
            plain.grad = bucket.gradient.clone()
        for c in reversed(range(len(self.chunks))):
            if self.early:
                self.window.attach(c)
                self.window.step_now(c, None)
        self.outer._copy_model_grads_to_main_grads()
        if factor is None:
            return
        for p in (*sum(self.mains, []), *sum(self.plain, [])):
            if p.grad is not None:  # an update at once has used it up
                p.grad *= factor
        self.outer.step_with_ready_grads()
        self.reference.step()

    def check(self) -> None:
        """All updates that are due have been made, and are those of the reference."""
        self.open_all()
        for mine, plain in zip(self.inner.param_groups, self.reference.param_groups, strict=True):
            assert mine.get("step") == plain.get("step")
        for mine, plain in zip(sum(self.mains, []), sum(self.plain, []), strict=True):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("update", ["exact", "at-once", "undo", "per-ministage"])
@pytest.mark.parametrize("offload_optimizer", [False, True])
def test_steps_counted_per_group_are_those_of_one_step(update: str, offload_optimizer: bool) -> None:
    torch.manual_seed(0)
    training = Training(WindowOptions(update=update, offload_optimizer=offload_optimizer))
    for _ in range(ITERATIONS):
        training.iterate(1.0)
    training.check()


@pytest.mark.parametrize("update", ["exact", "undo"])
def test_skipped_and_clipped_steps_are_not_counted_twice(update: str) -> None:
    torch.manual_seed(0)
    training = Training(WindowOptions(update=update))
    for factor in (None, 0.5, 1.0, None, 0.25, 1.0):
        training.iterate(factor)
        training.check()


class Fused(GroupCountingAdam):
    """As Transformer Engine's: what it loads becomes tensors of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("state that lives in host memory would be read")


class Loading(DistributedOptimizer):
    """Loads as Megatron's does: groups and state of the inner optimizer first, then their content."""

    optimizer_state_keys = ("exp_avg", "exp_avg_sq")

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        for parameter, tensors in state_dict.items():
            self._set_main_param_and_optimizer_states(parameter, tensors)

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        main = self.main_of[model_param]
        main.data.copy_(tensors["param"])
        for key in self.optimizer_state_keys:
            self.optimizer.state[main][key].copy_(tensors[key])


@pytest.mark.parametrize("offload_optimizer", [False, True])
def test_a_checkpoint_is_loaded_with_the_state_of_one_ministage_on_the_device(offload_optimizer: bool) -> None:
    training = Training(WindowOptions(offload_optimizer=offload_optimizer), Loading, Fused)
    models, mains = sum(training.models, []), sum(training.mains, [])
    training.outer.main_of = dict(zip(models, mains, strict=True))
    training.use.restart()
    names = ("param", "exp_avg", "exp_avg_sq")
    content = {p: {name: torch.full((6,), i + j / 4) for j, name in enumerate(names)} for i, p in enumerate(models)}
    in_order = [p for chunk in training.chunks for p in chunk.ddp.module.parameters()]
    training.outer.load_state_dict({p: content[p] for p in in_order})
    if offload_optimizer:
        one = 2 * 6 * 2 * 4  # two moments of two weights of 6 elements
        assert training.use.peak_bytes["optimizer"] == one and training.use.held_bytes["optimizer"] == 0
        assert all(moment.untyped_storage().size() == 0 for m in mains for moment in training.inner.state[m].values())
        training.window.fetch_all()
    for parameter, main in training.outer.main_of.items():
        found = {"param": main, **training.inner.state[main]}
        assert all(torch.equal(found[name], content[parameter][name]) for name in names)
    assert "load_state_dict" not in vars(training.inner)
    training.window.detach()
    assert "load_state_dict" not in vars(training.outer)


def test_main_parameters_follow_new_weights_without_whole_ones() -> None:
    """``--finetune`` in 16 bits: no optimizer state is loaded."""
    training = Training(WindowOptions(offload_optimizer=True), Loading, in_shard=False)
    for chunk in training.chunks:
        for bucket in chunk.buckets:
            bucket.shard += 3.0
        chunk.close()
    training.use.restart()
    training.outer._copy_model_params_to_main_params()
    assert training.use.peak_bytes["optimizer"] == 2 * 6 * 4
    training.window.fetch_all()
    for model, main in zip(sum(training.models, []), sum(training.mains, []), strict=True):
        bucket = next(b for c in training.chunks for b in c.buckets if model in set(b.source.params_list))
        assert torch.equal(main, bucket.shard)
