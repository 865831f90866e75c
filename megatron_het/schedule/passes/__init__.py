"""Passes Program -> Program that add operations and keep the compute order.

In this order, where they are used: exchange, vocabulary, embedding, transfers, parameters, activation offload.
``post_receives_early`` may follow where the transport allows it.
"""

from megatron_het.schedule.passes.exchange import add_exchange
from megatron_het.schedule.passes.offload import add_activation_offload
from megatron_het.schedule.passes.parameters import add_parameters
from megatron_het.schedule.passes.transfers import add_transfers, post_receives_early
from megatron_het.schedule.passes.embedding import add_embedding
from megatron_het.schedule.passes.vocabulary import add_vocabulary

__all__ = [
    "add_activation_offload", "add_embedding", "add_exchange", "add_parameters", "add_transfers", "add_vocabulary",
    "post_receives_early",
]  # fmt: skip
