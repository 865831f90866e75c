"""What a run measured: times, losses, memory, traces."""
