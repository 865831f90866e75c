"""Training large language models on mixed accelerators with Megatron-LM.

The package extends ``megatron-core`` and ``megatron.training`` through their public hooks and a
few registered patches (:mod:`megatron_het.megatron_patches`).  Nothing is imported here: ``plan`` and
``schedule`` stay usable without torch, and ``platform`` has to be activated before
``megatron.training`` is imported.
"""

__version__ = "0.1.0"
