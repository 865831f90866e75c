"""Poplar's automatic batches: measure every device, allocate passes to devices, and make the training's plan.

Open ``coordinate.py`` first: all steps from the start to the plan.  ``measure.py`` measures one device, also for
context-parallel parts; ``allocation.py`` has the paper's algorithm.
"""
