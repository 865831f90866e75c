"""What all nodes of a job must have in common: the releases and the flags of the training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from importlib.metadata import version

import megatron_het
from megatron_het.untrusted import shown


def signature_of(flags: Sequence[str]) -> str:
    """What a node says of itself.

    Args:
        flags: Of the training.
    """
    release = str(getattr(megatron_het, "__version__", ""))
    return json.dumps({"megatron_het": release, "megatron-core": version("megatron-core"), "flags": list(flags)})


def refusal(own: str, first: str) -> str:
    """Why a node cannot take part, and what to do; empty where it can.

    Args:
        own: What :func:`signature_of` gave on the node.
        first: The same of the job's first node.
    """
    if own == first:
        return ""
    what = _difference(own, first)
    return f"{what}; start all nodes of a job with the same command and the same release"


def _difference(own: str, first: str) -> str:
    """In words."""
    try:
        mine, theirs = json.loads(own), json.loads(first)
        for name in ("megatron_het", "megatron-core"):
            if mine[name] != theirs[name]:
                return f"{name} is {shown(mine[name])} here and {shown(theirs[name])} on the first node"
        name = "the flags"
        for here, there in itertools.zip_longest(mine["flags"], theirs["flags"]):
            if here != there:
                return f"{name} differ: {_word(here)} here and {_word(there)} on the first node"
            name = f"the values of {shown(here)}" if here.startswith("--") else name
    except (KeyError, TypeError, ValueError):
        pass
    return "it was started by another release than the first node"


def _word(word: str | None) -> str:
    return "none" if word is None else shown(word)
