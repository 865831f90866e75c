"""The watch: measured beside predicted times while a run trains; what drifted, by name.

Open ``drift.py`` first: what drift is.  ``runtime.py`` measures on every rank and leaves ``samples.py`` in the store.
One rank has ``monitor.py``, which makes findings of all samples and writes them where people look.  No torch, but for
``runtime.py``.
"""
