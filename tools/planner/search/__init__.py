"""Searching for plans: ``auto`` (the default), and the methods of Zorse, Sailor and Poplar by name."""

from .outcome import Found, Goal, Progress, SearchResult

__all__ = ["Found", "Goal", "Progress", "SearchResult"]
