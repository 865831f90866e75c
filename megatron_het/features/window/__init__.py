"""The parameter window of Zorse (sections 4.1.1 and 4.1.2): parameters are gathered only while their ministage runs.

Read ``chunk.py`` first: one ministage, sharded when closed and gathered when open.  ``passes.py`` decides when it
opens, ``shards.py`` how it is divided; ``optimizer.py`` and ``state.py`` update one ministage at a time.
"""
