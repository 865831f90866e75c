"""Training that survives changes of the pool: plans change in running processes, state moves by parameter ranges.

``python -m megatron_het.elastic`` (``het-run``) starts an agent on every node and one controller.  Open
``controller.py`` first: it decides which plan runs next.  ``worker.py`` is a rank's process; ``sessions.py`` enters
and leaves Megatron's training; ``state.py`` moves state to the ranks of the next plan.  ``job.py`` has the data
structures that all of them share.
"""
