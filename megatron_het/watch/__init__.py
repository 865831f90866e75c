"""Measured beside predicted times while a run trains: what drifted, by name.  ``feature`` alone needs torch."""
