"""Training large language models on mixed accelerators with Megatron-LM.

A run begins in ``pretrain_gpt.py``; ``runtime/session.py`` is what a rank of a plan builds.  A plan is in
:mod:`megatron_het.plan`, what a plan's ranks do one after the other in :mod:`megatron_het.schedule`.

The package extends ``megatron-core`` and ``megatron.training`` through their public hooks and a few registered patches
(:mod:`megatron_het.megatron_patches`).  Nothing is imported here: ``plan`` and ``schedule`` stay usable without torch,
and :mod:`megatron_het.device` has to be activated before ``megatron.training`` is imported.
"""

__version__ = "0.1.0"
