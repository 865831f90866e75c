"""The result of a simulation: its timeline, and what follows from it."""

from functools import cached_property

from megatron_het.schedule.bubble import Bubble, attribute_bubble
from megatron_het.schedule.memory import MemoryUse, memory_use
from megatron_het.schedule.timeline import Event, Timeline


class Result(Timeline):
    """A timeline with the causes of idle time and the memory, worked out when they are first asked for."""

    @cached_property
    def bubble(self) -> tuple[Bubble, ...]:
        """Idle time of the compute stream by cause, per device."""
        return attribute_bubble(self)

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory over time and its peak, per device."""
        return memory_use(self)


__all__ = ["Bubble", "Event", "MemoryUse", "Result"]
