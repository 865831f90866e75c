"""The doctor on this machine's mixed processes: ``python -m examples.llama.doctor`` (or ``make doctor``).

Makes the demo's small cluster, profiles it, writes a plan and a cluster file with the measured links, and starts
the doctor on it.  With ``--break`` three faults are injected, and the doctor has to find them: a process that is
slowed down, a cluster file with too fast a network, and a missing flag of the training.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from examples.llama.devices import (
    PINNING_VARIABLE,
    CpuDevice,
    available_cores,
    cluster_document,
    describe,
    measured_link,
    mixed_devices,
    pinning,
)
from examples.llama.job import gpus_here, model_of
from examples.llama.pinned import SLOWED_VARIABLE
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, save_plan
from megatron_het.safe_io import ends_with_its_reader
from megatron_het.store import free_port
from tools.planner.emit.flags import model_arguments, plan_arguments
from tools.planner.errors import PlannerError
from tools.planner.inputs.profile_schema import Profile
from tools.planner.profile.settings import WORKER, ProfileSettings, default_environment, run_profile

MODEL = ModelShape(6, 256, 8, 4, 128, ffn_hidden_size=512)
TRAINING = TrainingShape(1, 8)
MISSING_FLAG = "--no-rope-fusion"
_BROKEN_RATE = 1e13  # no link has it
_USUAL_RATE, _USUAL_LATENCY_S = 1e8, 1e-3


def plan_for(devices: Sequence[CpuDevice]) -> Plan:
    """Returns a plan with fast devices first, slow ones after them; every device is a replica."""
    order = list(range(len(devices)))
    fast = [i for i in order if devices[i].kind == "fast"] or order[:1]
    slow = [i for i in order if i not in fast]
    stages, rank = [], 0
    for layers, members in ((MODEL.num_layers // 2, fast), (MODEL.num_layers - MODEL.num_layers // 2, slow)):
        shares = [tuple(range(q, TRAINING.num_microbatches, len(members))) for q in range(len(members))]
        replicas = [Replica((rank + q,), shares[q], devices[i].kind) for q, i in enumerate(members)]
        rank += len(members)
        stages.append(Stage((layers,), tuple(replicas)))
    return Plan(MODEL, TRAINING, tuple(stages))


def flags_for(plan: Plan, is_broken: bool) -> list[str]:
    """Returns the flags of a training with the plan, as they would be in args.sh."""
    from megatron_het.device import platform_flags

    machine = [word for flag in platform_flags(is_cuda=gpus_here() > 0) for word in flag.words]
    words = [*model_arguments(plan, model_of(plan)), *plan_arguments(plan), *machine]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "250"]
    words += ["--mock-data", "--train-iters", "10", "--lr", "1e-3"]
    return [word for word in words if not (is_broken and word == MISSING_FLAG)]


def make_profile(plan: Plan, devices: Sequence[CpuDevice], out: Path) -> Profile:
    """Profile layers and links, on all devices at the same time."""
    settings = ProfileSettings(
        model=model_of(plan, precision="fp32").profiled,
        out=str(out),
        kinds=tuple(d.kind for d in devices),
        devices_per_node=1,
        window_s=0.3,
        link_bytes=(1 << 10, 1 << 18, 1 << 22),
    )
    out.unlink(missing_ok=True)  # speeds of an earlier run may be of a busier machine
    return run_profile(settings, len(devices), {PINNING_VARIABLE: pinning(devices)}, ("examples.llama.pinned", *WORKER))


def command_of(options: argparse.Namespace, out: Path, plan: Plan, has_profile: bool) -> list[str]:
    """Returns the command: torchrun, the pinning and the doctor."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(plan.world_size)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "examples.llama.pinned"]
    words += ["megatron_het.doctor", "--cluster", str(out / "cluster.yaml"), "--limit-s", str(options.limit_s)]
    words += ["--checkpoints", str(out / "checkpoints"), "--json", str(out / "doctor.json")]
    words += ["--log-dir", str(out / "logs"), "--slow-ratio", str(options.slow_ratio), "--link-ratio", "3"]
    if has_profile:
        words += ["--profile", str(out / "profile.json")]
    flags = flags_for(plan, options.is_broken)
    return [*words, "--", *flags, "--het-plan", str(out / "plan.json")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.doctor", description="Checks this machine as if it were a small mixed cluster."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"), help="folder (default: %(default)s)")
    parser.add_argument("--break", dest="is_broken", action="store_true", help="put three faults in, to be found")
    parser.add_argument("--no-profile", action="store_true", help="do not measure first")
    parser.add_argument("--max-cores", type=int, default=4, help="use at most this many cores (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="bound on the doctor (default: %(default)s)")
    parser.add_argument("--slow-ratio", type=float, default=1.5, help="see het-doctor --help (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.max_cores < 1:
        parser.error(f"--max-cores = {options.max_cores}: must be at least 1")
    return options


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit code is the doctor's."""
    options = parse(argv)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    devices = mixed_devices(available_cores(), options.max_cores)
    sys.stdout.write(describe(devices) + "\n")
    plan = plan_for(devices)
    try:
        profile = None if options.no_profile else make_profile(plan, devices, out / "profile.json")
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    save_plan(plan, out / "plan.json")
    rate, latency_s = measured_link(out / "profile.json") if profile else (_USUAL_RATE, _USUAL_LATENCY_S)
    document = cluster_document(devices, _BROKEN_RATE if options.is_broken else rate, latency_s, is_cpu=not gpus_here())
    (out / "cluster.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    environment = {**default_environment(), PINNING_VARIABLE: pinning(devices)}
    if options.is_broken:
        environment[SLOWED_VARIABLE] = str(len(devices) - 1)
    command = command_of(options, out, plan, profile is not None)
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    (out / "launcher.log").write_text(done.stderr, encoding="utf-8")
    if done.returncode and not (out / "doctor.json").exists():
        sys.stderr.write(done.stderr[-3000:])
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
