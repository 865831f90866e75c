"""The main job on one machine: ``python -m examples.llama.demo`` (or ``make demo``).

Profiles the devices of a small, real mixed cluster (pinned processes), plans, trains a small Llama on
real text through megatron.training, trains the even split beside it, and reports what was predicted
and what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.llama import job as jobs
from examples.llama import page, planning, report
from examples.llama.data import VOCAB_SIZE, DataFiles
from examples.llama.devices import PINNING_VARIABLE, CpuDevice, available_cores, describe, mixed_devices, pinning
from examples.llama.screen import Screen
from megatron_het.plan import ModelShape, TrainingShape, save_plan
from tools.planner.emit.command import emit
from tools.planner.emit.nodes import NodeKind
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.errors import PlannerError
from tools.planner.inputs.profile_schema import Profile, ProfiledModel
from tools.planner.page.html import write_page
from tools.planner.profile.command import WORKER, default_environment, run_profile
from tools.planner.profile.settings import ProfileSettings

# Megatron pads the vocabulary to a multiple of 32 here (--make-vocab-size-divisible-by).
_PADDED_VOCAB = -(-VOCAB_SIZE // 32) * 32


@dataclass(frozen=True, slots=True)
class Size:
    """Model and effort of a run of the demo.

    Attributes:
        model: Shape of the Llama.
        training: Batch; 12 microbatches can be split evenly over 1, 2, 3, 4 and 6 replicas.
        iterations: Iterations of the training.
        short_iterations: Iterations of each run of the comparison.
        rounds: Runs of each plan in the comparison.
        window_s: Seconds per measured figure.
        profiles: At most this many: one more where the machine has changed its speed since the last.
    """

    model: ModelShape
    training: TrainingShape
    iterations: int
    short_iterations: int
    rounds: int
    window_s: float
    profiles: int


FULL = Size(
    ModelShape(9, 256, 8, 4, 256, ffn_hidden_size=704),
    TrainingShape(micro_batch_size=1, global_batch_size=12),
    iterations=60,
    short_iterations=9,
    rounds=2,
    window_s=0.6,
    profiles=2,
)
QUICK = Size(
    ModelShape(6, 64, 4, 2, 64, ffn_hidden_size=128),
    TrainingShape(micro_batch_size=1, global_batch_size=12),
    iterations=6,
    short_iterations=5,
    rounds=1,
    window_s=0.1,
    profiles=1,
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.demo", description="A mixed cluster trains a small Llama on this machine."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (default: runs/demo)")
    parser.add_argument("--iterations", type=int, help="training iterations (default: 60)")
    parser.add_argument("--rounds", type=int, help="short runs of each plan in the comparison (default: 2)")
    parser.add_argument("--max-cores", type=int, default=4, help="use at most this many cores (default: 4)")
    parser.add_argument("--source", type=Path, help="folder of .py files to train on (default: the standard library)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few iterations, to see that it works")
    options = parser.parse_args(argv)
    for name in ("iterations", "rounds", "max_cores"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} = {value}: must be at least 1")
    if options.iterations is not None and options.iterations < report.WARM_UP + 2:
        parser.error(f"--iterations = {options.iterations}: at least {report.WARM_UP + 2} are needed to time one")
    if options.source is not None and not options.source.is_dir():
        parser.error(f"--source = {options.source}: no such folder")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 0 when the report has been written."""
    options = parse(argv)
    size = QUICK if options.quick else FULL
    size = dataclasses.replace(
        size, iterations=options.iterations or size.iterations, rounds=options.rounds or size.rounds
    )
    screen = Screen()
    try:
        Demo(options, size, screen).run()
    except (PlannerError, jobs.JobError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


_WITHIN, _FINALISTS = 0.06, 3  # candidates that are tried out: predicted distance from the best, how many
_STALE = 0.12  # a profile whose predictions are all this far off, in one direction, is of another speed


def is_stale(errors: Sequence[float]) -> bool:
    """Whether predictions are wrong by the machine's speed, and not by their own errors.

    Args:
        errors: Measured over predicted time, less 1, of every candidate that was tried out.
    """
    return min(errors) > _STALE or max(errors) < -_STALE


class Demo:
    """The steps, in order.

    Args:
        options: The command line.
        size: Model and effort.
        screen: Where to show it.
    """

    def __init__(self, options: argparse.Namespace, size: Size, screen: Screen) -> None:
        self.options, self.size, self.screen = options, size, screen
        self.out: Path = options.out.resolve()
        self.started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Everything; returns the report."""
        self.out.mkdir(parents=True, exist_ok=True)
        devices = mixed_devices(available_cores(), self.options.max_cores)
        self.screen.title("The cluster")
        self.screen.line(describe(devices))
        data = self._data()
        trial, even, order = self._plan(devices, data)
        even_order = planning.devices_in_rank_order(even.estimate, devices)
        self._compare(trial, even, order, even_order, data)
        training = self._train(trial, order, data)
        result = report.build(trial, even, training, [d.name for d in order])
        result["elapsed_s"] = time.monotonic() - self.started
        self._finish(result, trial, order)
        return result

    def _data(self) -> DataFiles:
        """Real text as Megatron datasets, made by a process of its own: it needs PyTorch, this one does not."""
        self.screen.title("Data: the Python standard library, one token per byte")
        command = [sys.executable, "-W", "ignore", "-m", "examples.llama.data", "--out", str(self.out / "data")]
        if self.options.source is not None:
            command += ["--source", str(self.options.source)]
        done = subprocess.run(command, env=default_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise jobs.JobError(f"preparing the data failed:\n{done.stderr}")
        data = DataFiles(**json.loads(done.stdout))
        self.screen.line(
            f"{data.documents} files, {data.train_tokens:,} tokens for training and "
            f"{data.validation_tokens:,} for validation"
        )
        return data

    def _profile(self, devices: Sequence[CpuDevice]) -> Profile:
        """Measure layers and links, all devices at the same time as in training."""
        self.screen.title("Profile: real layers on every device, all busy at the same time")
        model = self.size.model
        settings = ProfileSettings(
            model=ProfiledModel(
                model.hidden_size,
                model.ffn_hidden_size or 0,
                model.num_attention_heads,
                model.num_query_groups,
                _PADDED_VOCAB,
                model.seq_length,
                "fp32",
                name="demo",
            ),
            out=str(self.out / "profile.json"),
            kinds=tuple(d.kind for d in devices),
            devices_per_node=1,
            micro_batch_sizes=(self.size.training.micro_batch_size,),
            window_s=self.size.window_s,
            windows=5,
            link_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 23),
            notes=describe(devices),
        )
        # Speeds of an earlier run may have been measured on a busier machine.
        (self.out / "profile.json").unlink(missing_ok=True)
        profile = run_profile(
            settings, len(devices), {PINNING_VARIABLE: pinning(devices)}, ("examples.llama.pinned", *WORKER)
        )
        rows = []
        for device in profile.devices:
            for t in device.timings:
                rows.append(
                    [
                        f"{device.kind} {t.layer}",
                        f"{t.forward_s * 1e3:.2f}",
                        f"{t.backward_s * 1e3:.2f}",
                        f"{t.update_s * 1e3:.2f}",
                        f"{t.activation_bytes / 2**20:.1f}",
                    ]
                )
        self.screen.table(
            "One microbatch",
            ["device and layer", "forward, ms", "backward, ms", "update, ms", "activations, MiB"],
            rows,
        )
        return profile

    def _choose(self, devices: Sequence[CpuDevice], data: DataFiles) -> tuple[planning.Speeds, planning.Estimate]:
        """The fastest plan, and the speeds that it was made from."""
        layers, microbatches = self.size.model.num_layers, self.size.training.num_microbatches
        left = self.size.profiles
        while True:
            speeds = planning.Speeds(self._profile(devices), devices)
            self.screen.title("Plan: layers per stage and microbatches per replica by measured speed")
            ranked = planning.best(devices, speeds, layers, microbatches, _WITHIN)
            finalists = planning.shortlist(ranked, devices, _WITHIN, _FINALISTS)
            winner, errors = self._try_out(finalists, speeds, devices, data)
            left -= 1
            if not is_stale(errors) or not left:
                return speeds, winner
            least = min(errors, key=abs)
            self.screen.line(
                f"all candidates ran at least {abs(least):.0%} {'longer' if least > 0 else 'shorter'} than predicted: "
                "the machine's speed has changed since the profile, so it is made again"
            )

    def _plan(
        self, devices: Sequence[CpuDevice], data: DataFiles
    ) -> tuple[report.Trial, report.Trial, list[CpuDevice]]:
        """Choose the plan, write it with its arguments and scripts, and make the even split beside it."""
        speeds, winner = self._choose(devices, data)
        layers, microbatches = self.size.model.num_layers, self.size.training.num_microbatches
        evens = [planning.estimate(c, speeds) for c in planning.even_splits(devices, layers, microbatches)]
        trials = []
        for name, chosen, note in (
            ("plan.json", winner, "layers and microbatches by measured speed"),
            ("plan-even.json", min(evens, key=lambda e: e.iteration_s), "the best even split"),
        ):
            plan = planning.to_plan(chosen, speeds, self.size.model, self.size.training, note)
            save_plan(plan, self.out / name)
            trials.append(report.Trial(plan, chosen))
        trial, even = trials
        order = planning.devices_in_rank_order(trial.estimate, devices)
        for title, one in (("planned", trial), ("even split", even)):
            self.screen.line(f"{title:>10}: {report.describe(one.plan)}, predicted {one.estimate.iteration_s:.3f} s")
        self._emit(trial, order, data)
        return trial, even, order

    def _try_out(
        self,
        finalists: Sequence[planning.Estimate],
        speeds: planning.Speeds,
        devices: Sequence[CpuDevice],
        data: DataFiles,
    ) -> tuple[planning.Estimate, list[float]]:
        """The fastest of candidates that are predicted to be about equally fast, by a short run of each.

        Returns:
            The fastest, and of each the measured over the predicted time, less 1.
        """
        folder = self.out / "candidates"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier profile
        folder.mkdir()
        count = max(4, self.size.short_iterations - 3)
        measured = []
        for i, one in enumerate(finalists):
            plan = planning.to_plan(one, speeds, self.size.model, self.size.training, "a candidate")
            save_plan(plan, folder / f"plan-{i}.json")
            trial = report.Trial(plan, one)
            order = planning.devices_in_rank_order(one, devices)
            job = self._job(trial, f"candidates/plan-{i}.json", order, data, count, f"candidates/run-{i}")
            with self.screen.training(f"candidate {i + 1}", count) as show:
                trial.runs.append(jobs.run(job, show))
            times = sorted(trial.iteration_times_s(-1))
            measured.append(times[len(times) // 2])
            self.screen.line(
                f"candidate {i + 1}: {report.describe(plan)}, predicted {one.iteration_s:.3f} s, "
                f"measured {measured[-1]:.3f} s"
            )
        errors = [seconds / one.iteration_s - 1 for seconds, one in zip(measured, finalists, strict=True)]
        return finalists[measured.index(min(measured))], errors

    def _emit(self, trial: report.Trial, order: Sequence[CpuDevice], data: DataFiles) -> None:
        """args.sh and the Slurm and torchrun scripts of the same job."""
        job = self._job(trial, "plan.json", order, data, self.size.iterations, "training", evaluate=True)
        kinds = {d.kind: NodeKind(devices=1, constraint=d.kind) for d in order}
        launch = LaunchOptions(
            run_dir=str(self.out.resolve()),
            job_name="het-demo",
            time_limit="00:30:00",
            python=sys.executable,
            cpus_per_task=1,
        )
        header = ["Written by the demo for nodes that behave like this machine's devices, one rank per node."]
        emitted = emit(trial.plan, self.out, kinds, jobs.argument_groups(job), launch, header)
        self.screen.line("written: " + ", ".join(str(p) for p in emitted.files.values()))

    def _job(
        self,
        trial: report.Trial,
        plan_file: str,
        order: Sequence[CpuDevice],
        data: DataFiles,
        iterations: int,
        folder: str,
        evaluate: bool = False,
    ) -> jobs.Job:
        return jobs.Job(
            plan=trial.plan,
            plan_file=self.out / plan_file,
            devices=order,
            data=data,
            iterations=iterations,
            decay_iterations=self.size.iterations,
            folder=self.out / folder,
            evaluate=evaluate,
            trace=True,
        )

    def _compare(
        self,
        trial: report.Trial,
        even: report.Trial,
        order: Sequence[CpuDevice],
        even_order: Sequence[CpuDevice],
        data: DataFiles,
    ) -> None:
        """Short runs of both plans in turn, so that a drift of the machine hits both."""
        self.screen.title("The plan against the even split, in turn")
        count = self.size.short_iterations
        for turn in range(self.size.rounds):
            for name, one, devices in (("plan", trial, order), ("even", even, even_order)):
                folder = f"comparison/{name}-{turn}"
                file = "plan.json" if name == "plan" else "plan-even.json"
                job = self._job(one, file, devices, data, count, folder)
                with self.screen.training(f"{name}, run {turn + 1}", count) as show:
                    one.runs.append(jobs.run(job, show))
                times = one.iteration_times_s(-1)
                self.screen.line(f"{name}, run {turn + 1}: median iteration {sorted(times)[len(times) // 2]:.3f} s")

    def _train(self, trial: report.Trial, order: Sequence[CpuDevice], data: DataFiles) -> list[dict[str, Any]]:
        """The training itself."""
        self.screen.title(f"Training: {self.size.iterations} iterations under the plan")
        count = self.size.iterations
        job = self._job(trial, "plan.json", order, data, count, "training", evaluate=True)
        with self.screen.training("training", count) as show:
            training = jobs.run(job, show)
        trial.runs.append(training)
        return training

    def _finish(self, result: dict[str, Any], trial: report.Trial, order: Sequence[CpuDevice]) -> None:
        """report.json, the page, the pictures and the tables."""
        traces = self.out / "training" / "trace"
        report.save(result, self.out / "report.json")
        write_page(page.demo_page(result, trial, order, traces), self.out / "report.html")
        written = [self.out / "report.json", self.out / "report.html"]
        try:
            from examples.llama import pictures

            pictures.loss_picture(result, self.out / "loss.png")
            written.append(self.out / "loss.png")
            names = [r["device"] for r in result["per_rank"]]
            timeline = self.out / "timeline.png"
            if pictures.timeline_picture(trial.estimate, names, traces, timeline):
                written.append(timeline)
        except ImportError:
            self.screen.line("no pictures: matplotlib is not installed (pip install 'megatron-het[planner]')")
        self.screen.title("Report")
        report.show(result, self.screen)
        self.screen.line("written: " + ", ".join(map(str, written)))
        self.screen.line(f"total time {result['elapsed_s']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
