"""Launch scripts: one Slurm file (heterogeneous or plain), and one torchrun script per node.

All of them set ranks explicitly, turn the flight recorder on, write logs under the run's folder and
resume from the newest checkpoint.  A Slurm job saves and stops before its time limit, and resumes later.
Their bash is in ``assets/``, as templates of Jinja2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources as files
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined

from ..inputs.cluster import NodeGroup
from ..inputs.files import comment, default_of, is_feature, quote
from ..inputs.packing import Component, Node, asked_gres, chosen_devices, components, task_ranks, whole_kind

AtTimeLimit = Literal["requeue", "chain", "stop"]
"""Action after the save before the time limit: queue the job again, submit the next job, or end."""


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a job's processes."""

    image: str  # a file, or a name of a registry
    runtime: Literal["pyxis", "apptainer"] = "pyxis"  # ``pyxis`` (Slurm's plugin for enroot) or ``apptainer``
    mounts: tuple[str, ...] = ()  # folders besides that of the run, as ``/FOLDER[:/INSIDE[:ro]]``

    @property
    def step(self) -> str:
        """Options of ``srun`` if Slurm starts the container."""
        if self.runtime != "pyxis":
            return ""
        # Without a second path a folder is mounted at its own.
        mounts = "".join("," + (mount if ":" in mount else f"{mount}:{mount}") for mount in self.mounts)
        run_dir = '"$RUN_DIR:$RUN_DIR"'
        return f"--container-image={quote(self.image)} --container-mounts={run_dir}{quote(mounts) if mounts else ''} "

    @property
    def command(self) -> str:
        """Words in front of a command if the command itself starts the container."""
        if self.runtime != "apptainer":
            return ""
        mounts = "".join(f" --bind {quote(mount)}" for mount in self.mounts)
        return f'apptainer exec --nv --bind "$RUN_DIR"{mounts} {quote(self.image)} '


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Settings of the scripts."""

    run_dir: str  # path of the run's folder on the nodes, with args.sh, logs and checkpoints
    job_name: str = "megatron-het"
    time_limit: str = "24:00:00"  # Slurm's time limit
    python: str = "python"  # the interpreter
    module: str = "megatron_het.pretrain_gpt"  # the training module
    save_interval: int = 500  # iterations between checkpoints
    environment: Mapping[str, str] | None = None  # further variables for every rank
    cpus_per_task: int = 0  # cores of a rank; 0 = a node's ranks share its cores
    doctor: bool = False  # check the nodes first; the training starts only if they are fit
    iterations: int = 0  # of the whole training; 0: unknown
    notice_s: int = 120  # seconds before the time limit at which a job saves and stops
    at_time_limit: AtTimeLimit = "requeue"  # action after that save
    modules: tuple[str, ...] = ()  # environment modules that are loaded first
    prologue: str = ""  # bash that is run first, in the same shell
    container: Container | None = None  # None without a container


# Variables of the process, each unless the user has set it.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # The flight recorder: the last collectives of every rank, written when one times out.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "$RUN_DIR/logs/flight-recorder-rank-",
    # torch before 2.9 knows the same two under these names.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "$RUN_DIR/logs/flight-recorder-rank-",
}


def settings(options: LaunchOptions) -> str:
    """Bash variables of the script: paths, and the environment of every rank."""
    lines = [
        f"export RUN_DIR={quote(options.run_dir)}",
        'export CHECKPOINTS="${CHECKPOINTS:-$RUN_DIR/checkpoints}"',
        f'export SAVE_INTERVAL="${{SAVE_INTERVAL:-{options.save_interval}}}"',
        f"export {default_of('PYTHON', options.python)} TRAIN_MODULE={quote(options.module)}",
    ]
    given = options.environment or {}
    lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in _ENVIRONMENT.items() if name not in given]
    lines += [f"export {default_of(name, value)}" for name, value in given.items()]
    lines.append('mkdir -p "$RUN_DIR/logs" "$CHECKPOINTS"')
    if options.modules:
        lines += [
            "set +u  # modules may read variables that are not set",
            "type -t module >/dev/null || source /etc/profile",
            f"module load {' '.join(map(quote, options.modules))}",
            "set -u",
        ]
    if options.prologue:
        lines += ["set +eu", 'source "$RUN_DIR/prologue.sh"', "set -eu"]
    return "\n".join(lines)


def script(name: str, options: LaunchOptions, *, signal: str = "", in_container: bool = True, **values: Any) -> str:
    """A script of ``assets/``, filled in.

    Args:
        signal: The signal before the time limit; empty without Slurm.
        in_container: Whether the script's commands run in the job's container, if it has one.
    """
    before = options.container.command if options.container and in_container else ""
    values |= {"settings": settings(options), "python": f'{before}"$PYTHON"'}
    return _environment().get_template(name).render(options=options, signal=signal, **values)


@cache
def _environment() -> Environment:
    def read(name: str) -> str:
        return files.files(__package__).joinpath("assets", name).read_text("utf-8")

    environment = Environment(
        loader=FunctionLoader(read),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": quote, "default_of": default_of, "zip": zip}
    return environment


def resources(
    parts: Sequence[Component], kinds: Mapping[str, NodeGroup], options: LaunchOptions, *, tasks_per_node: int = 0
) -> list[str]:
    """Returns words of an ``#SBATCH`` line.

    Args:
        parts: One component of a heterogeneous job, or all nodes of a plain one.
        tasks_per_node: Tasks that share the cores of a node's ranks; 0 = one per rank.
    """
    most = max(p.per_node for p in parts)
    first = kinds[parts[0].kind]
    tasks = tasks_per_node or most
    words = [f"--nodes={sum(len(p.nodes) for p in parts)}", f"--ntasks-per-node={tasks}"]
    # One request for all nodes: the resources of the smallest one.
    whole = [whole_kind(p.nodes[0], kinds) for p in parts]
    least = min(kind.cores(min(most, kind.gpus_per_node)) for kind in whole)
    cores = (options.cpus_per_task * most or least) // tasks
    words += [f"--cpus-per-task={cores}"] if cores else []
    constraint = first.slurm.constraint
    if len(parts) > 1:
        constraint = f"[{'&'.join(f'{kinds[p.kind].slurm.constraint}*{len(p.nodes)}' for p in parts)}]"
    values = {"partition": first.slurm.partition, "constraint": constraint}
    values |= {name: getattr(first.slurm, name) for name in _OF_A_JOB}
    words += [f"--{name}={quote(value)}" for name, value in values.items() if value]
    if first.slurm.gres:
        # Types differ between the kinds; the features choose the nodes.
        several = f"{first.slurm.gres.split(':')[0]}:{most}"
        words.append(f"--gres={quote(asked_gres(parts[0].nodes[0], kinds) if len(parts) == 1 else several)}")
    return words + _share(first, is_whole=all(p.is_whole for p in parts), has_cores=cores > 0)


_OF_A_JOB = ("account", "qos", "reservation", "licenses")  # options of a plain job for all of its nodes


def _share(kind: NodeGroup, *, is_whole: bool, has_cores: bool) -> list[str]:
    """Returns the options for the share of a node: all of it if the job uses all of its GPUs."""
    exclusive = is_whole and not has_cores if kind.slurm.exclusive is None else kind.slurm.exclusive
    words = ["--exclusive"] if exclusive else []
    memory = kind.slurm.mem or ("0" if is_whole else "")
    return words + ([f"--mem={quote(memory)}"] if memory else [])


def _in_step(options: LaunchOptions, call: str) -> str:
    """The command of a step that calls a function of the script."""
    if not options.container or options.container.runtime != "pyxis":
        return f"bash -c {quote(call)}"
    # A container may drop exported functions.
    return f'bash -c "$(declare -f train as_task{" diagnose" if options.doctor else ""}); {call}"'


def het_sbatch(nodes: Sequence[Node], kinds: Mapping[str, NodeGroup], options: LaunchOptions) -> str:
    """A heterogeneous job: one component per kind of node, one task per rank.

    With a single component it is an ordinary job.  The batch script sees component 0 only, so totals
    come from the plan; inside the tasks SLURM_PROCID counts over all components.
    """
    parts = components(nodes, kinds)
    several = len(parts) > 1
    step = f"--het-group={','.join(str(i) for i in range(len(parts)))} " if several else ""
    nodelist = "SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST"
    return _train_sbatch(
        "train.sbatch",
        parts,
        kinds,
        options,
        requests=[resources([part], kinds, options) for part in parts],
        first=f'$(scontrol show hostnames "${nodelist}" | head -n1)',
        srun=f"srun {step}",
        distribution="--distribution=block",
        features=[],
    )


def _train_sbatch(
    name: str, parts: Sequence[Component], kinds: Mapping[str, NodeGroup], options: LaunchOptions, **values: Any
) -> str:
    """A job whose tasks are the ranks.

    Args:
        values: Of the template that differ between heterogeneous and plain jobs.
    """
    ranks = task_ranks(parts)
    pythons = [kinds[part.kind].python for part in parts for _ in part.ranks]
    # If Slurm allocates more of a node than the plan uses.
    devices = [chosen_devices(node, kinds) for part in parts for node in part.nodes for _ in node.ranks]
    # A node's tasks share the job's cores there, unless each was given a number, which srun does not take from the job
    # in all versions of Slurm.
    cores = f"--cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else "--cpu-bind=none"
    values["srun"] += f"{cores} {options.container.step if options.container else ''}"
    check = f"{values['srun']}--kill-on-bad-exit=0 {values['distribution']} {_in_step(options, 'as_task diagnose')}"
    return script(
        "train.sbatch",
        options,
        signal="USR1",
        note=f"Submit with: sbatch {name}",
        script=name,
        parts=parts,
        ranks=" ".join(map(str, ranks)),
        world_size=len(ranks),
        pythons=" ".join(word or "$PYTHON" for word in pythons) if any(pythons) else "",
        devices=" ".join(word or "-" for word in devices) if any(devices) else "",
        check=check,
        train=_in_step(options, "as_task"),
        **values,
    )


def plain_obstacle(nodes: Sequence[Node], kinds: Mapping[str, NodeGroup]) -> str:
    """Why no plain job can run this launch; empty when one can."""
    parts = components(nodes, kinds)
    if len(parts) == 1:
        return ""
    if len({p.per_node for p in parts}) > 1 and any(kinds[p.kind].slurm.gres for p in parts):
        return "nodes use different numbers of GPUs, and a plain job asks every node for the same"
    if any(p.nodes[0].kinds and kinds[p.kind].slurm.gres for p in parts):
        return "nodes with several kinds of GPUs are asked for so many of each, and a plain job asks every node alike"
    names = set(features_of(parts, kinds))
    if len({p.kind for p in parts}) > 1 and (len(names) < len(parts) or not all(map(is_feature, names))):
        return "every node kind needs its own 'constraint' (a Slurm feature) to be told apart in one allocation"
    if len({p.kind for p in parts}) < len(parts):
        return "nodes of one kind use different numbers of devices"
    if len({(kinds[p.kind].slurm.partition, kinds[p.kind].slurm.account) for p in parts}) > 1:
        return "the kinds are in different partitions or accounts, and a plain job runs in one"
    for name in (*_OF_A_JOB, "mem", "exclusive"):
        if len({getattr(kinds[p.kind].slurm, name) for p in parts}) > 1:
            return f"the kinds differ in '{name}', and a plain job asks every node for the same"
    return ""


def plain_sbatch(nodes: Sequence[Node], kinds: Mapping[str, NodeGroup], options: LaunchOptions) -> str:
    """An ordinary job over all nodes; kinds are told apart by their features. Raises ValueError.

    For clusters whose Slurm does not start heterogeneous jobs.  Ranks are put on their nodes with a
    host file, one line per task.
    """
    obstacle = plain_obstacle(nodes, kinds)
    if obstacle:
        raise ValueError(obstacle)
    parts = components(nodes, kinds)
    return _train_sbatch(
        "train-plain.sbatch",
        parts,
        kinds,
        options,
        requests=[resources(parts, kinds, options)],
        first='$(head -n1 "$SLURM_HOSTFILE")',
        srun='srun --ntasks="$WORLD_SIZE" ',
        distribution="--distribution=arbitrary",
        features=features_of(parts, kinds),
    )


def features_of(parts: Sequence[Component], kinds: Mapping[str, NodeGroup]) -> list[str]:
    """Returns the Slurm feature of every part of a plain job, which identifies its hosts."""
    return ["any"] if len(parts) == 1 else [kinds[part.kind].slurm.constraint or "" for part in parts]


def torchrun_script(nodes: Sequence[Node], index: int, options: LaunchOptions, python: str | None = None) -> str:
    """The script to start on node ``index``; all nodes' scripts are started at about the same time.

    Static rendezvous: with c10d the rank order would be arbitrary, but the plan fixes the node of each rank.

    Args:
        python: The interpreter of this node, if it has its own.
    """
    node, options = nodes[index], replace(options, python=python or options.python)
    place = comment(node.name + (f", {node.host}" if node.host else ""))
    ranks = " ".join(map(str, node.ranks))
    return script(
        "torchrun-node.sh",
        options,
        in_container=False,
        note=f"Node {index} of {len(nodes)} ({place}): ranks {ranks} of the plan.",
        nodes=nodes,
        node=node,
        index=index,
        whole=tuple(range(len(node.devices))),
        ranks=" ".join(str(rank) for one in nodes for rank in one.ranks),
    )
