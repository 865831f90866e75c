"""Documents without a server."""

from typing import Any

from megatron_het.store import Documents


class MemoryStore(Documents):
    """What is written and read, and nothing more."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.error: Exception | None = None

    def ask(self, *request: Any, patience_s: float | None = None, tries_again: bool = True) -> Any:
        if self.error is not None:
            raise self.error
        operation, *arguments = request
        if operation == "set":
            self.values[arguments[0]] = arguments[1]
            return None
        found = [self.values.get(key) for key in arguments]
        return found if operation == "get" else all(text is not None for text in found)
