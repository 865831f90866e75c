"""Benchmarks: the commands that measure the figures which this project claims."""
