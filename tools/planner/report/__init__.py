"""Reports of a plan: tables, JSON, explanations, other plans, and the HTML page."""
