"""Packed documents on a rank: where they begin, known to every rank before an iteration."""
