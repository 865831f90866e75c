"""Pipeline schedules as data: generators, passes, validator, simulator, pictures.  Never imports torch.

Open ``ir.py`` first: operations and programs; then ``kinds.py``, one row for everything that is known of a kind of
operation.  ``generators/`` decide the order of compute, ``transfers.py`` adds sends and receives, ``validate.py`` finds
what is wrong, and ``simulate.py`` says when everything happens.
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
