"""The watch as a feature: what a rank measures for :mod:`megatron_het.watch`.  Open ``runtime.py`` first."""
