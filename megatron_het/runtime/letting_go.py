"""A closed session leaves nothing in its process: no weights, no optimizer state, no connection.

Data-parallel models are kept by a circle that leads through autograd's nodes, where Python's garbage collector does
not look: the model holds a parameter, the node of its gradient holds a hook, and the hook holds the model.  With
the models stay their buffers, the optimizer, whose shards are views of the parameters, and process groups, whose
connections stay open: a rank of a failed session that still waits for this one would not notice that it has gone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def let_go(models: Iterable[torch.nn.Module]) -> None:
    """Cut the circles of models that nobody uses any more.

    Args:
        models: Chunks as Megatron wrapped them.
    """
    from megatron.core.distributed import DistributedDataParallel

    for chunk in models:
        for module in list(chunk.modules()):
            if isinstance(module, DistributedDataParallel):
                # Modules with a cache of their own, such as rotary embeddings, outlive the model, with their hooks.
                for handle in getattr(module, "remove_forward_pre_hook_handles", {}).values():
                    handle.remove()
                # No hook of a node can be removed without its handle, and nobody keeps the handles: what the hooks
                # hold is emptied instead.
                vars(module).clear()
