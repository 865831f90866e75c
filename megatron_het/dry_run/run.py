"""The run of one rank under a tracker, dry or real.

In a dry run the rank is alone: the other ranks of its groups are absent, and its tensors have no values.  Replaced
functions are not restored, because the process makes only one dry run.
"""

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_het import device as platform
from megatron_het.arguments import hooks
from megatron_het.device import Platform
from megatron_het.distributed import loss_source
from megatron_het.dry_run import device_streams as fake_cuda
from megatron_het.dry_run import kernels
from megatron_het.dry_run.device_streams import device_streams
from megatron_het.dry_run.kernels import balance_experts, check_experts
from megatron_het.dry_run.tracker import GRADIENTS, OPTIMIZER, PARAMETERS, Tracker
from megatron_het.features.base import flag_of
from megatron_het.features.registry import packing_argument
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan.run_config import HetConfig
from megatron_het.report import Timeline, optimizer_tensors
from megatron_het.runtime.data import MESSAGE_BYTES, Reports
from megatron_het.runtime.feature import Call, Iteration, optimizer_of
from megatron_het.runtime.session import HetSession

# Samples of the right shapes: a dry run needs no data.


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of zeros, with an attention mask if TP ranks expect one."""

    def __init__(self, seq_length: int, count: int, has_mask: bool) -> None:
        self._seq_length, self._count, self._has_mask = seq_length, count, has_mask

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self._seq_length
        sample = {
            "tokens": torch.zeros(length, dtype=torch.int64),
            "labels": torch.zeros(length, dtype=torch.int64),
            "loss_mask": torch.ones(length, dtype=torch.float32),
            "position_ids": torch.arange(length, dtype=torch.int64),
        }
        if self._has_mask:
            sample["attention_mask"] = torch.zeros((1, length, length), dtype=torch.bool)
        return sample


def _samples_provider(args: Any) -> Callable[..., tuple[Any, ...]]:
    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
        from megatron.training.utils import is_first_or_last_pipeline_stage

        has_mask = args.create_attention_mask_in_dataloader
        if not is_first_or_last_pipeline_stage(vp_stage):
            return (None, None, None)
        return tuple(_Samples(args.seq_length, count, has_mask) if count else None for count in num_samples)

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it
    return provide


def parse_alone() -> Any:
    """Megatron's arguments, for a run that reads and writes nothing."""
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    args.save = args.load = args.pretrained_checkpoint = args.tensorboard_dir = None
    args.wandb_project = ""
    args.do_train = True  # Megatron reads it from a broadcast
    return args


def train_alone(args: Any) -> None:
    """Run Megatron's ``pretrain`` on samples of the right shapes."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_het import gpt_training
    from megatron_het.families import family_of

    now_s = time.time()
    set_startup_timestamps(program_start=now_s, main_entry=now_s)
    pretrain(
        pretrain_cfg_container_from_args(args, family_of(args).model_config(args)),
        _samples_provider(args),
        ModelType.encoder_or_decoder,
        gpt_training.forward_step,
        store=None,
        get_embedding_ranks=gpt_training.embedding_ranks,
    )


def join_alone(rank: int, world_size: int, backend: str) -> None:
    """Initialise ``torch.distributed`` with fake groups, for which ``get_backend`` returns ``backend``."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    new_group = distributed_c10d.new_group

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    stand_ins: dict[str, Any] = {
        "new_group": lambda *args, **keywords: new_group(*args, **keywords | {"backend": "fake"}),
        "all_gather_object": all_gather_object,
        "broadcast_object_list": _nothing,
    }
    if backend == "nccl":
        stand_ins["isend"] = _sent_at_once(distributed_c10d.isend)
    for name in _COLLECTIVES:
        stand_ins[name] = _holding(getattr(distributed_c10d, name), until_wait=backend == "nccl")
    _rebind((dist, distributed_c10d), stand_ins)
    _rebind((dist,), {"get_backend": lambda group=None: dist.Backend(backend)})


def _rebind(modules: Iterable[Any], stand_ins: Mapping[str, Any]) -> None:
    for module in modules:
        for name, stand_in in stand_ins.items():
            setattr(module, name, stand_in)


_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor")


@dataclass(eq=False)
class _Held:
    """Work that keeps its tensors alive as long as NCCL or gloo does."""

    work: Any  # result of ``torch.distributed``
    tensors: tuple[Any, ...]
    until_wait: bool  # whether ``wait`` releases them, as with NCCL; gloo keeps them as long as the work exists

    def wait(self, *timeout: Any) -> Any:
        if self.until_wait:
            self.tensors = ()
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _holding(collective: Callable[..., Any], *, until_wait: bool) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*positional: Any, **keywords: Any) -> Any:
        work = collective(*positional, **keywords)
        return None if work is None else _Held(work, (*positional, *keywords.values()), until_wait)

    return call


class _Sent:
    """A completed send; the fake group's own work never reports completion."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _sent_at_once(isend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(isend)
    def call(*positional: Any, **keywords: Any) -> Any:
        work = isend(*positional, **keywords)
        return None if work is None else _Sent(work)

    return call


def _nothing(*positional: Any, **keywords: Any) -> None:
    """Does nothing: there are no other ranks."""


def without_values() -> contextlib.AbstractContextManager[Any]:
    """Context in which new tensors have a shape and a size of storage, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _without_random_state()
    torch.tensor = _reads_items(torch.tensor)
    torch.nn.Module._apply = _apply_to_fakes  # type: ignore[method-assign]
    return FakeTensorMode(allow_non_fake_inputs=True)


def _without_random_state() -> None:
    """Replace reads and writes of generator states: a state is a tensor, and fake tensors have no values."""
    state = torch.default_generator.get_state()
    reading = {"get_rng_state": lambda *args, **kwargs: state, "set_rng_state": _nothing}
    _rebind((torch, torch.random, torch.cuda, torch.cuda.random), reading)
    _rebind((torch.cuda, torch.cuda.random), {"manual_seed": _nothing, "manual_seed_all": _nothing})


def _reads_items(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` with ``item()`` of tensors in a list, whose memory it would read."""

    @functools.wraps(make)
    def tensor(data: Any, *positional: Any, **keywords: Any) -> torch.Tensor:
        return make(_numbers(data) if isinstance(data, list | tuple) else data, *positional, **keywords)

    return tensor


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(entry) for entry in data]
    return data.item() if isinstance(data, torch.Tensor) else data


def _apply_to_fakes(
    module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Replacement of ``Module._apply``, which cannot set the data of a fake parameter: makes new parameters."""
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                data = fn(parameter)
            if (data.dtype, data.device) != (parameter.dtype, parameter.device):
                made = torch.nn.Parameter(data, parameter.requires_grad)
                for key, value in parameter.__dict__.items():
                    made.__dict__.setdefault(key, value)  # keeps the new tensor's own attributes
                part._parameters[name] = made
        part._buffers |= {name: fn(buffer) for name, buffer in part._buffers.items() if buffer is not None}
    return module


# A session that reports to a tracker.


class _WatchedTimeline(Timeline):
    """Reports the running operation to the tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    @contextlib.contextmanager
    def measure(self, op: RankOp) -> Iterator[None]:
        self._tracker.operation(op.kind.name.lower(), op.label)
        with super().measure(op):
            yield
        self._tracker.phase("between operations")


class WatchedSession(HetSession):
    """The session of a run that a tracker counts.

    Args:
        config, platform, rank: As for :class:`HetSession`.
        measured: Whether the run is real, so that copies in flight end at a time that the machine decides.
    """

    def __init__(self, config: HetConfig, platform: Platform, rank: int, tracker: Tracker, measured: bool) -> None:
        super().__init__(config, platform, rank)
        self._measured = measured
        self._tracker = tracker
        self._timeline = _WatchedTimeline(tracker)
        self.last_figures: dict[str, Mapping[str, int]] = {}
        """Figures of features in the last iteration, by title."""

    def open(self, args: Any) -> None:
        super().open(args)
        for feature in self._features if self._measured else ():
            feature.end_when_waited_for()

    def forward_backward(self, **keywords: Any) -> list[Any]:
        # Otherwise reference cycles, and tensors in them, are freed at arbitrary times.
        gc.collect()
        gc.disable()
        if not keywords.get("forward_only", False):
            self._tracker.start_iteration()
        result = super().forward_backward(**keywords)
        self.mark_state()
        for feature in self._features:
            self.last_figures |= feature.figures()
        self._tracker.phase("optimizer")
        return result

    def _finalize(self, call: Call, state: Iteration, force_all_reduce: bool) -> None:
        self._tracker.phase("gradient reduction")
        super()._finalize(call, state, force_all_reduce)

    def _passed_on(self, reports: Reports) -> Reports:
        """Broadcast as many bytes as a real run; losses have no values, so the logging rank gets zeros."""
        group = self.groups.get("loss")
        if group is None:
            return reports
        letters = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=self._platform.device)
        dist.broadcast(letters, src=loss_source(self.placement), group=group)
        return reports or [{"lm loss": torch.zeros(2, device=self._platform.device)}]

    def finish_report(self) -> None:
        self.mark_state()
        super().finish_report()

    def mark_state(self) -> None:
        """Mark the tensors that this rank keeps between iterations."""
        from megatron.core.utils import get_model_config

        if not self._models:
            return
        found: list[Any] = [getattr(model, "buffers", None) for model in self._models]  # DDP's is a list of them
        buffers = [buffer for buffers in found if isinstance(buffers, list) for buffer in buffers]
        optimizer = optimizer_of(get_model_config(self._models[0]))
        self._tracker.mark({OPTIMIZER: optimizer_tensors(optimizer)})
        for feature in self._features:
            self._tracker.mark(feature.kept())
        self._tracker.mark(
            {
                GRADIENTS: (b.grad_data for b in buffers),
                PARAMETERS: (p.data for m in self._models for p in m.parameters()),
            }
        )


ITERATIONS = 2  # from the second one on, the optimizer's state exists at the start of an iteration
_LAST = ("--num-workers", "0", "--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1")
# A fused attention gets no mask.
_GPU = ("--distributed-backend", "nccl", "--attention-backend", "unfused", "--no-create-attention-mask-in-dataloader")


@dataclass(frozen=True)
class Setting:
    """How a rank is run."""

    rank: int
    measured: bool = False  # whether it takes part in a real run
    gpu: bool = True  # whether the run simulates a GPU: fused kernels, and groups of NCCL
    fused: bool = True  # whether attention of whole sequences is fused there; else its score matrices are kept
    cuda: bool = False  # whether fake tensors are on a CUDA device, and host waits and stream order are checked
    ignored_wait: str = ""  # a line whose waits between streams are ignored, to test that the check fails


def import_megatron(*, gpu: bool, cuda: bool = False) -> None:
    """Import what all ranks need, so that processes can be forked from this one."""
    if cuda and not platform.is_active():
        fake_cuda.install()
        platform.pretend(Platform("cuda", plays_cuda=True))
    platform.activate(plays_cuda=gpu)
    from megatron.training import pretrain, training  # noqa: F401


_COUNTING: list[Tracker] = []


def _count_flops(count: float) -> None:
    """Add the FLOPs of a replaced kernel to the tracker of this process."""
    for tracker in _COUNTING:
        tracker.add_flops(count)


def run(setting: Setting, flags: Sequence[str]) -> dict[str, Any]:
    """Train for :data:`ITERATIONS` iterations and return what was counted in the last one.

    Args:
        setting: Which rank, and how.
        flags: Megatron's flags with ``--het-plan``.
    """
    tracker = Tracker(is_fake=not setting.measured, device_type="cuda" if setting.cuda else "cpu")
    _COUNTING.append(tracker)
    sessions: list[WatchedSession] = []

    def make_session(config: HetConfig, device: Platform, rank: int) -> WatchedSession:
        sessions.append(WatchedSession(config, device, rank, tracker, setting.measured))
        return sessions[-1]

    import_megatron(gpu=setting.gpu, cuda=setting.cuda)
    if setting.gpu:
        kernels.replace_kernels(_count_flops, attention=setting.fused)
    device = platform.activate()
    needed = [word for flag in device.flags() for word in flag.words] if setting.gpu else []
    backend = _GPU if setting.gpu else ()
    # Flags that Megatron requires, without effect here.
    given = {word.split("=", 1)[0] for word in flags}
    lasts = () if given & {"--train-iters", "--train-samples"} else ("--train-iters", "10")
    sys.argv = ["dry_run", "--lr", "1e-4", *lasts, *flags, *needed, *backend, *_LAST]
    hooks.install(make_session=make_session)
    args = parse_alone()
    args.exit_interval = ITERATIONS
    # Graphs cannot be captured without a device; they keep the activations of the layers, and their inputs.
    args.cuda_graph_impl = "none"
    if not setting.measured:
        _check_flags(args)
        tracker.top_k = check_experts(args)
        balance_experts()
    session = sessions[0]
    start_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if not setting.measured:
            join_alone(setting.rank, session.plan.world_size, args.distributed_backend)
            stack.enter_context(without_values())
        stack.enter_context(tracker.running())
        if setting.cuda:
            order, _ = stack.enter_context(device_streams(tracker.waits, setting.ignored_wait))
            stack.enter_context(fake_cuda.OneDevice())  # innermost: the other modes rely on its device
        try:
            train_alone(args)
        except SystemExit as stop:  # by the exit interval
            if stop.code not in (None, 0):
                raise
    figures = _figures(session, setting.rank, tracker)
    if setting.cuda:
        figures["stream_waits"] = sorted(order.waits - order.waits_of_host)
    return figures | {"run_seconds": round(time.perf_counter() - start_s, 3)}


def _check_flags(args: Any) -> None:
    """Refuse flags that a dry run cannot simulate.

    Raises:
        SystemExit: The documents of a sequence do not see each other, or Megatron keeps optimizer state in main memory.
    """
    if packing := packing_argument(args):
        problem = (
            f"{flag_of(packing)}: where documents begin depends on values, which a dry run does "
            "not have. Without the flag every sequence is one document; under full recomputation a run with "
            "documents also holds the keys and values of its microbatches in flight"
        )
    elif getattr(args, "optimizer_cpu_offload", False):
        problem = (
            "--optimizer-cpu-offload: a dry run has one device, and keeps no state in main memory. "
            "Without the flag all of the optimizer's state is counted on the device"
        )
    else:
        return
    sys.stderr.write(f"megatron_het.dry_run: {problem}\n")
    raise SystemExit(2)


def _figures(session: WatchedSession, rank: int, tracker: Tracker) -> dict[str, Any]:
    where = session.placement.locate(rank)
    peak, start = tracker.ledger.peak(ITERATIONS - 1), tracker.ledger.peak(-1)
    return {
        "rank": rank,
        "stage": where.stage,
        "replica": where.replica,
        "tp_rank": where.tp_rank,
        "memory": asdict(peak) | {"start_bytes": start.total_bytes},
        "flops": dict(sorted(tracker.flops.items())),
        "traffic": tracker.traffic.as_json(),
        "host_waits": tracker.waits.as_json(),
        "figures": {title: dict(values) for title, values in session.last_figures.items()},
    }
