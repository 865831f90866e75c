"""Published runs, and the catalog's predictions for them."""
