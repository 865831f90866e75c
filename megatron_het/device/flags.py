"""The Megatron flags that a machine asks for, each with its reason.

Transformer Engine and Apex are used where they are installed; the absence of either is what asks for most
of the flags, on CPU and on GPU alike.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One flag for this machine.

    Attributes:
        words: The flag as words of a command line.
        attribute: Its name in Megatron's parsed namespace.
        value: What the attribute is with the flag.
        reason: Why the flag is set.
        required: Whether Megatron fails without it; the others only avoid useless work.
    """

    words: tuple[str, ...]
    attribute: str
    value: Any
    reason: str
    required: bool = True

    def __str__(self) -> str:
        return f"{' '.join(self.words)} ({self.reason})"


def _off(option: str, reason: str, required: bool = True) -> Flag:
    attributes = {"rope-fusion": "apply_rope_fusion", "persist-layer-norm": "no_persist_layer_norm"}
    attribute = attributes.get(option, option.replace("-", "_"))
    return Flag((f"--no-{option}",), attribute, attribute.startswith("no_"), reason, required)


def _has(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) is not None for module in modules)


def platform_flags(is_cuda: bool, has_nccl: bool = False, has_kernels: bool = False) -> tuple[Flag, ...]:
    """The flags for this machine, from what is installed on it.

    Args:
        is_cuda: Whether the process computes on a CUDA device.
        has_nccl: Whether the backend ``nccl`` moves its tensors all the same.
        has_kernels: Whether something stands for the fused kernels of a GPU.
    """
    flags: list[Flag] = []
    if not is_cuda and not has_nccl:
        flags.append(
            Flag(("--distributed-backend", "gloo"), "distributed_backend", "gloo", "NCCL moves CUDA tensors only")
        )
    if not (is_cuda and _has("transformer_engine")):
        reason = "Transformer Engine cannot be used"
        flags += [Flag(("--transformer-impl", "local"), "transformer_impl", "local", reason)]
        if not has_kernels:
            flags.append(_off("rope-fusion", reason))
        if not (is_cuda and _has("apex")):
            flags.append(_off("persist-layer-norm", "torch's norms do not know it"))
        if not (is_cuda and _has("scaled_upper_triang_masked_softmax_cuda")):
            flags.append(_off("masked-softmax-fusion", "its CUDA kernel is not installed"))
    if not (has_kernels or (is_cuda and _has("fused_weight_gradient_mlp_cuda"))):
        # Transformer Engine has a kernel of its own, which Megatron's output layer does not use.
        flags.append(_off("gradient-accumulation-fusion", "its CUDA kernel is not installed"))
    if not is_cuda and not has_kernels:
        flags += [
            _off("bias-swiglu-fusion", "nothing fuses it on CPU", required=False),
            _off("bias-dropout-fusion", "nothing fuses it on CPU", required=False),
            Flag(("--num-workers", "0"), "num_workers", 0, "every core computes", required=False),
        ]
    return tuple(flags)


def unmet(flags: tuple[Flag, ...], args: object) -> tuple[Flag, ...]:
    """The required flags that a namespace parsed by Megatron does not have.

    Args:
        flags: What :func:`platform_flags` returned.
        args: The namespace.
    """
    return tuple(flag for flag in flags if flag.required and getattr(args, flag.attribute) != flag.value)
