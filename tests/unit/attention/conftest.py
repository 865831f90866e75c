"""Makes ``attention_helpers`` importable and the CPU support active before Megatron is imported."""

import sys
from pathlib import Path

from megatron_het.device import activate

sys.path.insert(0, str(Path(__file__).parent))
activate()  # Megatron binds on import what the platform replaces
