"""Megatron's optimizers under a plan, and Lion in the distributed optimizer.  Open ``spec.py`` first."""
