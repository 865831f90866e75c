"""Packed conversations (``--sft``) without the packages that Megatron reads and tokenizes them with.

Megatron's own dataset packs them.  What it reads a file with, and the chat template of its tokenizer, are replaced.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from testing.probe import observe

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


def _keep_evaluations(out: str, rank: int, *, as_conversations: bool) -> None:
    """Write what Megatron's evaluations find into ``out``.

    Args:
        out: Folder of the file.
        rank: This rank.
        as_conversations: Whether Megatron is to evaluate as with ``--sft``, which the rest of the run does not know.
    """
    from megatron.training import training

    evaluate, get_args, kept = training.evaluate, training.get_args, list[float]()

    class Told:
        sft = True

        def __getattr__(self, name: str) -> Any:
            return getattr(get_args(), name)

    def observed(*given: Any, **named: Any) -> Any:
        training.get_args = Told if as_conversations else get_args
        try:
            result = evaluate(*given, **named)
        finally:
            training.get_args = get_args
        if result[0]:
            kept.append(float(result[0]["lm loss"]))
            (Path(out) / f"evaluations-{rank}.json").write_text(json.dumps(kept), encoding="utf-8")
        return result

    training.evaluate = observed


def packed(*, rank: int, out: str, **options: Any) -> None:
    _replace_packages()
    _keep_evaluations(out, rank, as_conversations=False)
    observe(rank=rank, out=out, **options)


def masked(*, rank: int, out: str, **options: Any) -> None:
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
    _keep_evaluations(out, rank, as_conversations=True)
    observe(rank=rank, out=out, **options)
