"""A board without a store, what arrives on it, and plans for its processes."""

from __future__ import annotations

import random
from typing import Any

from megatron_het.plan import Plan
from megatron_het.store import Strangers
from testing.cases import build_plan


class Notes:
    """A board in this process."""

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}
        self.strangers = Strangers()

    def put(self, key: str, document: Any, **_: Any) -> None:
        self.documents[key] = document

    def get(self, key: str, **_: Any) -> Any:
        return self.documents.get(key)

    def read(self, *keys: str, **_: Any) -> list[Any]:
        return [self.documents.get(key) for key in keys]

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.documents if key.startswith(prefix)]

    def wait(self, keys: Any, unless: Any, _timeout_s: float) -> str:
        if all(key in self.documents for key in keys):
            return "there"
        return "lost" if any(key in self.documents for key in unless) else "late"

    def under(self, _prefix: str) -> Notes:
        return self

    def start(self) -> None:
        pass

    def has(self, key: str) -> bool:
        return key in self.documents

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.documents.pop(key, None)

    def count(self, key: str, **_: Any) -> int:
        self.documents[key] = self.documents.get(key, 0) + 1
        return int(self.documents[key])

    def start_count(self, key: str, least: int) -> None:
        self.documents[key] = max(self.documents.get(key, 0), least)

    def post(self, document: Any, **_: Any) -> None:
        self.put(f"inbox/{sum(key.startswith('posted') for key in self.documents) + 1}", document)
        self.put(f"posted/{len(self.documents)}", True)


def come(board: Any, number: int, node: str) -> None:
    board.post({"type": "ready", "process": number, "node": node, "device": "", "signature": "s"})


def plan(sizes: list[list[int]], **more: Any) -> Plan:
    layers = [5 // len(sizes)] * len(sizes)
    layers[-1] += 5 - sum(layers)
    return build_plan(sizes, layers, random.Random(0), even_routing=False, **more)
