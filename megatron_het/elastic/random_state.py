"""This rank's random-number states as JSON values."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from megatron_het.checkpoint import state_dict as random_state


def collect() -> dict[str, Any]:
    """The states of every generator that training draws from."""
    states = random_state.collect()
    version, words, gauss_next = states["random"]
    name, keys, position, has_gauss, gauss = states["numpy"]
    return {
        "random": [version, list(words), gauss_next],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _text(states["torch"]),
        "device": _text(states["device"]),
        "tracker": {key: _text(state) for key, state in states["tracker"].items()},
    }


def restore(states: dict[str, Any]) -> None:
    """Set what :func:`collect` returned."""
    version, words, gauss_next = states["random"]
    name, keys, *rest = states["numpy"]
    random_state.restore(
        {
            "random": (version, tuple(words), gauss_next),
            "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
            "torch": _tensor(states["torch"]),
            "device": _tensor(states["device"]),
            "tracker": {key: _tensor(text) for key, text in states["tracker"].items()},
        }
    )


def move_on(args: Any, iteration: int) -> None:
    """New states for another topology: a rank has no old one, and those of the start have been used."""
    from megatron.training import initialize

    initialize._set_random_seed(
        (args.seed + 1000003 * iteration) % 2**31,
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
    )


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
