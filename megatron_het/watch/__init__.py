"""Measured beside predicted times while a run trains: what drifted, by name.  No torch.

Open ``drift.py`` first: what drift is.  ``monitor.py`` makes findings of all ranks' samples, and ``reader.py`` writes
them where people look.  What a rank measures is in ``features/watch/``.
"""
