"""From a plan to what every rank does: programs, rank programs, boundaries, transports.  No torch."""
