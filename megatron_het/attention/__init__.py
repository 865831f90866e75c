"""Attention over slices of a sequence: kernels, chunked key-value cache, online-softmax merge.

SlimPipe (section 4.1) runs one slice of a sequence at a time; a slice attends to itself and to the
cached keys and values of the slices before it.  ``slice_attention`` is that operator with its
backward pass, ``core`` puts it into Megatron's layers.
"""
