"""Passes Program -> Program that add operations and keep the compute order.

Those of features are imported by the features' descriptions (``features/``), whose list is their order; transfers
come in between.  ``post_receives_early`` may follow where the transport allows it.
"""

from megatron_het.schedule.passes.transfers import add_transfers, post_receives_early

__all__ = ["add_transfers", "post_receives_early"]
