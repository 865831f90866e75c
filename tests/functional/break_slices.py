"""Breaks slices on purpose, inside a rank process."""

from typing import Any

from testing.probe import observe


def positions(**options: Any) -> None:
    """Every slice gets the positions of the first one."""
    from megatron_het.attention import core

    original = core._cut_positions

    def first(rotations: Any, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        params = kwargs["packed_seq_params"]
        moved = _at_zero(params)
        _, cut = original(rotations, decoder, args, {**kwargs, "packed_seq_params": moved})
        params.rotation = moved.rotation
        return args, {**cut, "packed_seq_params": params}

    core._cut_positions = first
    observe(**options)


def weights(**options: Any) -> None:
    """What is attended to for other devices counts twice as much as it should."""
    from megatron_het.features.context_exchange import helper

    original = helper.attend

    def heavier(*positional: Any) -> Any:
        out, lse = original(*positional)
        return out, lse + 0.7

    helper.attend = heavier
    observe(**options)


def _at_zero(params: Any) -> Any:
    from dataclasses import replace

    length = sum(end - first for first, end in params.blocks)
    return replace(params, blocks=((0, length),))
