"""Vocabulary parallelism: embedding, output layer and cross entropy split over TP x PP (SlimPipe, section 4.3)."""
