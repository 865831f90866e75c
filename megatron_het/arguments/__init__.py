"""The command line of a training: flags of this project, Megatron's flags under a plan, and their installation.

``flags.py`` reads the ``--het-*`` flags, ``megatron_args.py`` checks and sets Megatron's own, and ``hooks.py`` installs
a plan in a process.  Open ``hooks.py`` first.
"""
