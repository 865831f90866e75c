"""From a plan to what every rank does: programs, rank programs, boundaries, transports.  No torch.

Open ``programs.py`` first, the one assembly: planner, validator, pictures and ranks all get their programs there.
``ranks.py`` says which pieces of tensors go from rank to rank.
"""
