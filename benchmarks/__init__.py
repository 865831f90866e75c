"""Measurements of this project: what it claims in figures, and the commands that show them."""
