"""Offload of activations to host memory (Zorse, section 4.1.3; SlimPipe, section 6.5).  Open ``spec.py`` first."""
