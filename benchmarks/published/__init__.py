"""Published runs, and what the catalog predicts for them."""
