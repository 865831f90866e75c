"""Launch scripts: one Slurm file (heterogeneous or plain), and one torchrun script per node.

All of them set ranks explicitly, turn the flight recorder on, write logs under the run's folder and
resume from the newest checkpoint.  A Slurm job saves and stops before its time is over, and goes on later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..inputs.files import comment, default_of, is_feature, quote
from ..inputs.packing import Component, Node, NodeKind, asked_gres, chosen_devices, components, task_ranks, whole_kind

AtTimeLimit = Literal["requeue", "chain", "stop"]
"""What a job does that has saved before its time is over: it is queued again, it submits the next one, or it ends."""


@dataclass(frozen=True, slots=True)
class Container:
    """Holds in what the processes of a job run."""

    image: str  # a file, or a name of a registry
    runtime: Literal["pyxis", "apptainer"] = "pyxis"  # ``pyxis`` (Slurm's plugin for enroot) or ``apptainer``
    mounts: tuple[str, ...] = ()  # folders besides that of the run, as ``/FOLDER[:/INSIDE[:ro]]``

    @property
    def step(self) -> str:
        """Words of ``srun``, where Slurm starts the container."""
        if self.runtime != "pyxis":
            return ""
        # Without a second path a folder is mounted at its own.
        mounts = "".join("," + (mount if ":" in mount else f"{mount}:{mount}") for mount in self.mounts)
        run_dir = '"$RUN_DIR:$RUN_DIR"'
        return f"--container-image={quote(self.image)} --container-mounts={run_dir}{quote(mounts) if mounts else ''} "

    @property
    def command(self) -> str:
        """Words before a command that runs in the container, where the command starts the container."""
        if self.runtime != "apptainer":
            return ""
        mounts = "".join(f" --bind {quote(mount)}" for mount in self.mounts)
        return f'apptainer exec --nv --bind "$RUN_DIR"{mounts} {quote(self.image)} '


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Settings of the scripts."""

    run_dir: str  # folder of the run as the nodes see it: args.sh, logs and checkpoints live there
    job_name: str = "megatron-het"
    time_limit: str = "24:00:00"  # Slurm's time limit
    python: str = "python"  # the interpreter
    module: str = "megatron_het.pretrain_gpt"  # the training module
    save_interval: int = 500  # iterations between checkpoints
    environment: Mapping[str, str] | None = None  # further variables for every rank
    cpus_per_task: int = 0  # cores of a rank; 0 = a node's ranks share its cores
    doctor: bool = False  # check the nodes first; the training starts only if they are fit
    iterations: int = 0  # after which the training is over; 0: unknown
    notice_s: int = 120  # so long before the end of its time a job saves and stops, in seconds
    at_time_limit: AtTimeLimit = "requeue"  # what it does then
    modules: tuple[str, ...] = ()  # environment modules that are loaded first
    prologue: str = ""  # bash that is run first, in the same shell
    container: Container | None = None  # in what the processes run


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

RESUME = """\
# Resume from the newest checkpoint.  Without the tracker file Megatron would silently start anew.
if [[ -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]]; then
    export HET_RESUME=1
elif compgen -G "$CHECKPOINTS/iter_*" >/dev/null; then
    echo "error: $CHECKPOINTS holds checkpoints but no latest_checkpointed_iteration.txt, or an empty one:" \\
        "a save was interrupted. Write the iteration to resume from into that file, or move the folder away." >&2
    exit 1
else
    export HET_RESUME=
fi
"""

NEWEST = """\
newest() {  # the iteration of the newest checkpoint
    local iteration=
    [[ ! -s "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]] ||
        read -r iteration <"$CHECKPOINTS/latest_checkpointed_iteration.txt" || true
    [[ "$iteration" =~ ^[0-9]+$ ]] || iteration=0
    echo "$((10#$iteration))"
}
before=$(newest)
"""
AWAIT = """\
await() {  # the exit code of a process; a signal that is trapped ends a 'wait' before the process has ended
    local rc=143 last
    while ((rc > 128)) && kill -0 "$1" 2>/dev/null; do
        rc=0
        wait "$1" || rc=$?
    done
    if ((rc > 128)); then  # it has ended between two looks; 127: it was waited for, and a signal has ended it
        last=0
        wait "$1" 2>/dev/null || last=$?
        ((last == 127)) || rc=$last
    fi
    return "$rc"
}
"""
_NOTICE = """\

# Before the job's time is over Slurm tells this script (--signal).  All ranks save after the running iteration and end.
noticed=
step=
notice() {
    noticed=1
    if [[ -z "$step" ]]; then
        echo "error: the job's time was nearly over before the training began" >&2
        exit 1
    fi
    kill -USR1 "$step" 2>/dev/null || true
}
trap notice USR1
"""
_AWAIT_NOTICE = "\n" + AWAIT + _NOTICE + NEWEST
_ACTIONS: dict[AtTimeLimit, tuple[str, str]] = {
    "requeue": (
        "the job is queued again",
        'scontrol requeue "$SLURM_JOB_ID"\n        sleep 60  # Slurm ends this script',
    ),
    "chain": ("another job goes on", 'sbatch --dependency=afterany:"$SLURM_JOB_ID" "$RUN_DIR/SCRIPT"'),
    "stop": ("submit the script again to go on", "true"),
}


def go_on(options: LaunchOptions, script: str) -> str:
    """Bash: what a job does that was told to stop and has ended with the exit code ``rc``."""
    said, action = _ACTIONS[options.at_time_limit]
    of = f" of {options.iterations}" if options.iterations else ""
    done = f"    if (($(newest) >= {options.iterations})); then\n        rc=0\n    elif" if of else "    if"
    return (
        "    state=$(scontrol show job \"$SLURM_JOB_ID\" -o | grep -o 'JobState=[A-Z_]*' | head -n1 || true)\n"
        f'{done} (($(newest) > before)) && [[ "$state" == JobState=RUNNING ]]; then\n'
        f'        echo "stopped after iteration $(newest){of}; {said}"\n'
        f"        {action.replace('SCRIPT', script)}\n"
        "    fi\n"
    )


_TRAIN = """\
train() {
    source "$RUN_DIR/args.sh"
    local checkpoint=(--save "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist)
    if [[ -n "$HET_RESUME" ]]; then
        checkpoint+=(--load "$CHECKPOINTS" --exit-on-missing-checkpoint)
    fi
SIGNALS    exec "$PYTHON" -m "$TRAIN_MODULE" "${MEGATRON_ARGS[@]}" "${checkpoint[@]}"
}
"""

_DIAGNOSE = """\
diagnose() {
    source "$RUN_DIR/args.sh"
    local more
    read -ra more <<<"${HET_DOCTOR_ARGS:-}"
    exec "$PYTHON" -m megatron_het.doctor --expect "$RUN_DIR/expectations.json" --checkpoints "$CHECKPOINTS" \\
        --json "$RUN_DIR/logs/doctor.json" "${more[@]}" -- "${MEGATRON_ARGS[@]}"
}
export -f diagnose
"""
_FIRST_DOCTOR = "\n# The nodes are checked first.  HET_DOCTOR=0 goes without; HET_DOCTOR_ARGS adds options.\n"


_SIGNALS = """\
    trap '' USR1  # what comes before Megatron listens must not end a rank
    checkpoint+=(--exit-signal-handler --exit-signal SIGUSR1)
"""


def _functions(options: LaunchOptions, *, under_slurm: bool = True) -> str:
    """Returns what a rank does: train, and before that the doctor's checks where they were asked for."""
    text = _TRAIN.replace("SIGNALS", _SIGNALS if under_slurm else "") + (_DIAGNOSE if options.doctor else "")
    return in_container(text, options) if under_slurm else text


def in_container(text: str, options: LaunchOptions) -> str:
    """Bash whose commands run in the job's container, if it has one."""
    return text.replace('"$PYTHON"', options.container.command + '"$PYTHON"') if options.container else text


def settings(options: LaunchOptions) -> str:
    """Variables of the script: where things are, and the environment of every rank."""
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
        lines += ["set +u  # modules may read variables that are not set"]
        lines += [
            "type -t module >/dev/null || source /etc/profile",
            f"module load {' '.join(map(quote, options.modules))}",
        ]
        lines += ["set -u"]
    if options.prologue:
        lines += ["set +eu", 'source "$RUN_DIR/prologue.sh"', "set -eu"]
    return "\n".join(lines) + "\n"


def _table(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def resources(
    part: Component, kinds: Mapping[str, NodeKind], options: LaunchOptions, *, tasks_per_node: int = 0
) -> list[str]:
    """Returns words of an ``#SBATCH`` line.

    Args:
        part: A component of the job.
        tasks_per_node: Tasks that share the cores of a node's ranks; 0 = one per rank.
    """
    kind, tasks = whole_kind(part.nodes[0], kinds), tasks_per_node or part.per_node
    words = [f"--nodes={len(part.nodes)}", f"--ntasks-per-node={tasks}"]
    cores = (options.cpus_per_task * part.per_node or kind.cores(part.per_node)) // tasks
    words += [f"--cpus-per-task={cores}"] if cores else []
    words += _values(kind, "partition", "constraint", "account", "qos", "reservation", "licenses")
    if gres := asked_gres(part.nodes[0], kinds):
        words.append(f"--gres={quote(gres)}")
    return words + _share(kind, is_whole=part.is_whole, has_cores=cores > 0)


def _values(kind: NodeKind, *names: str) -> list[str]:
    """Slurm's options that have a value for nodes of a kind."""
    return [f"--{name}={quote(getattr(kind, name))}" for name in names if getattr(kind, name)]


def _share(kind: NodeKind, *, is_whole: bool, has_cores: bool) -> list[str]:
    """Returns words for what the job gets of its nodes: all, where it uses all of their GPUs."""
    exclusive = is_whole and not has_cores if kind.exclusive is None else kind.exclusive
    words = ["--exclusive"] if exclusive else []
    memory = kind.mem or ("0" if is_whole else "")
    return words + ([f"--mem={quote(memory)}"] if memory else [])


def _step_words(options: LaunchOptions) -> str:
    """Words of every ``srun``: a node's tasks share the job's cores there, unless each was given a number."""
    # srun does not take the number from the job in all versions of Slurm.
    cores = f"--cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else "--cpu-bind=none"
    return f"{cores} {options.container.step if options.container else ''}"


def _in_step(options: LaunchOptions, call: str) -> str:
    """The command of a step that calls a function of the script."""
    if not options.container or options.container.runtime != "pyxis":
        return f"bash -c {quote(call)}"
    # A container need not keep functions that are in the environment.
    return f'bash -c "$(declare -f train as_task{" diagnose" if options.doctor else ""}); {call}"'


SHELLCHECK = """\
# shellcheck disable=SC1091,SC2329  # args.sh is beside this file; functions are called by name
"""


def head(options: LaunchOptions, note: str, signal: str = "USR1") -> str:
    """The first lines of a job; ``signal`` tells the batch script that its time is nearly over."""
    return (
        "#!/bin/bash\n"
        f"# {note}\n"
        f"{SHELLCHECK}"
        f"#SBATCH --job-name={quote(options.job_name)}\n"
        f"#SBATCH --time={quote(options.time_limit)}\n"
        f"#SBATCH --output={quote(f'{options.run_dir}/logs/%x-%j.out')}\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        f"#SBATCH --signal=B:{signal}@{options.notice_s}\n"
    )


def het_sbatch(nodes: Sequence[Node], kinds: Mapping[str, NodeKind], options: LaunchOptions) -> str:
    """A heterogeneous job: one component per kind of node, one task per rank.

    With a single component it is an ordinary job.  The batch script sees component 0 only, so totals
    come from the plan; inside the tasks SLURM_PROCID counts over all components.
    """
    parts = components(nodes, kinds)
    text = head(options, "Submit with: sbatch train.sbatch")
    blocks = ["#SBATCH " + " ".join(resources(p, kinds, options)) + "\n" for p in parts]
    text += "#SBATCH hetjob\n".join(blocks)
    several = len(parts) > 1
    groups = ",".join(str(i) for i in range(len(parts)))
    step = f"--het-group={groups} " if several else ""
    nodelist = "SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST"
    text += "set -euo pipefail\n\n" + settings(options)
    text += "\n# Task n of the step is rank HET_RANKS[n] of the plan.\n"
    text += f"export HET_RANKS={quote(_table(task_ranks(parts)))}\n"
    text += f"export WORLD_SIZE={len(task_ranks(parts))}\n" + _interpreters(parts, kinds) + _devices(parts, kinds)
    text += master(f'$(scontrol show hostnames "${nodelist}" | head -n1)')
    text += "\n" + RESUME + "\n" + _functions(options) + _as_task(parts, kinds)
    return text + _steps(options, "train.sbatch", f"srun {step}", "--distribution=block")


def _steps(options: LaunchOptions, script: str, srun: str, distribution: str) -> str:
    """The end of a job: the doctor's step, the training's, and what comes after a notice."""
    srun += _step_words(options)
    text = _AWAIT_NOTICE
    text += _doctor_step(options, f"{srun}--kill-on-bad-exit=0 {distribution} {_in_step(options, 'as_task diagnose')}")
    text += f"\n{srun}--kill-on-bad-exit=1 {distribution} {_in_step(options, 'as_task')} &\nstep=$!\n"
    text += 'rc=0\nawait "$step" || rc=$?\nif [[ -n "$noticed" ]]; then\n'
    return text + go_on(options, script) + 'fi\nexit "$rc"\n'


def _interpreters(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    """Bash: the interpreter of every task, where kinds have their own."""
    words = [kinds[part.kind].python for part in parts for _ in part.ranks]
    return f'export HET_PYTHONS="{" ".join(word or "$PYTHON" for word in words)}"\n' if any(words) else ""


def _devices(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    """Bash: the devices that every task may see, where Slurm gives out more of a node than the plan uses."""
    words = [chosen_devices(node, kinds) for part in parts for node in part.nodes for _ in node.ranks]
    return f"export HET_DEVICES={quote(' '.join(word or '-' for word in words))}\n" if any(words) else ""


def _as_task(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    """Bash: what a task does."""
    if not _devices(parts, kinds):
        return _AS_TASK
    more = """\
    local devices
    read -ra devices <<<"$HET_DEVICES"
    [[ "${devices[$SLURM_PROCID]}" == - ]] || export CUDA_VISIBLE_DEVICES="${devices[$SLURM_PROCID]}"
"""
    return _AS_TASK.replace('    "${1:-train}"\n', more + '    "${1:-train}"\n')


def _doctor_step(options: LaunchOptions, step: str) -> str:
    """Returns a step of its own before the training.  Ranks that find a fault let the others finish their table."""
    if not options.doctor:
        return ""
    return f'{_FIRST_DOCTOR}if [[ "${{HET_DOCTOR:-1}}" != 0 ]]; then\n    {step} || exit $?\nfi\n'


_AS_TASK = """\
as_task() {
    local ranks pythons
    read -ra ranks <<<"$HET_RANKS"
    if [[ "$SLURM_NTASKS" != "$WORLD_SIZE" ]]; then
        echo "error: the step has $SLURM_NTASKS tasks, the plan $WORLD_SIZE ranks" >&2
        exit 1
    fi
    export RANK=${ranks[$SLURM_PROCID]} LOCAL_RANK=$SLURM_LOCALID
    if [[ -n "${HET_PYTHONS:-}" ]]; then
        read -ra pythons <<<"$HET_PYTHONS"
        PYTHON=${pythons[$SLURM_PROCID]}
    fi
    "${1:-train}"
}
export -f train as_task
"""


def master(first: str) -> str:
    """Address and port of rank 0.

    A node's name need not resolve, its address does.  The port is below 32768, where Linux begins to take the local
    ends of connections.
    """
    return (
        f"first={first}\n"
        "address=$(scontrol show node \"$first\" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2 || true)\n"
        'export MASTER_ADDR="${address:-$first}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))\n'
    )


def plain_obstacle(nodes: Sequence[Node], kinds: Mapping[str, NodeKind]) -> str:
    """Why no plain job can run this launch; empty when one can."""
    parts = components(nodes, kinds)
    if len(parts) == 1:
        return ""
    if len({p.per_node for p in parts}) > 1 and any(kinds[p.kind].gres for p in parts):
        return "nodes use different numbers of GPUs, and a plain job asks every node for the same"
    if any(p.nodes[0].kinds and kinds[p.kind].gres for p in parts):
        return "nodes with several kinds of GPUs are asked for so many of each, and a plain job asks every node alike"
    names = {kinds[p.kind].constraint for p in parts}
    if len({p.kind for p in parts}) > 1 and (len(names) < len(parts) or not all(map(is_feature, names))):
        return "every node kind needs its own 'constraint' (a Slurm feature) to be told apart in one allocation"
    if len({p.kind for p in parts}) < len(parts):
        return "nodes of one kind use different numbers of devices"
    if len({(kinds[p.kind].partition, kinds[p.kind].account) for p in parts}) > 1:
        return "the kinds are in different partitions or accounts, and a plain job runs in one"
    for name in (*_OF_A_JOB, "mem", "exclusive"):
        if len({getattr(kinds[p.kind], name) for p in parts}) > 1:
            return f"the kinds differ in '{name}', and a plain job asks every node for the same"
    return ""


def plain_resources(
    parts: Sequence[Component], kinds: Mapping[str, NodeKind], options: LaunchOptions, *, tasks_per_node: int = 0
) -> list[str]:
    """Words of the ``#SBATCH`` line of a plain job; ``tasks_per_node`` as in :func:`resources`."""
    most = max(p.per_node for p in parts)
    first = kinds[parts[0].kind]
    tasks = tasks_per_node or most
    words = [f"--nodes={sum(len(p.nodes) for p in parts)}", f"--ntasks-per-node={tasks}"]
    # One request for all nodes: what the smallest of them has.
    whole = [whole_kind(p.nodes[0], kinds) for p in parts]
    least = min(kind.cores(min(most, kind.devices)) for kind in whole)
    cores = (options.cpus_per_task * most or least) // tasks
    words += [f"--cpus-per-task={cores}"] if cores else []
    words += _values(first, *_OF_A_JOB)
    if first.gres:
        # Types differ between the kinds; the features choose the nodes.
        several = f"{first.gres.split(':')[0]}:{most}"
        words.append(f"--gres={quote(asked_gres(parts[0].nodes[0], kinds) if len(parts) == 1 else several)}")
    if len(parts) > 1:
        wanted = "&".join(f"{kinds[p.kind].constraint}*{len(p.nodes)}" for p in parts)
        words.append(f"--constraint={quote(f'[{wanted}]')}")
    elif first.constraint:
        words.append(f"--constraint={quote(first.constraint)}")
    return words + _share(first, is_whole=all(p.is_whole for p in parts), has_cores=cores > 0)


_OF_A_JOB = ("partition", "account", "qos", "reservation", "licenses")  # what a plain job asks for all of its nodes


def plain_sbatch(nodes: Sequence[Node], kinds: Mapping[str, NodeKind], options: LaunchOptions) -> str:
    """An ordinary job over all nodes; kinds are told apart by their features. Raises ValueError.

    For clusters whose Slurm does not start heterogeneous jobs.  Ranks are put on their nodes with a
    host file, one line per task.
    """
    obstacle = plain_obstacle(nodes, kinds)
    if obstacle:
        raise ValueError(obstacle)
    parts = components(nodes, kinds)
    words = plain_resources(parts, kinds, options)
    text = head(options, "Submit with: sbatch train-plain.sbatch")
    text += "#SBATCH " + " ".join(words) + "\n"
    text += "set -euo pipefail\n\n" + settings(options)
    text += f"export HET_RANKS={quote(_table(task_ranks(parts)))} WORLD_SIZE={len(task_ranks(parts))}\n"
    text += _interpreters(parts, kinds) + _devices(parts, kinds) + _host_file(parts, kinds)
    text += master('$(head -n1 "$SLURM_HOSTFILE")')
    text += "\n" + RESUME + "\n" + _functions(options) + _as_task(parts, kinds)
    return text + _steps(options, "train-plain.sbatch", 'srun --ntasks="$WORLD_SIZE" ', "--distribution=arbitrary")


def feature_function(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> tuple[str, list[str]]:
    """Bash that says which feature a host of a plain job has, and the feature of every part."""
    if len(parts) == 1:
        return "feature_of() { echo any; }\n", ["any"]
    names = [kinds[p.kind].constraint for p in parts]
    text = (
        "feature_of() {\n"
        "    local feature all\n"
        "    all=,$(scontrol show node \"$1\" -o | grep -o 'ActiveFeatures=[^ ]*' | cut -d= -f2),\n"
        f"    for feature in {' '.join(map(quote, names))}; do\n"
        '        [[ "$all" == *",$feature,"* ]] && { echo "$feature"; return; }\n'
        "    done\n"
        '    echo "error: node $1 has none of the features of this job" >&2\n'
        "    return 1\n"
        "}\n"
    )
    return text, names


def _host_file(parts: Sequence[Component], kinds: Mapping[str, NodeKind]) -> str:
    """Bash that writes one host per task: first all nodes of the first kind, and so on."""
    features, names = feature_function(parts, kinds)
    text = "\n# One line per task: the host it runs on.\n" + features
    text += 'export SLURM_HOSTFILE="$RUN_DIR/logs/hosts-$SLURM_JOB_ID"\n: >"$SLURM_HOSTFILE"\n'
    for feature, part in zip(names, parts, strict=True):
        text += (
            'for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do\n'
            f'    if [[ "$(feature_of "$host")" == {quote(feature)} ]]; then\n'
            f'        for ((i = 0; i < {part.per_node}; i++)); do echo "$host" >>"$SLURM_HOSTFILE"; done\n'
            "    fi\n"
            "done\n"
        )
    return text


def torchrun_script(nodes: Sequence[Node], index: int, options: LaunchOptions, python: str = "") -> str:
    """The script to start on node ``index``; all nodes' scripts are started at about the same time.

    Static rendezvous: with c10d the rank order would be arbitrary, and the plan says who is where.

    Args:
        python: The interpreter of this node, where it has its own.
    """
    node, options = nodes[index], replace(options, python=python or options.python)
    ranks = [r for n in nodes for r in n.ranks]
    main_host = nodes[0].host
    text = "#!/bin/bash\n"
    place = comment(node.name + (f", {node.host}" if node.host else ""))
    text += f"# Node {index} of {len(nodes)} ({place}): "
    text += f"ranks {_table(node.ranks)} of the plan.\n"
    text += SHELLCHECK + "set -euo pipefail\n\n" + settings(options)
    if node.devices != tuple(range(len(node.devices))):
        text += f"export {default_of('CUDA_VISIBLE_DEVICES', ','.join(map(str, node.devices)))}\n"
    if main_host:
        text += f"export {default_of('MASTER_ADDR', main_host)}\n"
    elif len(nodes) > 1:
        text += 'export MASTER_ADDR="${MASTER_ADDR:?set it to the address of node 0}"\n'
    else:
        text += 'export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"\n'
    text += 'export MASTER_PORT="${MASTER_PORT:-29500}"\n'
    text += "\n" + RESUME + "\n" + _functions(options, under_slurm=False)
    text += f"# torchrun's rank n is rank HET_RANKS[n] of the plan.\nexport HET_RANKS={quote(_table(ranks))}\n"
    text += (
        'as_rank() {\n    local ranks\n    read -ra ranks <<<"$HET_RANKS"\n'
        "    export RANK=${ranks[$RANK]}\n"
        '    "${1:-train}"\n}\nexport -f train as_rank\n'
    )
    start = (
        f'"$PYTHON" -m torch.distributed.run --nnodes={len(nodes)} --node-rank={index} '
        f"--nproc-per-node={len(node.ranks)} \\\n"
        '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\\n'
        '    --log-dir="$RUN_DIR/logs" --no-python bash -c'
    )
    text += _doctor_step(options, f"{start} 'as_rank diagnose'")
    return text + f"\nexec {start} as_rank\n"
