"""Activations that wait in host memory (SlimPipe, section 6.5)."""
