"""Vocabulary parallelism: embedding, output layer and cross entropy split over TP x PP (SlimPipe, section 4.3).

Open ``layers.py`` first: this rank's rows and what they send; ``runtime.py`` when they do.
"""
