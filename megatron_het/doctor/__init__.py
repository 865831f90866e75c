"""Checks in two minutes, before a long job, whether the allocated nodes can run a plan.

``python -m megatron_het.doctor`` (``het-doctor``) runs once per rank, like the training.  A check measures on every
rank (:meth:`~megatron_het.doctor.check.Check.measure`); rank 0 judges the results of all ranks
(:meth:`~megatron_het.doctor.check.Check.judge`, which needs no ranks and no devices).  Results are sent over the job's
store, so that a rank that dies or hangs is named, and the checks of the other ranks go on.

Open ``check.py`` first, then ``participant.py``; each other file is a check, except ``__main__.py``, the command line.
"""
