"""Process groups of a plan, and the stage-local view of Megatron's ``parallel_state``.

Groups are created here, owned here and destroyed here (``PlanGroups.close``).  Outside of this package only
``features/experts/runtime.py`` reads the global ``parallel_state``.  Open ``groups.py`` first; ``gradient_sums.py``
makes gradients equal to those of a single process.
"""

from megatron_het.distributed.groups import (
    Edge,
    GroupError,
    GroupSpec,
    Link,
    PairGroups,
    PlanGroups,
    build_groups,
    create_group,
    group_specs,
    in_rounds,
    loss_source,
    sparing_groups_of_one,
)
from megatron_het.distributed.stage_state import (
    KNOWN_STATE,
    Axis,
    as_only_reader,
    at_chunk,
    between_the_ends,
    install_stage_state,
    remove_stage_state,
)
