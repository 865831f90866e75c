"""Layers that save less from forward to backward (SlimPipe, sections 5 and 6.4).  Open ``runtime.py`` first."""
