"""Context parallelism on a rank (SlimPipe, section 5)."""
