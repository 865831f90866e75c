"""Mixture of experts under a plan: what can be trained in ``spec.py``, balancing losses in ``runtime.py``."""
