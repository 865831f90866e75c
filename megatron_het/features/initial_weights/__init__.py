"""Initial weights that are the same under every plan, drawn by name.  Open ``runtime.py`` first."""
