"""The attention context exchange (SlimPipe, section 4.2): ranks with little attention compute for others.

Open ``passes.py`` first: who attends for whom, as data.  ``exchange.py`` and ``helper.py`` do it on a rank.
"""
