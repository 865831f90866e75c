"""A board without a store."""

from __future__ import annotations

from typing import Any


class Notes:
    """A board in this process."""

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}

    def put(self, key: str, document: Any) -> None:
        self.documents[key] = document

    def get(self, key: str) -> Any:
        return self.documents.get(key)

    def has(self, key: str) -> bool:
        return key in self.documents

    def drop(self, key: str) -> None:
        del self.documents[key]

    def count(self, key: str) -> int:
        self.documents[key] = self.documents.get(key, 0) + 1
        return int(self.documents[key])

    def start_count(self, key: str, least: int) -> None:
        self.documents[key] = max(self.documents.get(key, 0), least)

    def post(self, document: Any) -> None:
        self.put(f"inbox/{sum(key.startswith('posted') for key in self.documents) + 1}", document)
        self.put(f"posted/{len(self.documents)}", True)
