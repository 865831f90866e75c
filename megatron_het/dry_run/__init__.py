"""Dry run: the real training of one rank of a plan, on fake tensors, without devices and without the other ranks.

What a rank would hold, compute and send is counted by the tracker of :mod:`megatron_het.dry_run.tracker`.  The same
tracker counts real runs, so that a dry run can be compared with one to the byte.
"""
