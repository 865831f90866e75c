"""Whether the allocated nodes can run a plan, found out in two minutes before a long job.

``python -m megatron_het.doctor`` (``het-doctor``) runs once per rank, as the training does.  A check measures on every
rank (:meth:`~megatron_het.doctor.check.Check.measure`); rank 0 judges what all ranks answered
(:meth:`~megatron_het.doctor.check.Check.judge`, which needs no ranks and no devices).  Answers travel over the store
that the ranks meet at, so that a rank which dies or hangs is named, and the checks of the others go on.

Open ``check.py`` first, then ``participant.py``; the other files are a check each, but for the command's options.
"""
