"""One rank alone in its process: groups of ranks that are not there, and tensors without values.

Nothing here is undone: the process is for one dry run.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Samples of the right shapes: a dry run needs no data.


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of zeros.

    Args:
        seq_length: Tokens of a sequence.
        count: Number of them.
        has_mask: Whether they bring an attention mask, for which TP ranks wait.
    """

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
    """A datasets provider for ``pretrain``.

    Args:
        args: Megatron's validated arguments.
    """

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
    """``pretrain`` on samples of the right shapes."""
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
    """Start ``torch.distributed`` with groups whose other members do not exist.

    Args:
        rank: This rank.
        world_size: Ranks of the plan.
        backend: What ``get_backend`` says: the backend of the run that this one stands for.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    new_group = distributed_c10d.new_group

    @functools.wraps(new_group)
    def new_fake_group(*positional: Any, **keywords: Any) -> Any:
        keywords.update(backend="fake")
        return new_group(*positional, **keywords)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    stand_ins: dict[str, Any] = {
        "new_group": new_fake_group,
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


class _Held:
    """Work under way, which keeps its tensors as long as the libraries do.

    Args:
        work: What ``torch.distributed`` returned.
        tensors: Of the call.
        until_wait: Whether they are let go of by ``wait``, as NCCL's are; gloo's live as long as the work.
    """

    def __init__(self, work: Any, tensors: tuple[Any, ...], until_wait: bool) -> None:
        self._work, self._tensors, self._until_wait = work, tensors, until_wait

    def wait(self, *timeout: Any) -> Any:
        """See ``Work.wait``."""
        if self._until_wait:
            self._tensors = ()
        return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _holding(collective: Callable[..., Any], *, until_wait: bool) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*positional: Any, **keywords: Any) -> Any:
        work = collective(*positional, **keywords)
        return None if work is None else _Held(work, (*positional, *keywords.values()), until_wait)

    return call


class _Sent:
    """A send that is done, which the work of the fake group never says of itself."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        """See ``Work.is_completed``."""
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
    """There is nobody to hear from."""


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Tensors made inside have a shape and a storage's size, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _without_random_state()
    torch.tensor = _of_values(torch.tensor)
    for name, dtype in (("bfloat16", torch.bfloat16), ("half", torch.float16), ("float", torch.float32)):
        setattr(torch.nn.Module, name, functools.partialmethod(_cast, dtype))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _without_random_state() -> None:
    """Generators are not read or set: a state is bytes, and fake bytes are none."""
    state = torch.default_generator.get_state()
    reading = {"get_rng_state": lambda *args, **kwargs: state, "set_rng_state": _nothing}
    _rebind((torch, torch.random, torch.cuda, torch.cuda.random), reading)
    _rebind((torch.cuda, torch.cuda.random), {"manual_seed": _nothing, "manual_seed_all": _nothing})


def _of_values(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` reads the memory of tensors in a list; their ``item()`` is asked instead."""

    @functools.wraps(make)
    def tensor(data: Any, *positional: Any, **keywords: Any) -> torch.Tensor:
        return make(_numbers(data) if isinstance(data, list | tuple) else data, *positional, **keywords)

    return tensor


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(entry) for entry in data]
    return data.item() if isinstance(data, torch.Tensor) else data


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """``Module.bfloat16()`` and its like; torch's own cannot give a parameter other fake data."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                cast = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                cast.__dict__.update(parameter.__dict__)
                part._parameters[name] = cast
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module
