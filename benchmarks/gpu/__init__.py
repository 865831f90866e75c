"""Benchmarks that want a GPU."""
