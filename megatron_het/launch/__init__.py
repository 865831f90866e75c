"""The entry point that training scripts call; it imports optional packages if flags need them.  See ``start.py``."""
