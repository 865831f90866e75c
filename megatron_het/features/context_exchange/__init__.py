"""The attention context exchange (SlimPipe, section 4.2): ranks with little attention compute for others.

Open ``passes.py`` first: it plans which device attends for which.  ``exchange.py`` and ``helper.py`` run it on a rank.
"""
