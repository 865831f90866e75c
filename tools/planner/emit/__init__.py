"""``het-plan emit``: everything that Megatron, torchrun and Slurm run."""
