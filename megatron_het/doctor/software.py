"""Versions, drivers, kernels and environment variables, compared over all ranks."""

import importlib.util
import os
import platform as system
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_het.arguments.megatron_args import check_device_kind, environment_of
from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, amount, grouped, rate
from megatron_het.doctor.devices import query
from megatron_het.plan import PlanError
from megatron_het.store import Documents

# The folder of the checkpoints: the same on all nodes, writable, with enough room, and fast enough.

_BLOCK = 4 << 20
_WINDOW_S, _MOST_BYTES = 2.0, 256 << 20
_SEEN_S = 10.0
_KEPT = 2  # Megatron removes the old checkpoint after the new one has been written


@dataclass
class Disk(Check):
    """Speed, space and sharing of the checkpoint folder; all ranks write at the same time, as for a checkpoint."""

    folder: str = ""  # of the checkpoints; empty leaves the check out
    checkpoint_bytes: int = 0  # size of a checkpoint; 0 if unknown
    most_s: float = 300.0  # a checkpoint that takes longer is a warning
    name: str = field(default="disk", init=False)
    limit_s: float = field(default=30.0, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Measures this rank's write bandwidth and free bytes, and whether rank 0's mark file is visible here."""
        if not self.folder:
            return {}
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".het-doctor-{seat.expectations.plan_hash or 'mark'}-{os.environ.get('MASTER_PORT', '')}"
        if seat.rank == 0:
            mark.write_text("doctor", encoding="ascii")
            seat.store.put("mark", True)
        written, seconds = _write(folder / f".het-doctor-rank-{seat.rank}")
        seen = _is_seen(mark, seat.store)
        seat.store.put(f"looked/{seat.rank}", True)
        if seat.rank == 0:
            seat.store.wait([f"looked/{rank}" for rank in range(len(seat.hosts))], [], _SEEN_S)
            mark.unlink(missing_ok=True)
        return {"bytes": written, "seconds": seconds, "free_bytes": shutil.disk_usage(folder).free, "shared": seen}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Returns findings about sharing, space and speed."""
        if not self.folder:
            return [self.warning("all ranks", "no folder was given (--checkpoints)")]
        found = []
        alone = [rank for rank, answer in answers.items() if not answer["shared"]]
        if alone:
            text = f"do not see what rank 0 writes into {self.folder}"
            found.append(self.fault(names.of(alone), text, "Checkpoints need one folder that all nodes share"))
        total = sum(answer["bytes"] for answer in answers.values())
        speed = total / max(answer["seconds"] for answer in answers.values())
        free = min(answer["free_bytes"] for answer in answers.values())
        text = f"{self.folder}: {rate(speed)} over all ranks, {amount(free)} free"
        if not self.checkpoint_bytes:
            return [*found, self.ok(names.of(answers), text)]
        seconds = self.checkpoint_bytes / speed
        text += f"; a checkpoint of {amount(self.checkpoint_bytes)} takes about {seconds:.0f} s"
        if free < _KEPT * self.checkpoint_bytes:
            found.append(self.fault(names.of(answers), text, "There is no room for two checkpoints"))
        elif seconds > self.most_s:
            found.append(self.warning(names.of(answers), text, f"That is more than {self.most_s:.0f} s"))
        else:
            found.append(self.ok(names.of(answers), text))
        return found


def _write(path: Path) -> tuple[int, float]:
    """Write for a short time and flush to the disk; returns (bytes, seconds).

    Raises:
        OSError: It cannot be written, or what is read back differs.
    """
    block = os.urandom(_BLOCK)
    start_s, written = time.perf_counter(), 0
    try:
        with path.open("wb") as file:
            while written < _MOST_BYTES and time.perf_counter() - start_s < _WINDOW_S:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += _BLOCK
        seconds = time.perf_counter() - start_s
        with path.open("rb") as file:
            if file.read(_BLOCK) != block:
                raise OSError(f"{path}: what was written is not what is read")
    finally:
        path.unlink(missing_ok=True)
    return written, seconds


def _is_seen(mark: Path, store: Documents) -> bool:
    """Whether rank 0's file becomes visible here; network file systems show it late."""
    deadline_s = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline_s:
        if store.has("mark"):
            os.listdir(mark.parent)  # refreshes what NFS remembers of the folder
            if mark.exists():
                return True
        time.sleep(0.1)
    return False


_PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron-core",
    "megatron-het": "megatron-het",
    "Transformer Engine": "transformer-engine",
    "Apex": "apex",
    "flash-attn": "flash-attn",
    "numpy": "numpy",
}
_KERNELS = {
    "gradient accumulation": "fused_weight_gradient_mlp_cuda",
    "masked softmax": "scaled_upper_triang_masked_softmax_cuda",
}
# With different values of these, ranks compute or communicate differently.
_MUST_AGREE = ("torch", "megatron-core", "megatron-het", "Transformer Engine", "Apex", "python", "nccl", "plan")
_WATCHED = re.compile(r"(NCCL|CUDA|OMP|MKL|GLOO|NVTE|TORCH|PYTORCH|UCX|FI|NVSHMEM|RCCL|HIP|PYTHONHASHSEED)(_|$)")
# Set by launchers, or different on every rank or node on purpose.
_OWN = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|TORCHELASTIC_|TORCH_NCCL_ASYNC|TORCHRUN|.*TEMP_FILE|"
    r"CUDA_(VERSION|HOME|PATH)|NCCL_VERSION|NCCL_HOSTID"
)
_BY_NODE = re.compile(r".*(IFNAME|IB_HCA|NET_DEVICES|_INTERFACE|IFACE|TOPO_FILE)$")
_PROTOCOL = re.compile(r"NCCL_(ALGO|PROTO|COLLNET|NVLS|P2P|BUFFSIZE|IB_DISABLE|NET)|NVTE_|CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass
class Software(Check):
    """Compares installed versions and environment variables over all ranks."""

    name: str = field(default="software", init=False)
    limit_s: float = field(default=30.0, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Versions by name, and the environment variables that matter."""
        device = _device(seat.local_rank)
        return {
            "versions": installed() | {"plan": seat.expectations.plan_hash or "-"},
            "device": device,
            "misplaced": _misplaced(seat, device["name"]),
            "environment": {k: v for k, v in os.environ.items() if _WATCHED.match(k) and not _OWN.fullmatch(k)},
            "wanted": environment_of(seat.plan),
        }

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Differences between ranks, and variables that contradict the plan."""
        found = self._versions(answers, names) + self._devices(answers, names) + self._builds(answers, names)
        found += self._variables(answers, names)
        for rank, answer in answers.items():
            for variable, wanted in answer["wanted"].items():
                value = answer["environment"].get(variable)
                if value not in (None, wanted) and answer["device"].get("capability", 0) < 10:
                    what = f"{variable}={value}, and the plan has tensor parallelism, which needs {wanted}"
                    found.append(self.fault(names.of([rank]), what, "Leave the variable to the plan"))
        return found

    def _versions(self, answers: Answers, names: Names) -> list[Finding]:
        found, same = [], []
        for name in dict.fromkeys(n for answer in answers.values() for n in answer["versions"]):
            groups = grouped({rank: answer["versions"].get(name, "-") for rank, answer in answers.items()})
            if len(groups) == 1:
                value = next(iter(groups))
                if value != "-" and name != "plan":
                    same.append(f"{name} {value}")
                continue
            text = f"{name}: " + "; ".join(f"{value} on {names.of(ranks)}" for value, ranks in groups.items())
            usual = next(iter(groups))
            others = [rank for value, ranks in groups.items() if value != usual for rank in ranks]
            judged = self.fault if name in _MUST_AGREE else self.warning
            found.append(judged(names.of(others), text, "Use one environment on all nodes"))
        return [*found, self.ok("all ranks", ", ".join(same))] if same else found

    def _devices(self, answers: Answers, names: Names) -> list[Finding]:
        """Models of devices and their drivers; kinds that the plan names get one model each."""
        found = []
        for model, ranks in grouped({r: a["device"]["name"] for r, a in answers.items()}).items():
            drivers = grouped({r: answers[r]["device"].get("driver", "") for r in ranks})
            text = model + "".join(f", driver {d} on {names.of(rs)}" for d, rs in drivers.items() if d)
            one = self.ok if len(drivers) == 1 else self.warning
            found.append(one(names.of(ranks), text))
        by_kind: dict[str, dict[int, str]] = {}
        for rank, answer in answers.items():
            by_kind.setdefault(names.kind(rank), {})[rank] = answer["device"]["name"]
        for kind, models in by_kind.items():
            groups = grouped(models)
            if kind and len(groups) > 1:
                text = f"devices of the kind {kind} are different models: " + "; ".join(
                    f"{model} on {names.of(ranks)}" for model, ranks in groups.items()
                )
                found.append(self.fault(names.of(models), text, "Ranks are on other nodes than the plan says"))
        misplaced = grouped({rank: tuple(a["misplaced"]) for rank, a in answers.items() if a["misplaced"]})
        return [*found, *(self.fault(names.of(ranks), *said) for said, ranks in misplaced.items())]

    def _builds(self, answers: Answers, names: Names) -> list[Finding]:
        """Devices that the PyTorch of their rank has no kernels for, and which rank's PyTorch has them for all."""
        wanted = {r: a["device"]["architecture"] for r, a in answers.items() if a["device"].get("architecture")}
        builds = {r: tuple(answers[r]["device"].get("built_for", ())) for r in wanted}
        lacking = {r: device for r, device in wanted.items() if builds[r] and not _has_kernels(device, builds[r])}
        found = []
        for device, ranks in grouped(lacking).items():
            built_for = " ".join(builds[ranks[0]])
            fits = [r for r in builds if all(_has_kernels(other, builds[r]) for other in wanted.values())]
            hint = "Install a build of PyTorch that has kernels for every device (docs/old_gpus.md)"
            if fits:
                hint = f"The one of {names.of(fits)} has kernels for every device: install it on all nodes"
            found.append(self.fault(names.of(ranks), f"PyTorch has no kernels for {device}, only {built_for}", hint))
        return found

    def _variables(self, answers: Answers, names: Names) -> list[Finding]:
        found = []
        for name in sorted({n for answer in answers.values() for n in answer["environment"]}):
            groups = grouped({rank: answer["environment"].get(name) for rank, answer in answers.items()})
            if len(groups) == 1 or (_BY_NODE.fullmatch(name) and None not in groups):
                continue
            judged = self.fault if _PROTOCOL.match(name) else self.warning
            missing = groups.get(None, [])
            if missing:
                there = [rank for value, ranks in groups.items() if value is not None for rank in ranks]
                text = f"{name} is not set, and {names.of(there)} has it"
                found.append(judged(names.of(missing), text, "Set it on all nodes or on none"))
            else:
                text = "; ".join(f"{value} on {names.of(ranks)}" for value, ranks in groups.items())
                found.append(judged(names.of(answers), f"{name} differs: {text}", "Set it alike on all nodes"))
        return found


def installed() -> dict[str, str]:
    """Versions of what training uses, by name; ``-`` for what is not there."""
    found = {"python": system.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "-"
    import megatron_het

    found["megatron-het"] = megatron_het.__version__  # a checkout may not be installed
    for name, module in _KERNELS.items():
        found[f"fused {name}"] = "yes" if importlib.util.find_spec(module) else "-"
    return found | _torch_versions()


def _torch_versions() -> dict[str, str]:
    # Builds of one version for different CUDA train together; whether each fits its device is checked by itself.
    found = {"torch": torch.__version__.split("+")[0], "cuda": torch.version.cuda or torch.version.hip or "-"}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        # The version of the build: a query of the library would load it before Transformer Engine loads its own.
        version = getattr(getattr(torch._C, "_cudnn", None), "getCompileVersion", lambda: ())()
        found["cudnn"] = ".".join(map(str, version)) or "-"
    return found


def _device(local_rank: int) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": _processor()}
    index = local_rank % torch.cuda.device_count()
    properties, capability = torch.cuda.get_device_properties(index), torch.cuda.get_device_capability(index)
    facts = query(properties)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": capability[0],
        "architecture": properties.gcnArchName.split(":")[0] if torch.version.hip else "sm_{}{}".format(*capability),
        "built_for": torch.cuda.get_arch_list(),
        "driver": facts.get("driver_version", ""),
    }


def _misplaced(seat: Seat, name: str) -> tuple[str, ...]:
    """Returns what is wrong and what to do, where the rank's device is of another kind of the plan."""
    try:
        check_device_kind(seat.plan, seat.rank, name)
    except PlanError as error:
        return f"{name}: {error.problem}", error.hint
    return ()


def _has_kernels(device: str, built_for: Sequence[str]) -> bool:
    """Whether a build runs on a device: binaries serve later devices of their generation, PTX all later ones."""
    if device in built_for:
        return True
    found = re.fullmatch(r"sm_(\d+)(\d)", device)
    if found is None:
        return False
    own = int(found[1]), int(found[2])
    for text in built_for:
        built = re.fullmatch(r"(sm|compute)_(\d+)(\d)", text)
        if built is None:
            continue
        theirs = int(built[2]), int(built[3])
        if theirs <= own and (built[1] == "compute" or theirs[0] == own[0]):
            return True
    return False


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        return "CPU"
