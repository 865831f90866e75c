"""Forward and backward passes over slices of sequences, and over parts of them."""
