"""What is said of a plan: tables, JSON, explanations, other plans."""
