"""Zero-bubble schedules: backward passes in two halves.  Schedules in ``passes.py``, the halves in ``runtime.py``."""
