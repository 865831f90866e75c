"""The life of a session around ``megatron.training.pretrain``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_het.checkpoint.state_dict import StateDictHook
from megatron_het.runtime.data import routed_provider
from megatron_het.runtime.session import HetSession


class PretrainHook:
    """Builds the replacements of the functions that a session serves.

    Args:
        session: The session to open when training starts.
    """

    def __init__(self, session: HetSession) -> None:
        self._session = session
        self._state_dict: StateDictHook | None = None

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``pretrain`` with the plan's groups, schedule, data routing and report."""

        @functools.wraps(original)
        def pretrain(
            cfg_container: Any, provider: Callable[..., Any], *positional: Any, **keywords: Any
        ) -> Any:
            session = self._session
            args = _initialize_distributed(keywords.get("store"))
            session.open(args)
            self._state_dict = StateDictHook(session.groups, session.tied_copies)
            session.prepare_model_config(cfg_container.model)
            provider = self._route_data(args, provider)
            keywords["skip_model_parallel_init"] = True
            _say_on_first_rank(session)
            try:
                with session.explained(lambda: "a step outside of the schedule"):
                    result = original(cfg_container, provider, *positional, **keywords)
            except SystemExit as stop:
                if stop.code not in (None, 0):
                    raise
                self._finish()  # a planned stop, e.g. --exit-interval
                raise
            self._finish()
            return result

        return pretrain

    def _route_data(self, args: Any, provider: Callable[..., Any]) -> Callable[..., Any]:
        placement = self._session.placement
        where = placement.locate(args.rank)
        replica = placement.replica(where.stage, where.replica)
        loader_type, args.dataloader_type = args.dataloader_type, "external"
        return routed_provider(
            provider, replica.microbatches, self._session.plan.num_microbatches, loader_type
        )

    def wrap_schedule_getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``get_forward_backward_func``: the session's executor."""

        @functools.wraps(original)
        def get_forward_backward_func(*_positional: Any, **_keywords: Any) -> Callable[..., Any]:
            return self._session.forward_backward

        return get_forward_backward_func

    def wrap_generate_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``generate_state_dict``; groups exist only once the session is open."""

        @functools.wraps(original)
        def generate_state_dict(*positional: Any, **keywords: Any) -> Any:
            assert self._state_dict is not None, "no checkpoint before the session is open"
            self._session.materialise_parameters()
            return self._state_dict.wrap(original)(*positional, **keywords)

        return generate_state_dict

    def _finish(self) -> None:
        report = self._session.report
        if report is not None:
            self._session.finish_report()
            print(report.closing(), flush=True)  # noqa: T201 - one line per rank, as Megatron does
        # All ranks leave together, and with no group left: a process that ends while its peers still
        # use their connections to it can abort in the threads behind them.
        dist.barrier()
        self._session.close()
        dist.destroy_process_group()


def _initialize_distributed(store: Any) -> Any:
    """Start ``torch.distributed`` as Megatron does it, leaving model-parallel groups to the plan."""
    from megatron.training import get_args
    from megatron.training import initialize

    initialize._initialize_distributed(None, None, store, skip_model_parallel_init=True)
    return get_args()


def _say_on_first_rank(session: HetSession) -> None:
    from megatron.training.utils import print_rank_0

    assert session.report is not None
    print_rank_0(session.report.opening())
