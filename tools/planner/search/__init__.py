"""Searching for plans: ``auto`` (the default), and the methods of Zorse, Sailor and Poplar by name."""

from ..search.goal import Goal
from ..search.outcome import Found, Outcome, Progress

__all__ = ["Found", "Goal", "Outcome", "Progress"]
