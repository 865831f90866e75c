"""A rank's process under a plan, whatever the features: model chunks, data, transfers, the loop over operations.

Open ``session.py`` first: everything that depends on the plan, built once and torn down again.  ``executor.py`` runs a
rank's operations, ``training.py`` ties a session to ``megatron.training``, ``feature.py`` is what a feature may do.
"""
