"""Runs in a process of its own: faults of CUDA code on fake tensors, and whether each is noticed.  Prints JSON."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.dry_run import device_streams as fake_cuda
from megatron_het.dry_run.device_streams import device_streams
from megatron_het.dry_run.run import join_alone, without_values
from megatron_het.dry_run.tracker import Tracker


def error_of(work: Callable[[], Any]) -> str:
    """The name of the error that a piece of code leads to."""
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return ""


def host_waits(tracker: Tracker) -> dict[str, list[str]]:
    """Each way in which the host waits, and some in which it does not."""
    x, mask = torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda")
    plain, pinned = torch.zeros(4), torch.zeros(4, pin_memory=True)

    def fill() -> None:
        x[mask] = 0.0

    works: dict[str, Callable[[], Any]] = {
        "item": lambda: x.sum().item(),
        "truth": lambda: bool(mask.all()),
        "cpu": x.cpu,
        "to": lambda: x.to("cpu", torch.float64),
        "made elsewhere": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "asynchronous, not pinned": lambda: plain.to("cuda", non_blocking=True),
        "asynchronous, pinned": lambda: pinned.to("cuda", non_blocking=True),
        "copied in place": lambda: pinned.copy_(x),
        "copied in place, asynchronous": lambda: pinned.copy_(x, non_blocking=True),
        "device": torch.cuda.synchronize,
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
        "filled by a mask": fill,
        "on the device": lambda: (x * 2).to(torch.bfloat16).float().cuda(),
        "on the host": lambda: plain.sum().item(),
    }
    found = {}
    for name, work in works.items():
        tracker.waits.restart()
        work()
        found[name] = sorted(entry["what"] for entry in tracker.waits.as_json() for _ in range(entry["calls"]))
    return found


def gradients_stay() -> bool:
    """Backward passes through casts and indexing give gradients on the device."""
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    rows = torch.tensor([0, 2], device="cuda")
    loss = torch.nn.functional.layer_norm(weight.to(torch.bfloat16).float()[rows], (4,)).sum()
    loss.backward()
    return weight.grad is not None and weight.grad.is_cuda


def receive(waits: bool) -> None:
    """A received tensor is read, after its transfer or without waiting for it."""
    target = torch.empty(4, device="cuda")
    work = dist.irecv(target, 1)
    if waits:
        work.wait()
    target.add(1)


def send(waits: bool) -> None:
    """A sent tensor is changed, after its transfer or without waiting for it."""
    source = torch.ones(4, device="cuda")
    work = dist.isend(source, 1)
    if waits:
        work.wait()
    source.add_(1)


def reduce(waits: bool) -> None:
    """A sum over ranks is read."""
    total = torch.ones(4, device="cuda")
    work = dist.all_reduce(total, async_op=True)
    if waits:
        work.wait()
    total.add(1)


def main() -> None:
    fake_cuda.install()
    join_alone(0, 2, "nccl")
    found: dict[str, Any] = {}
    tracker = Tracker(is_fake=True, device_type="cuda")
    with without_values(), tracker.running(), fake_cuda.OneDevice(), device_streams(tracker.waits):
        found["waits"] = host_waits(tracker)
        found["mixed"] = error_of(lambda: torch.ones(4, device="cuda") + torch.ones(4))
        found["gradients stay"] = gradients_stay()
        for name, work in {"receive": receive, "send": send, "reduce": reduce}.items():
            found[name] = [error_of(lambda work=work: work(True)), error_of(lambda work=work: work(False))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
