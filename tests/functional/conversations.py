"""Packed conversations (``--sft``) without the packages that Megatron reads and tokenizes them with.

Megatron's own dataset packs them.  What it reads a file with, and the chat template of its tokenizer, are replaced.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.probe import observe

_PAD = 0


def write_conversations(file: Path, count: int, words: int, seed: int) -> None:
    """Lines of several conversations each, of unequal lengths; words are numbers below ``words``."""
    rng = random.Random(seed)

    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(str(rng.randrange(1, words)) for _ in range(rng.randrange(1, 7)))}

    lines = []
    for _ in range(count):
        roles = [role for _ in range(rng.randrange(1, 5)) for role in ("system", "user", "assistant")]
        lines.append(json.dumps({"messages": [said(role) for role in roles]}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Chat:
    """A tokenizer with a chat template: what the assistant says is to be learned."""

    pad = _PAD

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize_conversation(self, conversation: list[dict[str, str]], **_: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = list[int](), list[int]()
        for message in conversation:
            said = [int(word) for word in message["content"].split()]
            tokens += said
            targets += said if message["role"] == "assistant" else [-100] * len(said)
        return np.array(tokens), np.array(targets)


def _replace_packages() -> None:
    from megatron.core.tokenizers.utils import build_tokenizer
    from megatron.training.datasets import sft_dataset

    def read(self: Any, path: str) -> None:
        self.dataset = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]

    original: Any = build_tokenizer.build_tokenizer
    build_tokenizer.build_tokenizer = lambda *given, **named: _Chat(original(*given, **named))
    sft_dataset.SFTLowLevelDataset.__init__ = read


def packed(**options: Any) -> None:
    """With Megatron's dataset."""
    _replace_packages()
    observe(**options)


def masked(**options: Any) -> None:
    """The same samples for stock Megatron without Transformer Engine: a dense mask says which tokens see each other."""
    import torch
    from megatron.core.datasets import gpt_dataset
    from megatron.training.datasets.sft_dataset import SFTDataset

    _replace_packages()

    class Masked(SFTDataset):
        def __getitem__(self, index: int) -> dict[str, Any]:
            self.config.create_attention_mask = False
            item = super().__getitem__(index)
            tokens, bounds = len(item["tokens"]), item.pop("cu_seqlens")
            del item["max_seqlen"]
            conversation = torch.searchsorted(bounds.unique().long(), torch.arange(tokens), right=True)
            seen = (conversation[:, None] == conversation[None, :]).tril()
            return {**item, "attention_mask": ~seen.unsqueeze(0)}

    gpt_dataset.GPTDataset = Masked
    observe(**options)
