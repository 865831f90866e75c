"""``elastic.sbatch``: a job whose plan changes while it runs; see docs/elastic.md.

The batch script runs the controller on the first node, and one agent per node, each in a Slurm step of its own, so that
a node that goes down takes no other step with it.  The script knows the kind of every node from the component of the
job that the node is in, and tells the agent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_het.arguments.megatron_args import environment_of
from megatron_het.elastic.pool import Process, assign
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, PlanError, load_plan

from ..errors import PlannerError, from_plan_error
from ..inputs.files import quote
from ..inputs.packing import Component, Node, NodeKind, chosen_devices, components, device_words, devices_of
from .flags import named_plans
from .scripts import (
    AWAIT,
    NEWEST,
    LaunchOptions,
    feature_function,
    go_on,
    head,
    in_container,
    master,
    plain_obstacle,
    plain_resources,
    resources,
    settings,
)

SCRIPT = "elastic.sbatch"


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Holds what an elastic job is told beyond :class:`LaunchOptions`.

    Attributes:
        more: Further plans with their files, the best one first; the job's own plan comes before them.
        inputs: Names of cluster file, model file and (where there is one) profile in the run's folder, from which plans
            are searched for pools that no given plan fits; empty: none are searched.
    """

    more: tuple[tuple[str, Plan], ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def named(self) -> dict[str, Plan]:
        """The further plans, by their names in the run's folder."""
        return named_plans(self.more)


def load_more(files: Sequence[Path]) -> tuple[tuple[str, Plan], ...]:
    """The plans of ``--plans``, by file; raises PlannerError for a file with no plan, or one that no run can have."""
    found = []
    for file in files:
        try:
            plan = load_plan(file)
            check_plan_alone(plan)
        except PlanError as error:
            raise from_plan_error(str(file), error) from None
        found.append((str(file), plan))
    return tuple(found)


def checked_sbatch(
    plan: Plan, nodes: Sequence[Node], kinds: Mapping[str, NodeKind], launch: LaunchOptions, elastic: ElasticOptions
) -> str:
    """The script of a plan and the others; raises PlannerError.

    Args:
        plan: The first plan.
        nodes: Its launch.
    """
    if launch.container and launch.container.runtime != "apptainer":
        problem = (
            f"{launch.container.runtime} starts containers for steps only; the controller runs in the batch script"
        )
        raise PlannerError("emit", "--container-runtime", launch.container.runtime, problem, "Use apptainer")
    check_elastic(plan, nodes, kinds, launch, elastic)
    return _sbatch(nodes, kinds, replace(launch, environment=elastic_environment(plan, launch, elastic)), elastic)


def check_elastic(
    plan: Plan, nodes: Sequence[Node], kinds: Mapping[str, NodeKind], launch: LaunchOptions, elastic: ElasticOptions
) -> None:
    """Check that the plans are of one training, and that the job's nodes can run each; raises PlannerError."""
    if launch.doctor:
        problem = "checks the ranks of one plan, and an elastic job starts one task per node, whose plan changes"
        hint = "Leave one of --doctor and --elastic out; a job of its own can check the nodes"
        raise PlannerError("emit", "--doctor", True, problem, hint)
    pool = [
        Process(i * 4096 + slot, f"node {i}", device)
        for i, node in enumerate(nodes)
        for slot, device in enumerate(devices_of(node, kinds))
    ]
    for file, other in elastic.more:
        for key, value, first in (
            ("model", other.model, plan.model),
            ("training.global_batch_size", other.training.global_batch_size, plan.training.global_batch_size),
            ("training.precision", other.training.precision, plan.training.precision),
        ):
            if value != first:
                raise PlannerError(
                    file, key, str(value), f"the first plan has {first}", "Give plans for one training (--plans)"
                )
        if assign(other, pool) is None:
            raise PlannerError(
                file,
                "stages",
                None,
                f"its {other.world_size} ranks do not fit the job's nodes, which are those of the first plan: "
                + ", ".join(
                    f"{n} x {device}" for node in nodes for device, n in Counter(devices_of(node, kinds)).items()
                ),
                "Give the plan that needs most nodes first",
            )


_START = """
# One controller, on this node.  What it writes is in $ELASTIC; only its owner can read the job's token.
export ELASTIC="$RUN_DIR/elastic" CONTROLLER="$MASTER_ADDR:$MASTER_PORT" LOST_S="${LOST_S:-30}"
mkdir -p "$ELASTIC"
chmod 700 "$ELASTIC"
rm -f "$ELASTIC/token"
# The processes of an earlier start of this job have gone, and their memory with them: the newest checkpoint counts.
[[ ! -e "$ELASTIC/state.json" ]] || mv -f "$ELASTIC/state.json" "$ELASTIC/state-before-$SLURM_JOB_ID.json"
"""

_CONTROL = """\
control() {
    local rc
    trap '' TERM  # what Slurm sends when it takes the job away; the ranks need the controller while they save
    for _ in 1 2 3 4; do  # one that a signal has ended goes on from its file
        rc=0
        "$PYTHON" -m megatron_het.elastic --controller "$CONTROLLER" --token-file "$ELASTIC/token" \\
            --folder "$ELASTIC" --controller-only --nodes "$NODES" --lost-s "$LOST_S" "${HOW[@]}" || rc=$?
        ((rc > 128)) || break
    done
    return "$rc"
}
as_agent() {
    source "$RUN_DIR/args.sh"
    # Ranks load the newest checkpoint that is whole, and begin anew where no save has ever ended.
    local flags=(--save "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist --load "$CHECKPOINTS")
    trap '' TERM  # all nodes get it at once, and none of them can leave: see notice
    # On this signal, which the script below sends, all ranks save and end after the running iteration.
    flags+=(--exit-signal-handler --exit-signal SIGUSR1)
    exec "$PYTHON" -m megatron_het.elastic --controller "$CONTROLLER" --token-file "$ELASTIC/token" \\
        --folder "$ELASTIC" --node "$1" --device "$2" --workers "$3" -- "${ELASTIC_ARGS[@]}" "${flags[@]}"
}
export -f as_agent
control &
controller=$!
for ((i = 0; i < 600; i++)); do
    if [[ -s "$ELASTIC/token" ]] || ! kill -0 "$controller" 2>/dev/null; then break; fi
    sleep 0.1
done
if ! kill -0 "$controller" 2>/dev/null; then  # its error is in this log
    wait "$controller" || exit "$?"
    exit 0
fi

# One step per node.  --kill-on-bad-exit=0: a node that fails ends its own step only.
steps=()
noticed=
notice() {  # near the end of the job's time, or before it is taken away: save and stop
    noticed=1
    kill -USR1 "${steps[@]}" 2>/dev/null || true
}
trap notice TERM
start_agent() {
    srun "${@:4}" --nodes=1 --ntasks=1 --nodelist="$1" --cpu-bind=none --kill-on-bad-exit=0 --no-kill \\
        bash -c 'as_agent "$@"' as_agent "$1" "$2" "$3" &
    steps+=($!)
}
"""

_END = """
rc=0
await "$controller" || rc=$?
if [[ -n "$noticed" ]]; then
    for ((i = 0; i < 200; i++)); do  # agents end when their workers have; they were told how the job ended
        kill -0 "${steps[@]}" 2>/dev/null || break
        sleep 0.1
    done
"""


def _sbatch(
    nodes: Sequence[Node], kinds: Mapping[str, NodeKind], options: LaunchOptions, elastic: ElasticOptions
) -> str:
    """The job, with one task per node: a plain job where one can do it, else a component per kind of node.

    Slurm leaves the job alone when a node fails (``--no-kill``), queues it again when the first node fails
    (``--requeue``), and tells the batch script before its time is over (``--signal``).
    """
    parts = components(nodes, kinds)
    text = head(options, f"Submit with: sbatch {SCRIPT}", "TERM")
    plain = not plain_obstacle(nodes, kinds)
    if plain:
        blocks = [plain_resources(parts, kinds, options, tasks_per_node=1)]
    else:
        parts = _leader_first(parts)
        blocks = [resources(part, kinds, options, tasks_per_node=1) for part in parts]
    text += "#SBATCH hetjob\n".join("#SBATCH " + " ".join([*words, "--no-kill"]) + "\n" for words in blocks)
    first = "SLURM_JOB_NODELIST" if plain else "SLURM_JOB_NODELIST_HET_GROUP_0"
    text += "set -euo pipefail\numask 077\n\n" + settings(options)
    text += master(f'$(scontrol show hostnames "${first}" | head -n1)')
    text += f"export NODES={len(nodes)}\n"
    text += _START + NEWEST + AWAIT + how(elastic) + in_container(_control(nodes, kinds), options)
    text += _plain_agents(parts, kinds) if plain else _het_agents(parts, kinds)
    return text + _END + go_on(options, SCRIPT) + 'fi\nexit "$rc"\n'


def notes(nodes: Sequence[Node], kinds: Mapping[str, NodeKind]) -> list[str]:
    """Returns what a failing node costs more than usual."""
    if not plain_obstacle(nodes, kinds) or len(_leader_first(components(nodes, kinds))[0].nodes) > 1:
        return []
    return [
        f"{SCRIPT}: a heterogeneous job whose components have one node each is queued again by Slurm when any node "
        "fails, and resumes from the newest checkpoint"
    ]


def _leader_first(parts: Sequence[Component]) -> list[Component]:
    """The component with most nodes first; which rank is where does not depend on the order.

    It is the leader of the heterogeneous job.  When a node of any component fails, Slurm leaves a leader of several
    nodes alone, and queues the whole job again where the leader has one node.
    """
    return sorted(parts, key=lambda part: -len(part.nodes))


def _agent(part: Component, kinds: Mapping[str, NodeKind], *words: str) -> str:
    kind = kinds[part.kind]
    if kind.python:
        words = *words, quote(f"--export=ALL,PYTHON={kind.python}")
    node = part.nodes[0]
    visible = chosen_devices(node, kinds)
    start = f'HET_DEVICES="{visible}" start_agent "$host"' if visible else 'start_agent "$host"'
    return " ".join([start, quote(device_words(node, kinds)), str(part.per_node), *words])


def _control(nodes: Sequence[Node], kinds: Mapping[str, NodeKind]) -> str:
    """Bash: how agents are started; they choose devices where Slurm gives out more of a node than the plan uses."""
    if not any(chosen_devices(node, kinds) for node in nodes):
        return _CONTROL
    choice = '    [[ -z "${HET_DEVICES:-}" ]] || export CUDA_VISIBLE_DEVICES="$HET_DEVICES"\n'
    return _CONTROL.replace("as_agent() {\n", "as_agent() {\n" + choice)


def _plain_agents(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    text, names = feature_function(parts, kinds)
    text += 'for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do\n'
    text += '    feature=$(feature_of "$host")\n    case "$feature" in\n'
    for name, part in zip(names, parts, strict=True):
        text += f"        {quote(name)}) {_agent(part, kinds)} ;;\n"
    return text + "    esac\ndone\n"


def _het_agents(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    text = ""
    for i, part in enumerate(parts):
        text += f'for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{i}"); do\n'
        text += f"    {_agent(part, kinds, f'--het-group={i}')}\ndone\n"
    # Slurm queues a component whose only node has failed again, by itself; it cannot start without the others.
    text += "forget() {\n    local group job\n"
    text += f"    for ((group = 1; group < {len(parts)}; group++)); do\n"
    text += '        job="SLURM_JOB_ID_HET_GROUP_$group"\n'
    return text + '        scancel --state=PENDING "${!job}" || true\n    done\n}\ntrap forget EXIT\n'


def how(elastic: ElasticOptions) -> str:
    """Bash: where the controller's plans come from."""
    words = ["--plans", *(f'"$RUN_DIR/{name}"' for name in ("plan.json", *elastic.named))]
    for flag, name in zip(("--cluster", "--model", "--profile"), elastic.inputs, strict=False):
        words += [flag, f'"$RUN_DIR/{name}"']
    return f"HOW=({' '.join(words)})\n"


def elastic_environment(plan: Plan, launch: LaunchOptions, elastic: ElasticOptions) -> dict[str, str]:
    """Variables of every rank: what one of the plans needs, and what a plan that is searched may need."""
    found: dict[str, str] = {}
    for one in (plan, *(other for _, other in elastic.more)):
        found |= environment_of(one)
    # It is read once, when CUDA starts; a later plan with TP would be refused without it.
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **found} if elastic.inputs else found
    return {**found, **(launch.environment or {})}
