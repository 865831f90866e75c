"""Checkpoints that do not depend on the plan: saved under one, loaded under any other or by stock Megatron.

Open ``state_dict.py`` first: a plan's changes to Megatron's state dict.  ``choice.py`` finds the checkpoint to load,
``loading.py`` loads it.
"""
