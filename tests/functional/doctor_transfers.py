"""Four forked ranks that run the doctor's checks of transfers: ``python doctor_transfers.py FOLDER [spoil]``.

With ``spoil`` rank 3 sends other values than it should, which the receiver must notice.
"""

import functools
import json
import sys
from pathlib import Path

import megatron_het.runtime.channels  # noqa: F401  # once, and not in every rank after the fork
from megatron_het.device import activate
from megatron_het.doctor import stress
from megatron_het.doctor.check import Expectations, Names, Seat
from megatron_het.doctor.links import Links
from megatron_het.doctor.stress import Stress
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.store import Store, StoreServer
from testing.forked import Forked

WORLD, TOKEN = 4, "0123456789abcdef"
_LIMIT_S = 120
HOSTS = ("a", "a", "b", "b")
PLAN = Plan(
    ModelShape(8, 64, 4, 2, 64),
    TrainingShape(1, 4, sequence_parallel=True),
    (
        Stage((2, 2), (Replica((0,), (0, 1, 2, 3), "new"),)),
        Stage((2, 2), (Replica((1, 2), (0, 1, 3), "new"), Replica((3,), (2,), "old"))),
    ),
    ScheduleSpec("ministage"),
)


def run(rank: int, port: int, folder: Path, spoil: bool) -> None:
    store = Store(lambda: [("127.0.0.1", port)], TOKEN, 30.0)
    if spoil and rank == 3:
        original = stress.mark_of
        stress.mark_of = lambda op, direction: original(op, direction) + (op.kind.name == "BACKWARD")
    answers = {}
    for check in (Links(), Stress(seconds=0.5)):
        seat = Seat(rank, rank, HOSTS, PLAN, None, Expectations(), store.under(check.name), folder, "auto")
        try:
            answers[check.name] = {"data": check.measure(seat)}
        except RuntimeError as error:
            answers[check.name] = {"error": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    store.count("done")


def main() -> None:
    folder, spoil = Path(sys.argv[1]), "spoil" in sys.argv
    activate()  # imports for seconds, with others waiting for the rank
    server = StoreServer("127.0.0.1", 0, TOKEN)
    ranks = [functools.partial(run, rank, server.port, folder, spoil) for rank in range(WORLD)]
    children = [Forked(rank, sys.stderr.fileno()) for rank in ranks]
    server.start()
    for child in children:
        child.finish(_LIMIT_S)
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    names = Names(HOSTS)
    report: dict[str, object] = {}
    for check in (Links(), Stress()):
        data = {rank: a[check.name]["data"] for rank, a in enumerate(answers) if "data" in a[check.name]}
        report[check.name] = {
            "errors": [a[check.name]["error"] for a in answers if "error" in a[check.name]],
            "rows": [f.to_json() for f in check.judge(data, names)] if data else [],
            "data": data,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
