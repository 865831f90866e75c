"""A small Llama on a mixed cluster: data, cluster and model files, Slurm scripts and a one-machine demo."""
