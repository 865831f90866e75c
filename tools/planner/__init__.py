"""The offline planner: profile, model, search, and write what Megatron and Slurm run.

Run it as ``python -m tools.planner`` in a checkout; installed, it is the package ``het_planner`` with the
command ``het-plan``.  This package needs the
``planner`` extra (pydantic, PyYAML, rich, scipy, networkx, Jinja2); training ranks never import it.
Modules are imported where they are used, so that ``--help`` answers at once.
"""
