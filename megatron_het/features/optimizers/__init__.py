"""Lion beside Adam in Megatron's distributed optimizer."""
