"""Initial weights that are the same under every plan."""
