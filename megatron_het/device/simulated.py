"""A device that tests put in the place of a GPU: whether there is one, and where the host waits for it."""

from collections.abc import Callable

_HOST_WAITS: list[Callable[[str], None]] = []


def simulate(wait: Callable[[str], None]) -> None:
    """Give groups of the backend ``nccl`` a simulated device on the CPU, for as long as this process lives.

    Args:
        wait: Called with the reason wherever CUDA would make the host wait for the device.
    """
    if wait not in _HOST_WAITS:
        _HOST_WAITS.append(wait)


def is_simulated() -> bool:
    """Whether groups of the backend ``nccl`` are simulated in this process."""
    return bool(_HOST_WAITS)


def host_wait(why: str) -> None:
    """Let the host wait for the simulated device, if there is one, where CUDA makes it wait; messages say why."""
    for wait in _HOST_WAITS:
        wait(why)
