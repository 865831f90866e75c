"""Activations that wait on the host as a feature of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from megatron_het.features.activation_offload.offload import ActivationOffload
from megatron_het.runtime.feature import (
    BackwardPass,
    Call,
    ForwardPass,
    Handler,
    Iteration,
    OpenContext,
    RuntimeFeature,
)
from megatron_het.schedule.ir import Kind


class ActivationOffloadFeature(RuntimeFeature):
    """Moves what training's forwards save; evaluation saves nothing.

    Args:
        offload: Does the work.
    """

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload

    def handlers(self) -> Mapping[Kind, Handler]:
        """See :class:`RuntimeFeature`."""
        return {
            Kind.ACT_OFFLOAD: lambda op, call, state: self.offload.store(op),
            Kind.ACT_FETCH: lambda op, call, state: self.offload.fetch(op),
        }

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        if not call.forward_only:
            self.offload.begin(call.models)

    def around_forward(self, forward: ForwardPass, call: Call) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`."""
        if call.forward_only:
            return contextlib.nullcontext()
        return self.offload.saving(forward.op, forward.source)

    @contextlib.contextmanager
    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Iterator[None]:
        """See :class:`RuntimeFeature`."""
        self.offload.release(backward.op)
        yield

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        if not call.forward_only:
            self.offload.finish()

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """The most that activations took on the host so far."""
        return {"host_memory": {"activation_peak_bytes": self.offload.pool.peak_bytes}}

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self.offload.close()


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return ActivationOffloadFeature(ActivationOffload(float(context.options.ratio), context.platform))
