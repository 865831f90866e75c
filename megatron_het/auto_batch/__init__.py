"""Poplar's automatic batches: measure every device, allocate passes, train under the plan that comes out."""
