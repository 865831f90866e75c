"""Zero-bubble schedules: backward passes in two halves; schedules in ``passes.py``, the halves in ``runtime.py``."""
