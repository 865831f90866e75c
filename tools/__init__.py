"""Command-line tools that go with megatron_het."""
