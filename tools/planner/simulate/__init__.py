"""The time of a pipeline: exact, and fast for the search."""
