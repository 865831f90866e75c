"""Slices of sequences (SlimPipe, section 4.1): schedules in ``passes.py``, passes over slices in ``runtime.py``."""
