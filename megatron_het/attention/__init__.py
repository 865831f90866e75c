"""Attention over slices of a sequence: kernels, chunked key-value cache, online-softmax merge.

SlimPipe (section 4.1) runs one slice of a sequence at a time; a slice attends to itself and to the cached keys and
values of the slices before it.  Open ``slice_attention.py`` first: the operator with its backward pass.  ``core.py``
puts the operator into Megatron's layers; ``latent.py`` and ``recurrent.py`` are for multi-latent and recurrent layers.
"""
