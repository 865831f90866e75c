"""Prices candidates: time, memory, traffic and money of layers, stages and plans."""
