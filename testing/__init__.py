"""Instruments of tests and benchmarks; no product module imports them."""
