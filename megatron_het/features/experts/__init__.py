"""Mixture of experts under a plan: checks are in ``spec.py``, balancing losses in ``runtime.py``."""
