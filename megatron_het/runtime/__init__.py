"""A rank's process under a plan, independent of features: model chunks, data, transfers, the loop over operations.

Read ``session.py`` first: it owns everything that depends on the plan.  ``executor.py`` runs a rank's operations,
``training.py`` connects a session to ``megatron.training``, ``feature.py`` is the protocol of features on a rank.
"""
