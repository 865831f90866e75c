"""CUDA graphs of layers under a plan.  Open ``runtime.py`` first."""
