"""Plans: the assignment of layers and microbatches to ranks, as plain data.

A plan names the stages of the pipeline, the replicas of each stage, the ranks of
each replica (its tensor-parallel group), the layers of each stage and the
microbatches of each replica.  Planner, schedule generators, runtime, tests and
people read the same file.  This package needs the standard library only.

Read ``schema.py`` first: all fields of a plan.  ``validate.py`` checks them, ``placement.py`` locates ranks in it.
"""

from megatron_het.plan.placement import Location, Placement
from megatron_het.plan.schema import (
    PLAN_FORMAT,
    PLAN_VERSION,
    Cut,
    DeviceCosts,
    LinkCosts,
    ModelShape,
    Plan,
    PlanError,
    PlannedCosts,
    Prediction,
    RankPrediction,
    Replica,
    ScheduleSpec,
    Stage,
    TrainingShape,
)
from megatron_het.plan.validate import check_plan, load_plan, plan_hash, save_plan, topology_hash
