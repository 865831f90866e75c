"""Process groups on the CPU that run their operations in NCCL's order.

gloo is more tolerant than NCCL: transfers of one group run at the same time there, in any order of
posting.  After :func:`install` every group of the backend ``nccl`` follows NCCL's rules, while
gloo moves the data, so that programs, features and collectives can be tested on a machine without
GPUs.  The rules:

* a communicator is one queue; an operation runs when those posted before it have ended,
* a send or receive occupies its communicator until both ends run,
* unbatched sends and receives of two ranks share one communicator in each group; ``batch_isend_irecv`` and
  collectives share that of the whole group, and the transfers of one batch start together,
* collectives have the same order on all members,
* communicators are connected at their first use, where the host waits for all members,
* operations of all communicators of a rank start in the order of their launch (one hardware queue,
  ``CUDA_DEVICE_MAX_CONNECTIONS=1``), and the number of operations on the device is limited,
* ``wait`` orders the compute stream after the operation and does not block the host; with a timeout, and for a
  barrier, the host waits,
* a new operation is ordered after all operations that the compute stream is ordered after,
* a tensor of an operation that is read, written or freed before a ``wait``, or before the host has seen the end of the
  operation (``is_completed``), is an error even if the operation has ended by chance,
* a tensor must not change between the post of an operation and its run,
* the host waits for all launched operations at the first launch of an operator with new types and shapes (CUDA loads
  its kernel then; cuDNN and Triton make one), at an allocation of a new size (the caching allocator may have to free
  memory first), at an allocation of pinned memory, at ``empty_cache`` and at ``synchronize``; at a read of a value it
  waits for the compute stream,
* ``abort`` ends open operations without waiting for other members; a watchdog aborts if an operation for which no
  caller waits does not end.

The host simulates the compute stream.  After ``wait`` it continues, posts further operations, and blocks when it
touches a tensor that has not arrived (``compute.py``), where the compute stream of a GPU would block.

A deadlock ends in an error with the running and waiting operations of every rank.
"""

from testing.nccl_order.group import host_wait, install, is_installed, synchronize
from testing.nccl_order.items import OrderError
from testing.nccl_order.launch import Options

__all__ = ["Options", "OrderError", "host_wait", "install", "is_installed", "synchronize"]
