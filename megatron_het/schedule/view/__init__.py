"""Command line, pictures, traces and comparisons of schedules."""
