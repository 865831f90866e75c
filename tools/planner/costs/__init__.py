"""Costs of a candidate: time, memory, traffic and money of layers, stages and plans."""
