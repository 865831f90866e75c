"""The front door: what a training script calls, with the optional packages that flags ask for.  Open ``start.py``."""
