"""First contact: asks this machine or Slurm which GPUs there are, and writes a cluster file with comments."""
