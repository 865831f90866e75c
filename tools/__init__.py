"""Command-line tools around megatron_het."""
