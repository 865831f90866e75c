"""Layers of experts on a rank of a plan."""
