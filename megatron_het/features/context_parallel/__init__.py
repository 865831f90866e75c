"""Context parallelism: the ranks of a replica share every slice (SlimPipe, section 5).  Open ``runtime.py`` first."""
