"""Process groups on the CPU that run their operations in the order in which NCCL would.

gloo forgives what NCCL does not: transfers of one group run at the same time there, whatever the order in
which they were posted.  After :func:`install` every group of the backend ``nccl`` keeps NCCL's rules, while
gloo moves the data underneath, so that programs, features and collectives can be tried on a machine without
GPUs.  The rules:

* a communicator is one queue; an operation runs when those posted before it have ended,
* a send or receive occupies its communicator until both ends run,
* unbatched sends and receives of two ranks share one communicator in each group; ``batch_isend_irecv`` and
  collectives share the one of the whole group, and the transfers of one batch start together,
* collectives come in the same order on all members,
* communicators are connected at their first use, where the host waits for all members,
* operations of all communicators of a rank start in the order of their launch (one hardware queue,
  ``CUDA_DEVICE_MAX_CONNECTIONS=1``), and only so many are on the device at once,
* ``wait`` orders the compute stream after the operation and does not block the host; with a timeout, and for a
  barrier, the host waits,
* an operation is ordered after all that the compute stream was ordered after when it was posted,
* tensors of an operation are touched only in order: what is read, written or freed without a ``wait``, or without
  having seen the end of the operation, is an error even where the operation has ended by chance,
* a tensor must not change between the post of an operation and its run,
* the host waits for all that was launched at the first launch of an operator with new types and shapes (CUDA loads its
  kernel then, cuDNN and Triton make one), at an allocation of a new size (the caching allocator may have to free
  memory first), at an allocation of pinned memory, at ``empty_cache`` and at ``synchronize``; at a read of a value it
  waits for the compute stream,
* ``abort`` ends what is open without waiting for other members, and a watchdog does so with operations that nobody
  waits for and that do not end.

The host plays the compute stream.  It runs ahead after ``wait``, posts further operations, and stands still where it
touches a tensor that has not arrived (``compute.py``): there the compute stream of a GPU would stand still.

Operations that wait for each other end in an error that says, for every rank, what runs and what waits.
"""

from testing.nccl_order.group import host_wait, install, is_installed, synchronize
from testing.nccl_order.items import OrderError
from testing.nccl_order.launch import Options

__all__ = ["Options", "OrderError", "host_wait", "install", "is_installed", "synchronize"]
