"""Passes Program -> Program that add operations and keep the compute order."""

from megatron_het.schedule.passes.exchange import add_exchange
from megatron_het.schedule.passes.transfers import add_transfers

__all__ = ["add_exchange", "add_transfers"]
