"""What the training software does with hardware and memory: the constants that are not the model's or the GPU's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..inputs.catalog import Gpu
from .kernels import DEFAULT_KERNELS, Kernels


@dataclass(frozen=True, slots=True)
class Runtime:
    """Physical terms of a training system, each with a meaning of its own.

    Attributes:
        name: For reports.
        transfers_in_turn: A stage sends the next activations only when the gradients before them have come, as
            DeepSpeed's schedule orders them: both transfers over a boundary stand between two microbatches of
            the later stage, while what a stage sends does not hold it up.  Else transfers overlap with
            compute, as in this project's executor.
        split_transfers: A boundary tensor crosses the network once, split over the TP ranks, and is
            put together by an all-gather inside the receiving node; else every receiving TP rank
            gets all of it.
        leader_transfers: As with ``split_transfers``, but one rank of the TP group sends it all, at what one
            GPU alone reaches over the network.
        transfer_latency_s: Fixed cost of one transfer: launch, rendezvous, synchronisation.
        operation_s: Fixed host time of one forward or backward of a stage (framework, Python).
        profile_overhead_s: Host time that timing one layer added to each measured pass.  It shows only
            where the host was the bottleneck, so it is taken off for the share of a pass in which the device
            waits for the host, going by the device's best rate.
        collective_bytes_per_s: What one rank's all-reduce over the network reaches besides the wire
            (copies into buckets, reduction, staging); the two rates add up in series.
        gradient_bytes_per_parameter: In full precision training and in mixed precision.
        extra_parameter_copies: Parameter-sized fp32 buffers beside parameters, gradients and Adam's
            two moments (flattened all-reduce buckets, temporaries of the optimizer).
        attention_copies: Attention matrices (all heads of one layer, one microbatch) alive at the
            peak besides those kept for the backward; nothing with a fused attention kernel.
        host_blocks: The process posts transfers only when the compute before them is done (CPU); else
            it is far ahead (CUDA streams).
        keeps_sent: gloo cannot tell that a send is done, so that what was sent stays until the end of the
            iteration (not in sliced schedules, which bound the number of sends under way).
        kernels: What its kernels make of a GPU.
        fused: Attention of whole sequences runs in a fused kernel where the GPU has one.
        newest_in_slices: Attention of slices runs in the GPU's newest kernel; else in FlashAttention 2.
        tp_overlap: Share of the collectives of TP that runs beside products.
        exchange_overlap: Share of the all-to-alls of experts that runs beside compute.
        gather_overlap: Share of ZeRO-2's and ZeRO-3's gathers and reductions that may run beside the compute of
            the same pass; the rest comes on top of it.
        sync_overlap: Share of the gradient reduction after the last backward, and of the gather of parameters,
            that runs beside compute.
        commuted: Context-parallel ranks send queries and outputs to each other, as plans do (SlimPipe, section 5);
            else keys and values go round a ring.
        iteration_s: Host time of an iteration besides its passes (data, logging, scheduling).
        reserved_bytes: Context, communicators and libraries of one rank; None = the catalog's figure.
        framework_bytes: What the training system holds besides (buffers of its own, what its allocator cannot reuse).
    """

    name: str = "megatron_het"
    transfers_in_turn: bool = False
    split_transfers: bool = False
    leader_transfers: bool = False
    transfer_latency_s: float = 50e-6
    operation_s: float = 0.0
    profile_overhead_s: float = 0.0
    collective_bytes_per_s: float = float("inf")
    extra_parameter_copies: float = 0.0
    attention_copies: float = 2.0
    host_blocks: bool = False
    keeps_sent: bool = False
    reserved_bytes: float | None = None
    framework_bytes: float = 0.0
    kernels: Kernels = DEFAULT_KERNELS
    fused: bool = True
    newest_in_slices: bool = False
    tp_overlap: float = 0.0
    exchange_overlap: float = 0.0
    gather_overlap: float = 1.0
    sync_overlap: float = 0.0
    commuted: bool = False
    iteration_s: float = 0.0


MEGATRON = Runtime(
    name="Megatron with Transformer Engine",
    split_transfers=True,
    tp_overlap=0.45,
    exchange_overlap=0.5,
    sync_overlap=0.8,
    gather_overlap=0.9,
)
"""Stock Megatron as its makers tune it: what overlaps is switched on, losses and sums of gradients are fused."""

MEGATRON_HET = Runtime(commuted=True, kernels=replace(DEFAULT_KERNELS, gradient_bytes=12.0, logits_bytes=52.0))
"""What ``emit`` writes: the same kernels, without Apex, and with Megatron's own loss.

Logits become fp32, and nine kernels read and write them, where Megatron's fused loss has two.
"""

WITHOUT_TE = replace(
    MEGATRON_HET,
    name="megatron_het without Transformer Engine",
    fused=False,
    kernels=replace(MEGATRON_HET.kernels, newest_attention=False, elementwise=3.0),
)
"""Megatron's own layers: attention keeps its matrices, and positions are rotated by five kernels.  Not fitted."""

CPU_GLOO = Runtime(
    commuted=True,
    name="megatron_het on CPU over gloo",
    host_blocks=True,
    keeps_sent=True,
    reserved_bytes=0.0,
    transfer_latency_s=0.0,
)


def runtime_for(gpus: Iterable[Gpu]) -> Runtime:
    """The runtime that a plan over these kinds has: all ranks have the same layers, so one kind decides for all."""
    return MEGATRON_HET if all(g.is_processor or g.has_transformer_engine for g in gpus) else WITHOUT_TE
