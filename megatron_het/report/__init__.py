"""Measurements of a run: times, losses, memory (``run_report.py``), and operations by time (``timeline.py``)."""
