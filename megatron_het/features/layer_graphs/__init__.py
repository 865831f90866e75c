"""CUDA graphs of layers under a plan."""
