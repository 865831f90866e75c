"""A store that only this process reaches."""

from typing import Any

from megatron_het.elastic.job import ServedBoard


class MemoryStore(ServedBoard):
    """The documents and operations of a controller's board, without a port and without waits."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 0, "")
        self._listening.close()
        self._loop.close()
        self.values = self._documents
        self.error: Exception | None = None

    def start(self) -> None:
        """Nobody connects."""

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        if self.error is not None:
            raise self.error
        if request[0] != "wait":
            return super().ask(*request)
        _, keys, unless, _ = request
        return "there" if self.values.keys() >= set(keys) else "lost" if self.values.keys() & set(unless) else "late"
