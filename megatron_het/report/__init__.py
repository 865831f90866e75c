"""Measurements of a run: times, losses, memory, traces."""
