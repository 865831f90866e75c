"""Vocabulary parallelism: embedding, output layer and cross entropy split over TP x PP (SlimPipe, section 4.3).

Read ``layers.py`` first: this rank's rows and their messages.  ``runtime.py`` has the operations that use them.
"""
