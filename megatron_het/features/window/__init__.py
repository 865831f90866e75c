"""The parameter window of Zorse (sections 4.1.1 and 4.1.2): parameters whole only while their ministage computes.

Open ``chunk.py`` first: one ministage, sharded when closed and whole while open.  ``passes.py`` says when it opens,
``shards.py`` how it is divided, ``optimizer.py`` and ``state.py`` how one ministage is updated at a time.
"""
