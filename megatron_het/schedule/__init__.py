"""Pipeline schedules as data: generators, passes, validator, simulator, pictures.  Never imports torch.

Read ``ir.py`` first: operations and programs; then ``kinds.py``, a table with one row of properties per kind of
operation.  ``generators/`` decide the order of compute, ``transfers.py`` adds sends and receives, ``validate.py`` finds
errors of a program, and ``simulate.py`` computes when every operation runs.
"""

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
from megatron_het.schedule.transfers import add_transfers
