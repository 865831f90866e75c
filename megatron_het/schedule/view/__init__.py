"""Pictures, traces and comparisons of schedules: the command line in ``cli.py``, drawing in ``visualize.py``."""
