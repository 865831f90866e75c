"""Observation of a training run inside a rank process: losses, gradients, injected faults.

The functions wrap functions of Megatron, stock or under a plan, before the training entry runs (``Job.setup``).
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_het.plan import Plan
from megatron_het.plan.placement import stage_rows

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts\.)(local_experts\.)(\d+)")
Step = Callable[..., Any]


def around(owner: Any, name: str, before: Step | None = None, after: Step | None = None) -> None:
    """Wrap a function of a module or class: ``before`` gets its arguments, ``after`` its result and its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*positional: Any, **keywords: Any) -> Any:
        if before is not None:
            before(*positional, **keywords)
        result = original(*positional, **keywords)
        if after is not None:
            after(result, *positional, **keywords)
        return result

    setattr(owner, name, watched)


def wrap_stock(wrap: Callable[[Step], Step]) -> None:
    """Wrap stock's forward-backward function, at the name by which Megatron looks it up; a plan rebinds it later."""
    from megatron.training import training

    original = training.get_forward_backward_func

    @functools.wraps(original)
    def get_forward_backward_func(*positional: Any, **keywords: Any) -> Step:
        return wrap(original(*positional, **keywords))

    training.get_forward_backward_func = get_forward_backward_func


def observe(
    *,
    rank: int,
    out: str | None = None,
    gradients: bool = False,
    meter: bool = False,
    kill: tuple[int, int, int] | None = None,
    hold: tuple[int, str] | None = None,
) -> None:
    """Wrap every call of the forward-backward function of this process.

    Args:
        rank: This rank.
        out: Folder for ``losses-<rank>.json`` and ``gradients-<rank>.npz``.
        gradients: Write the gradients of the first iteration, after reduction and scaling.
        meter: Whether the report meters memory, which takes a third of the time of a small run.
        kill: (rank, iteration, operation): the rank kills itself with SIGKILL before this
            forward step of the training iteration (both counted from 0).
        hold: (iteration, file): every rank waits before the training iteration until the file exists.
    """
    from megatron.training import training

    observer = Observer(rank, Path(out) if out else None, gradients, hold)
    if kill is not None and kill[0] == rank:
        _kill_in_forward(*kill[1:], observer)
    wrap_stock(observer.wrap)
    around(training, "train_step", after=lambda result, *_, **__: observer.keep_norm(result[5]))
    _wrap_plan(observer, meter)


class Observer:
    """Records losses, gradient norms and gradients of the calls of the forward-backward function."""

    def __init__(self, rank: int, out: Path | None, gradients: bool, hold: tuple[int, str] | None = None) -> None:
        self._rank = rank
        self._hold = hold
        self._out = out
        self._gradients = gradients
        self._kept: dict[str, list[float]] = {"losses": [], "validation": []}
        self._norms: list[float | None] = []
        self.iteration = -1

    def wrap(self, step: Step) -> Step:
        """The forward-backward function ``step`` with this observer's records."""

        @functools.wraps(step)
        def observed(*positional: Any, **keywords: Any) -> Any:
            training = not keywords.get("forward_only", False)
            self.iteration += training
            if training and self._hold is not None and self._hold[0] == self.iteration:
                _wait_for(Path(self._hold[1]))
            first = training and self.iteration == 0 and self._gradients
            result = step(*positional, **keywords)
            if self._out is not None:
                self._keep_loss(result, "losses" if training else "validation")
                if first:
                    feature = positional[0].feature("window") if positional else None
                    windows = () if feature is None else list(feature.windows())
                    whole = whole_gradients(windows) if windows else reduced_gradients(keywords["model"])
                    write_gradients(keywords["model"], self._out, self._rank, whole)
            return result

        return observed

    def keep_norm(self, norm: Any) -> None:
        """Record the gradient norm of a step; None if the step was skipped."""
        if self._out is None:
            return
        self._norms.append(None if norm is None else float(norm))
        path = self._out / f"norms-{self._rank}.json"
        path.write_text(json.dumps(self._norms), encoding="utf-8")

    def _keep_loss(self, reports: Any, kind: str) -> None:
        import torch

        entries = [next(iter(report.values())).view(-1) for report in reports or [] if report]
        if not entries:
            return
        total = torch.stack([entry.double() for entry in entries]).sum(dim=0)
        self._kept[kind].append((total[0] / total[1]).item())
        assert self._out is not None
        path = self._out / f"losses-{self._rank}.json"
        path.write_text(json.dumps(self._kept), encoding="utf-8")


def _wrap_plan(observer: Observer, meter: bool) -> None:
    from megatron_het.report import RunReport
    from megatron_het.runtime.session import HetSession

    if not meter:
        RunReport._meter = lambda self: contextlib.nullcontext()
    HetSession.forward_backward = observer.wrap(HetSession.forward_backward)


def whole_gradients(windows: Any) -> dict[Any, Any]:
    """Gathers the reduced gradients of windows over chunks before the update, by parameter.  Collective."""
    found = {}
    for window in windows:
        for bucket in (one for one in window.buckets if one.gradient is not None):
            whole = bucket.gradient.new_empty(bucket.source.grad_data.numel())
            window.parts.gather(whole, bucket.gradient).wait()
            for parameter, (start, end) in bucket.source.param_to_index.items():
                found[parameter] = whole[start:end].view(parameter.shape)
    return found


def reduced_gradients(model: Any) -> dict[Any, Any]:
    """Gathers the gradient shards that the distributed optimizer's reduce-scatter has made, by parameter.

    Training's own reduction is not changed.
    """
    import torch
    import torch.distributed as dist

    found = {}
    for chunk in model if isinstance(model, list) else [model]:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            whole = torch.empty_like(buffer.grad_data)
            start = buffer.grad_data.storage_offset()
            for bucket in buffer.buckets:
                flat = bucket.grad_data
                own = flat.view(group.size(), -1)[group.rank()].contiguous()
                first = flat.storage_offset() - start
                dist.all_gather_into_tensor(whole[first : first + flat.numel()], own, group=group)
            for parameter in buffer.params:
                gradient = parameter.main_grad
                first = gradient.storage_offset() - start
                found[parameter] = whole[first : first + gradient.numel()].view(gradient.shape)
    return found


def write_gradients(model: Any, out: Path, rank: int, whole: Mapping[Any, Any] = {}) -> None:
    """Write this rank's main gradients under the names of a model on one process.

    Args:
        model: Wrapped chunks.
        out: Folder of the files.
        rank: This rank.
        whole: Gradients that are not in the parameter's ``main_grad``, by parameter.
    """
    from megatron_het.lowering.ranks import stride_of

    arrays: dict[str, Any] = {}
    places: dict[str, tuple[int, list[int]]] = {}
    for name, parameter in _named_parameters(model):
        split = getattr(parameter, "tensor_model_parallel", False)
        gradient = whole.get(parameter)
        if gradient is None:
            gradient = parameter.main_grad
        array = gradient.detach().float().cpu().numpy()
        if not np.array_equal(arrays.get(name, array), array):  # both ends of the model may be on one rank
            raise AssertionError(f"two copies of {name} have different gradients")
        arrays[name] = array
        stride = stride_of(parameter)
        sizes = [1] * stride if isinstance(stride, int) else list(stride)
        places[name] = (parameter.partition_dim, sizes) if split else (-1, [1])
    np.savez(out / f"gradients-{rank}.npz", **arrays)
    (out / f"gradients-{rank}.json").write_text(json.dumps(places), encoding="utf-8")


def _named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model if isinstance(model, list) else [model]):
        for own, parameter in chunk.named_parameters():
            name = _EXPERT.sub(functools.partial(_of_layer, chunk.config), own)
            match = _LAYER.match(name)
            if match:
                layer = chunk.decoder.layers[int(match[1])].layer_number - 1
                yield f"decoder.layers.{layer}.{name[match.end() :]}", parameter
            elif name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                yield "embedding.word_embeddings.weight", parameter  # the last stage's copy
            else:
                yield name, parameter


def _of_layer(config: Any, match: re.Match[str]) -> str:
    """The matched name with the expert's number in the layer in place of its number on this rank."""
    from megatron.core import parallel_state

    mine = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{match[1]}{parallel_state.get_expert_model_parallel_rank() * mine + int(match[2])}"


def _wait_for(file: Path, limit_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{file} has not come in {limit_s:g} s")
        time.sleep(0.05)


def _kill_in_forward(iteration: int, operation: int, observer: Observer) -> None:
    from megatron.core.pipeline_parallel import schedules

    counts: dict[int, int] = {}

    def count(*_: Any, **__: Any) -> None:
        done = counts.get(observer.iteration, 0)
        counts[observer.iteration] = done + 1
        if (observer.iteration, done) == (iteration, operation):
            os.kill(os.getpid(), signal.SIGKILL)

    around(schedules, "forward_step", before=count)


def run_script(*, path: str | None = None) -> None:
    """Run the script named by HET_TEST_SCRIPT as ``__main__`` (an entry for stock scripts)."""
    import runpy
    import sys

    script = path or os.environ["HET_TEST_SCRIPT"]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def write_dataset(
    *,
    rank: int,
    prefix: str,
    vocab_size: int,
    documents: int,
    seed: int,
    long_tailed: bool = False,
    typical: int = 4,
    longest: int = 400,
) -> None:
    """Write an IndexedDataset of short documents that a model can learn, each with an end token.

    A token determines the next one, with noise.  Documents have 3 to 40 tokens, so that microbatches differ
    in their number of loss tokens (with ``--eod-mask-loss``).  With ``long_tailed`` half of them have
    at most ``typical + 2`` tokens, and a few up to ``longest``, and the end token is ``vocab_size - 1``, else
    ``vocab_size``.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(seed)
    end = vocab_size - 1 if long_tailed else vocab_size
    successor = rng.permutation(end)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    lengths = rng.integers(3, 40, documents)
    if long_tailed:
        lengths = np.minimum(2 + typical * rng.pareto(1.0, documents), longest).astype(np.int64)
    for length in lengths:
        tokens = [int(rng.integers(end))]
        for noise in rng.random(int(length) - 1):
            tokens.append(int(successor[tokens[-1]] if noise > 0.2 else rng.integers(end)))
        builder.add_document(torch.tensor([*tokens, end]), [len(tokens) + 1])
    builder.finalize(f"{prefix}.idx")


def nothing() -> None:
    """An entry that does nothing, for jobs whose work is in their setup."""


def compare_checkpoints(*, rank: int, first: str, second: str, out: str) -> None:
    """Compare all tensors of two ``torch_dist`` checkpoints and write the result as JSON.

    Layers that are stacked under one key are split.  The result has ``missing`` (keys of only one
    checkpoint), ``different`` (largest absolute difference by key), ``equal`` (number of keys) and ``keys`` (of both).
    """
    import torch

    a, b = (_plain_tensors(Path(folder)) for folder in (first, second))
    different = {}
    for key in sorted(set(a) & set(b)):
        if a[key].shape != b[key].shape or a[key].dtype != b[key].dtype:
            different[key] = f"{a[key].shape} {a[key].dtype} and {b[key].shape} {b[key].dtype}"
        elif not torch.equal(a[key], b[key]):
            different[key] = (a[key].double() - b[key].double()).abs().max().item()
    found = {
        "missing": sorted(set(a) ^ set(b)),
        "different": different,
        "equal": len(set(a) & set(b)) - len(different),
        "keys": sorted(set(a) & set(b)),
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def _plain_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by key, without a process group."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    found = {}
    for key, tensor in tensors.items():
        stacked = re.match(r"(.*decoder\.layers\.)(?!\d)(.*)", key)
        if stacked:
            found.update({f"{stacked[1]}{i}.{stacked[2]}": part for i, part in enumerate(tensor)})
        else:
            found[key] = tensor
    return found


def die_while_saving(*, rank: int, which: int, save: int) -> None:
    """Make rank ``which`` kill itself in the middle of its ``save``-th checkpoint, counted from 1."""
    if rank != which:
        return
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    original = writer.prepare_write_data
    seen: list[Any] = []

    @functools.wraps(original)
    def prepare_write_data(*positional: Any, **keywords: Any) -> Any:
        seen.append(None)
        if len(seen) == save:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*positional, **keywords)

    writer.prepare_write_data = prepare_write_data


def forbid_process_groups(*, rank: int) -> None:
    """Make the creation of a process group end the process with code 97."""
    import torch.distributed as dist

    def refuse(*_positional: Any, **_keywords: Any) -> None:
        os.write(2, f"rank {rank} creates a process group\n".encode())
        os._exit(97)

    dist.init_process_group = dist.new_group = refuse


# The reference of per-ministage clipping: one process in which each group of gradients is clipped by its own norm.
#
# A group has the parameters of one ministage of one stage.  Norm and clipping are implemented here
# with whole gradients in double precision; the rest is stock Megatron.  With a split vocabulary every
# stage has rows of the embeddings in its first ministage, and of the output layer in its last one.


Row = dict[str, Any]
Groups = list[list[int]]  # layers of the model by group, in the order in which a microbatch passes the ministages


def groups_of(plan: Plan) -> Groups:
    """Layers of every ministage, in the order in which a microbatch visits them."""
    counts = [plan.stages[stage].layers[chunk] for stage, chunk in plan.path]
    ends = list(itertools.accumulate(counts))
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def group_of(name: str, groups: Groups) -> int:
    """The group of a parameter of the one-process model, by its name.

    Embeddings are in the first ministage of the first stage, the final norm and the output layer in
    the last one of the last stage.
    """
    parts = name.split(".")
    if "layers" in parts:
        layer = int(parts[parts.index("layers") + 1])
        return next(g for g, layers in enumerate(groups) if layer in layers)
    return 0 if "embedding" in parts else len(groups) - 1


def rows_of(name: str, total: int, plan: Plan) -> list[tuple[int, int, int]]:
    """(group, first row, end) of a parameter's rows; several groups for embeddings under a split vocabulary.

    Args:
        name: Name of the parameter in the one-process model.
        total: Number of its rows.
        plan: Plan whose ministages are the groups.
    """
    is_word, is_output = name.endswith("word_embeddings.weight"), name == "output_layer.weight"
    if not plan.schedule.parameters.get("vocabulary") or not (is_word or is_output):
        return [(group_of(name, groups_of(plan)), 0, total)]
    places = [(s, 0 if is_word else len(stage.layers) - 1) for s, stage in enumerate(plan.stages)]
    ends = list(itertools.accumulate(stage_rows(plan, total)))
    return [(plan.path.index(place), start, end) for place, start, end in zip(places, [0, *ends], ends)]


def observe_clipping_groups(*, rank: int, out: str, plan: Row) -> None:
    """Setup of the reference: :func:`observe`, and clip every group by its own norm."""
    from megatron.core.optimizer import optimizer
    from megatron.training import training

    observe(rank=rank, out=out, gradients=True)
    clipper = _Clipper(Plan.from_json(plan), Path(out) / "clipping.json")
    around(training, "setup_model_and_optimizer", after=lambda built, *_, **__: clipper.learn(built[0]))
    optimizer.clip_grad_by_total_norm_fp32 = clipper.clip


def observe_other_digits(*, rank: int, out: str) -> None:
    """Observe a reference with initial weights changed in the last digit, to measure the effect of rounding."""
    import torch
    from megatron.training import training

    observe(rank=rank, out=out)
    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_model_and_optimizer(*positional: Any, **keywords: Any) -> Any:
        built = setup(*positional, **keywords)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in (weight for model in built[0] for weight in model.parameters()):
                signs = 2 * torch.randint(2, weight.shape, generator=generator) - 1
                weight.mul_(1 + signs * torch.finfo(weight.dtype).eps)
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer


class _Clipper:
    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan, self._path = plan, path
        self._members: list[list[tuple[Any, int, int]]] = [[] for _ in groups_of(plan)]
        self._clipped: list[list[bool]] = []

    def learn(self, model: Any) -> None:
        from testing.probe import _named_parameters

        for name, parameter in _named_parameters(model):
            # In bf16 the gradients of the optimizer's fp32 parameters are clipped.
            stepped = getattr(parameter, "main_param", parameter)
            for group, first, end in rows_of(name, parameter.shape[0], self._plan):
                self._members[group].append((stepped, first, end))

    def clip(self, parameters: Any, max_norm: float, *_unused: Any, **_ignored: Any) -> None:
        """Clip each group by its own norm, in place of Megatron's clipping by the global norm."""
        missing = {id(p) for p in parameters} ^ {id(p) for members in self._members for p, _, _ in members}
        if missing:
            raise RuntimeError(f"{len(missing)} parameters are in no group, or are not clipped")
        clipped = []
        for members in self._members:
            gradients = [parameter.grad[first:end] for parameter, first, end in members]
            norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
            factor = max_norm / (norm + 1e-6)  # the epsilon is Megatron's
            clipped.append(factor < 1)
            if factor < 1:
                for gradient in gradients:
                    gradient.mul_(factor)
        self._clipped.append(clipped)
        self._path.write_text(json.dumps(self._clipped), encoding="utf-8")


# Injected faults, to show that a comparison can fail.


def _no_class_exchange() -> None:
    """Leave out the sum of gradients over replicas of different TP and over tied copies."""
    from megatron_het.distributed.gradient_sums import GradientFinalizer

    GradientFinalizer._sum_across_classes = lambda self, model: None
    GradientFinalizer._sum_reduced_across_classes = lambda self, model, are_whole: None


def _wrong_routing() -> None:
    """Make the first stage read other microbatches than those whose labels the last stage reads."""
    from megatron_het.runtime import data

    original = data.RoutedBatchSampler.__init__

    def init(self: Any, batches: Any, microbatches: Any, batches_of: Any) -> None:
        from megatron.core import parallel_state

        shift = parallel_state.get_pipeline_model_parallel_rank() == 0
        moved = [(m + shift) % len(batches_of) for m in microbatches]
        original(self, batches, moved, batches_of)

    data.RoutedBatchSampler.__init__ = init


def _no_duplicate_mark() -> None:
    """Count every copy of a parameter in the gradient norm."""
    from megatron_het.runtime import session

    session.mark_duplicates = lambda *_args, **_keywords: None


def _gated_as_plain() -> None:
    """Divide gated weights in the gradient exchange as if gate and up projection were one block."""
    from megatron_het.distributed import resharding

    original = resharding.segments

    def segments(full_size: int, tp: int, tp_rank: int, stride: Any = 1) -> Any:
        return original(full_size, tp, tp_rank, 1)

    resharding.segments = segments


def _own_token_count() -> None:
    """Divide gradients by twice the token count of the global batch."""
    from megatron.core.distributed import DistributedDataParallel

    original = DistributedDataParallel.scale_gradients
    DistributedDataParallel.scale_gradients = lambda self, scale: original(self, scale / 2)


ACCIDENTS: dict[str, Callable[[], None]] = {
    "no class exchange": _no_class_exchange,
    "wrong routing": _wrong_routing,
    "no duplicate mark": _no_duplicate_mark,
    "gated as plain": _gated_as_plain,
    "own token count": _own_token_count,
}


def break_and_observe(*, rank: int, accident: str, **options: Any) -> None:
    """Setup of a job: inject one of :data:`ACCIDENTS`, then :func:`observe`."""
    ACCIDENTS[accident]()
    observe(rank=rank, **options)


def pin(*, rank: int, cores: list[int]) -> None:
    """Keep a rank process on one core (a ``Job.setup``); ``cores`` names the core of every rank."""
    os.sched_setaffinity(0, {cores[rank]})


def pin_rank(*, rank: int) -> None:
    """Pin each rank to its own core if there are enough (a ``Job.setup``).

    Otherwise the scheduler may run a rank that has waited on the core of a busy one for a while.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
