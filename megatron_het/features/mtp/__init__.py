"""Multi-token prediction: one table of embeddings at both ends, and the log.  Open ``runtime.py`` first."""
