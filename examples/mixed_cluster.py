"""Draws what a plan gains on a mixed cluster: ``python -m examples.mixed_cluster OUT.svg``.

Two GPUs, and two that are 0.4 times as fast, train eight layers in two stages.  Each stage has two replicas, the fast
GPUs come first, and a forward of one layer takes 1 s on a fast GPU.  The even split is what stock Megatron does.  The
plan divides the layers by speed.  Both are simulated, transfers included; nothing here is measured.
"""

import sys
from collections.abc import Sequence

from megatron_het.schedule import Costs, Link, Shape, add_transfers, generate
from megatron_het.schedule.simulate import Result, simulate
from megatron_het.schedule.view.visualize import draw_timelines

SPEEDS = (1.0, 1.0, 0.4, 0.4)
MICROBATCHES = 8
EVEN, PLANNED = (4, 4), (6, 2)


def simulated(layers: tuple[int, int]) -> Result:
    """Simulate one iteration of 1F1B with these layers per stage."""
    turns = tuple(i % 2 for i in range(MICROBATCHES))
    shape = Shape(layers=tuple((n,) for n in layers), route=(turns, turns), replicas=(2, 2))
    program = add_transfers(generate("1f1b", shape, speeds=SPEEDS))
    costs = Costs.of(
        shape,
        layer_forward_s=tuple(1 / speed for speed in SPEEDS),
        layer_backward_s=tuple(2 / speed for speed in SPEEDS),
        message_bytes=1.0,
        link=lambda source, target: Link(0.0, 10.0),
    )
    return simulate(program, costs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture and print both times."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1:
        print("usage: python -m examples.mixed_cluster OUT.svg", file=sys.stderr)
        return 2
    even, planned = simulated(EVEN), simulated(PLANNED)
    names = {EVEN: "Even split", PLANNED: "Plan"}
    draw_timelines(
        {
            f"{names[layers]}: {layers[0]} layers on each fast GPU (0.0, 0.1), {layers[1]} on "
            f"each slow one (1.0, 1.1); {result.makespan_s:.0f} s per iteration": result
            for layers, result in ((EVEN, even), (PLANNED, planned))
        },
        words[0],
    )
    print(f"even split {even.makespan_s:.1f} s, plan {planned.makespan_s:.1f} s, wrote {words[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
