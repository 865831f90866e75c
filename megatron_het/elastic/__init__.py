"""Training that survives changes of the pool: plans change in running processes, state moves by parameter ranges.

``python -m megatron_het.elastic`` (``het-run``) starts an agent on every node and one controller.  Open
``controller.py`` first: which plan runs next, and why.  ``worker.py`` is a rank's process, ``sessions.py`` how it
enters and leaves Megatron's training, ``state.py`` how state gets to the ranks of the next plan.  ``job.py`` is what
all of them share.
"""
