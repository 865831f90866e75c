"""How hard to search."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search.

    Attributes:
        sketches: Starting points to look at.
        seeds: Starting points to evaluate, of those that look best.
        alike: Of these, how many with the same kinds of GPUs in every stage.
        beam: Starting points to improve by local search.
        counts: Numbers of stages whose best candidate is improved too.
        near: Neighbours that look worse than a candidate by this share are not evaluated.
        neighbours: Neighbours of a candidate that are evaluated at most.
        hasty: A neighbour that looks much better is evaluated before all neighbours have been looked at.
        spread: Neighbours have a pool spread anew over its stages, too.  On few GPUs smaller steps reach as much, and
            such a large one leads away from better plans that are near.
        steps: Evaluations of the local search per starting point.
        parts: Parts of the cluster to search in the same way, of those that can hold a better plan.
        part_sketches, part_seeds, part_steps: Starting points to look at and to evaluate on a part, and evaluations
            of the local search from its best.
        near_gpus: Clusters up to this size are searched thoroughly without one node too.
        cut_nodes: Clusters up to this many nodes are also cut by bandwidth, as Zorse does.
        exact_gpus: Clusters up to this size are searched to the proven optimum.
        exact_nodes: Nodes of the search tree, and plans that are priced there, before the proof is given up.
        simulated_operations: Compute operations to simulate at the end, over all finalists.
        promising: Finalists that can be expected within this share of the best are simulated.
        first: Finalists of each schedule that are simulated, whatever the closed form says about others.
        refined: Small changes of the best plan may take so many times the operations of the other simulations, where
            it is plain 1F1B, which is simulated by compiled loops.
        regroups: Replicas of the best plan move between stages in the end, where that makes it faster.
        small_gpus: Up to this size plans are cheap to simulate, and the closed form is off by more.
        exact_promising, exact_operations: As ``promising`` and ``simulated_operations``, for such clusters and for
            those that are searched to the optimum.
    """

    sketches: int = 1000
    seeds: int = 120
    alike: int = 12
    beam: int = 4
    counts: int = 6
    near: float = 0.12
    neighbours: int = 48
    hasty: bool = False
    spread: bool = False
    steps: int = 250
    parts: int = 12
    part_sketches: int = 300
    part_seeds: int = 20
    part_steps: int = 80
    near_gpus: int = 200
    cut_nodes: int = 16
    exact_gpus: int = 8
    exact_nodes: int = 30_000
    simulated_operations: int = 15_000
    promising: float = 0.03
    first: int = 2
    refined: int = 16
    regroups: bool = True
    small_gpus: int = 24
    exact_promising: float = 0.15
    exact_operations: int = 80_000


NORMAL = Effort()
MEDIUM = Effort(seeds=60, alike=6, counts=4, near=0.03, neighbours=24, steps=160, hasty=True, spread=True)
"""For clusters of more than 64 GPUs, whose sketches are more exact: there are more microbatches for each stage."""
LARGE = replace(MEDIUM, sketches=800, seeds=80, steps=200, parts=2, simulated_operations=30_000)
"""For clusters of more than 160 GPUs, where a better plan is worth a few seconds."""


def effort_for(gpus: int) -> Effort:
    """Returns what suits a cluster of this size."""
    return LARGE if gpus > 160 else MEDIUM if gpus > 64 else NORMAL
