"""Jobs over time: ``replay`` of a trace, what to ``rent``, and ``replan`` from what a run measured."""
