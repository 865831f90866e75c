"""Pipeline schedules as data: generators, passes, validator, simulator, pictures.  Never imports torch."""

from megatron_het.schedule.cost import Costs, Link, Memory
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.graph import Graph, ScheduleError
from megatron_het.schedule.ir import (
    COMPUTE,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Device,
    Kind,
    Op,
    Program,
    ScheduleSyntaxError,
    Shape,
    dumps,
    loads,
)
from megatron_het.schedule.simulate import Result, simulate
from megatron_het.schedule.transfers import add_transfers

__all__ = [
    "COMPUTE",
    "GENERATORS",
    "RECEIVES",
    "SENDS",
    "TRANSFERS",
    "Costs",
    "Device",
    "Graph",
    "Kind",
    "Link",
    "Memory",
    "Op",
    "Program",
    "Result",
    "ScheduleError",
    "ScheduleSyntaxError",
    "Shape",
    "add_transfers",
    "dumps",
    "generate",
    "loads",
    "simulate",
]
