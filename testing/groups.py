"""Stands in for a process group in tests of one process."""


class Group:
    """A group of so many ranks, as one of them sees it."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def rank(self) -> int:
        """This one's place among them."""
        return self._rank
