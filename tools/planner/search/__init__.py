"""Searching for plans: ``auto`` (the default), and the methods of Zorse, Sailor and Poplar by name."""

from ..search.outcome import Found, Outcome, Progress
from .outcome import Goal

__all__ = ["Found", "Goal", "Outcome", "Progress"]
