"""Checkpoints that do not depend on the plan: saved under one, loaded under any other or by stock Megatron."""
