"""The parameter window of Zorse on a rank (sections 4.1.1 and 4.1.2)."""
