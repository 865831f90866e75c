"""Packed documents: attention that ends where a document begins.  Open ``spec.py`` first."""
