"""Multi-token prediction under a plan: one table of embeddings at both ends, and the log."""
