"""Reports of a plan: tables, JSON, explanations, other plans."""
