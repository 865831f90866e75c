"""One rank of a profiling run: ``torchrun ... -m tools.planner.profile.worker SETTINGS.json``.

All ranks go through the same list of points.  After every point the results are gathered and
rank 0 rewrites the profile file, so an interrupted run loses at most one point.
"""

import argparse
import dataclasses
import datetime
import itertools
import os
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from ..errors import PlannerError
from ..inputs.profile_schema import (
    TIMES,
    DeviceProfile,
    LargestBatch,
    LayerTiming,
    LinkProfile,
    Profile,
    ProfiledModel,
    load_profile,
    save_profile,
)
from .settings import (
    Point,
    ProfileSettings,
    check_options,
    check_same_model,
    check_settings,
    device_count,
    missing_points,
    point_of,
    run_profile,
    settings_of,
    show_progress,
)


def main(argv: list[str] | None = None) -> int:
    """Run this rank; the exit code is 0 only when the profile is complete."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = ProfileSettings.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    from megatron_het import megatron_patches as upstream
    from megatron_het.device import activate

    platform = activate()
    upstream.install("stock")  # as training does
    import torch
    import torch.distributed as dist

    torch.set_float32_matmul_precision("high" if settings.model.precision == "tf32" else "highest")
    if platform.is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platform.default_backend, timeout=datetime.timedelta(seconds=settings.timeout_s))
    try:
        _Run(settings).run()
    except PlannerError as error:
        if dist.get_rank() == 0:
            sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        dist.destroy_process_group()
    return 0


class _Run:
    """State of one rank during the run."""

    def __init__(self, settings: ProfileSettings) -> None:
        import torch
        import torch.distributed as dist

        from .links import Seat

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        per_node = settings.devices_per_node or local_world
        self.settings = dataclasses.replace(settings, devices_per_node=per_node)
        check_settings(self.settings, self.world)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        kind = os.environ.get("HET_DEVICE_KIND") or self.settings.kind_of(self.rank)
        self.seats: list[Any] = self._gather(Seat(self.rank, self.rank // per_node, kind))
        self.memory_bytes = self._gather(_memory_bytes(self.device, local_world))
        self.reserved_bytes = self._gather(_reserved_bytes(self.device))
        self.profile: Profile = self._start()
        self.kind = kind

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def _start(self) -> Profile:
        """The stored profile, with an entry for every kind of this run; rank 0's copy counts."""
        import torch.distributed as dist

        message: list[Any] = [None]
        if self.rank == 0:
            path = Path(self.settings.out)
            try:
                profile = load_profile(path) if path.exists() else Profile(self.settings.model)
                check_same_model(profile, self.settings)
                message[0] = self._with_kinds(profile)
            except PlannerError as error:
                message[0] = error.args[0]
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], str):
            raise PlannerError(self.settings.out, "(file)", None, message[0])
        profile = message[0]
        return dataclasses.replace(profile, complete=False, notes=self.settings.notes or profile.notes)

    def _with_kinds(self, profile: Profile) -> Profile:
        from .layers import has_transformer_engine, on_gpu

        here, devices = has_transformer_engine(), {device.kind: device for device in profile.devices}
        for seat in self.seats:
            own = DeviceProfile(
                kind=seat.kind,
                memory_bytes=self.memory_bytes[seat.rank],
                gpus_per_node=self.settings.devices_per_node,
                reserved_bytes=self.reserved_bytes[seat.rank],
                transformer_engine=here,
            )
            known = devices.setdefault(seat.kind, own).transformer_engine
            # A mean of both layers would be the time of neither.  On a processor they are always Megatron's own.
            if known != here and on_gpu():
                problem = f"this run measures {'Transformer Engine' if here else 'Megatron'}'s layers on {seat.kind}"
                hint = "Choose another --out or remove the file"
                raise PlannerError(self.settings.out, "devices[*].transformer_engine", known, problem, hint)
        return dataclasses.replace(profile, devices=[*devices.values()])

    def run(self) -> None:
        """All points, then searches and links."""
        todo = missing_points(self.settings, self.profile, [s.kind for s in self.seats])
        for number, point in enumerate(todo, 1):
            self._say(f"[{number}/{len(todo)}] {_words(point)}")
            self._measure(point)
        if self.settings.largest_batch_layers:
            self._largest()
        self._host()
        if self.settings.links and self.world > 1:
            self._links()
        self.profile = dataclasses.replace(self.profile, complete=True)
        self._save()

    def _measure(self, point: Point) -> None:
        """Measure one point on all ranks at once and store one timing per kind."""
        import torch.distributed as dist

        from .layers import measure, tensor_parallel_state

        timing: LayerTiming | None = None
        with tensor_parallel_state(point.tp, point.ep):
            try:
                timing = measure(self.settings, point, dist.barrier)
            except RuntimeError as error:
                if "out of memory" not in str(error).lower():
                    raise
        gathered = self._gather((self.kind, timing))
        for kind in sorted({k for k, _ in gathered}):
            mine = [t for k, t in gathered if k == kind]
            if all(t is not None for t in mine):
                means: dict[str, Any] = {name: statistics.fmean(getattr(t, name) for t in mine) for name in TIMES}
                self._store(kind, dataclasses.replace(mine[0], **means))
            else:
                self._say(f"    out of memory on {kind}: left out")
        self._save()

    def _store(self, kind: str, timing: LayerTiming) -> None:
        for device in self.profile.devices:
            if device.kind == kind:
                device.timings[:] = [t for t in device.timings if point_of(t) != point_of(timing)]
                device.timings.append(timing)

    def _largest(self) -> None:
        from .layers import largest_micro_batch, tensor_parallel_state

        layers = self.settings.largest_batch_layers
        for tp, recompute in itertools.product(self.settings.tp, self.settings.recompute):
            self._say(f"largest micro batch with {layers} layers, TP {tp}, recompute {recompute}")
            with tensor_parallel_state(tp):
                size = largest_micro_batch(self.settings, tp, recompute, self.memory_bytes[self.rank])
            gathered = self._gather((self.kind, size))
            for kind in dict(gathered):
                found = min(most for other, most in gathered if other == kind)
                device = self.profile.device(kind)
                if device is not None and found:
                    entry, held = LargestBatch(tp, layers, found, recompute), device.largest_batches  # type: ignore[arg-type]
                    others = [e for e in held if (e.tp, e.layers, e.recompute) != (tp, layers, recompute)]
                    held[:] = [*others, entry]
            self._save()

    def _host(self) -> None:
        from .links import host_bandwidth

        rates = dict(self._gather((self.kind, host_bandwidth(self.device))))
        names = "host_to_device_bytes_per_s", "device_to_host_bytes_per_s"
        measured = [dict(zip(names, rates.get(d.kind) or ())) for d in self.profile.devices]
        devices = [dataclasses.replace(d, **found) for d, found in zip(self.profile.devices, measured, strict=True)]
        self.profile = dataclasses.replace(self.profile, devices=devices)

    def _links(self) -> None:
        from .links import links_to_measure, measure_link

        stored = {(k.scope, k.first_kind, k.second_kind, k.operation, k.participants) for k in self.profile.links}
        for link in links_to_measure(self.seats):
            key = (link.scope, link.first_kind, link.second_kind, link.operation, len(link.ranks))
            if key in stored:
                continue
            self._say(f"link {link.operation} {link.first_kind} - {link.second_kind}, {len(link.ranks)} ranks")
            found = self._gather(measure_link(link, self.settings.link_bytes, self.device))
            self.profile.links.extend(f for f in found if isinstance(f, LinkProfile))
            self._save()

    def _save(self) -> None:
        if self.rank == 0:
            save_profile(self.profile, self.settings.out)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _words(point: Point) -> str:
    return (
        f"{point.layer}: micro batch {point.micro_batch_size}, {point.slice_tokens} tokens, "
        f"TP {point.tp}, recompute {point.recompute}"
        + (f", EP {point.ep}" if point.ep > 1 else "")
        + (", sliding window" if point.windowed else "")
    )


def _memory_bytes(device: Any, local_world: int) -> int:
    """Memory of one device; on a CPU the machine's memory divided by the processes on it."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, local_world)


def _reserved_bytes(device: Any) -> int:
    """Device memory in use before any model exists, as far as this process can see it."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def run(options: argparse.Namespace, model: ProfiledModel) -> Profile | None:
    """Carry out the command.

    Returns:
        The profile; None on the ranks of a running job other than rank 0.

    Raises:
        PlannerError: Bad options, a file of another model, or a worker that failed.
    """
    check_options(options)
    settings = settings_of(options, model)
    if (text := settings.left_out()) and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"warning: {text}\n")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_rank(settings)
    return run_profile(settings, options.processes or device_count(), on_line=show_progress)


def _run_rank(settings: ProfileSettings) -> Profile | None:
    """Be one rank of a job that a launcher started."""
    os.environ["HET_DEVICE_KIND"] = settings.kinds[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(settings.to_json(), encoding="utf-8")
        code = main([str(path)])
    if code:
        raise PlannerError("profile", "rank", int(os.environ["RANK"]), "this rank failed; see its messages")
    return load_profile(settings.out) if os.environ["RANK"] == "0" else None


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    # A failed collective may leave threads behind that would keep the process alive.
    sys.stdout.flush()
    os._exit(code) if code else sys.exit(0)
