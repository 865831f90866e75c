"""The watch: compares measured with predicted times during training, and names devices and links that drift.

Open ``drift.py`` first: the definition of drift.  ``runtime.py`` measures on every rank and writes samples
(``samples.py``) to the store.  On the last rank ``monitor.py`` reads all samples, and writes findings to log, files and
TensorBoard.  Only ``runtime.py`` imports torch.
"""
