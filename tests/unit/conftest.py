"""Makes the CPU support active before any test file imports Megatron, which binds what the platform replaces."""

from megatron_het.device import activate

activate()
