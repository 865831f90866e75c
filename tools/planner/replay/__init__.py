"""Commands for jobs over time: ``replay`` of a trace, ``rent``, and ``replan`` from a run's measurements."""
