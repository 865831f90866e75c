"""``het-plan emit``: flags for Megatron, and scripts for Slurm, torchrun, Kubernetes and SkyPilot."""
