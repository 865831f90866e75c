"""Backward passes in two halves on a rank: zero-bubble schedules."""
