"""Measured beside predicted times while a run trains: what drifted, by name.  No torch.

Open ``drift.py`` first: what drift is.  Every rank tells ``samples.py``; one rank has ``monitor.py``, which makes
findings of all samples and writes them where people look.  What a rank measures is in ``features/watch/``.
"""
