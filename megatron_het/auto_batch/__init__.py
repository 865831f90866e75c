"""Poplar's automatic batches: measure every device, allocate passes, train under the plan that comes out.

Open ``coordinate.py`` first: the way from the start to the plan.  ``measure.py`` is one device's part,
and the same idea for the parts of a sequence; ``allocation.py`` is the paper's algorithm.
"""
