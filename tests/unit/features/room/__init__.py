"""A feature in its room alone: all that the product has of it is here."""
