"""Sums of gradients and equal initial weights across replicas whose TP sizes differ."""
