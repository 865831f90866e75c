"""Lowers a plan to the operations of every rank: programs, rank programs, boundaries, transports.  No torch.

Open ``programs.py`` first, the only assembly: planner, validator, pictures and ranks all get their programs there.
``ranks.py`` computes which pieces of tensors are sent from rank to rank.
"""
