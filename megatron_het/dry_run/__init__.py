"""Dry run: the real training of one rank of a plan, on fake tensors, without devices and without the other ranks.

Open ``run.py`` first.  ``tracker.py`` counts the memory, computation and traffic of the rank.  The same tracker counts
real runs, so that a dry run can be compared with one to the byte.
"""
