"""Sums of gradients and equal initial weights across replicas that cut weights otherwise."""
