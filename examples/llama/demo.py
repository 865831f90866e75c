"""The main job on one machine: ``python -m examples.llama.demo`` (or ``make demo``).

Turns this machine into a small mixed cluster of pinned processes, and runs the planner's commands as on any
cluster: profile, plan, emit, and the launch scripts.  The even split runs beside the plan.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.llama import job as jobs
from examples.llama import page, report
from examples.llama.data import VOCAB_SIZE, DataFiles, prepare_apart
from examples.llama.devices import (
    CpuDevice,
    available_cores,
    busy_cores,
    cluster_document,
    describe,
    measured_link,
    paced_devices,
)
from examples.llama.report import Screen
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, load_plan, save_plan
from megatron_het.safe_io import ends_with_its_reader
from megatron_het.store import free_port
from tools.planner import __main__ as planner

# Megatron pads the vocabulary to a multiple of 32 here (--make-vocab-size-divisible-by).
_PADDED_VOCAB = -(-VOCAB_SIZE // 32) * 32
_LR = "3e-3"
_SHARED_GPU_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """Model and effort of a run of the demo."""

    model: ModelShape  # shape of the Llama; 6 layers divide evenly over 1, 2 and 3 stages
    training: TrainingShape  # batch; 12 microbatches divide evenly over 1, 2, 3 and 4 replicas
    iterations: int  # iterations of the training
    short_iterations: int  # iterations of each run of the comparison
    rounds: int  # runs of each plan in the comparison
    window_s: float  # seconds per measured figure


FULL = Size(
    model=ModelShape(6, 256, 8, 4, 256, ffn_hidden_size=704),
    training=TrainingShape(micro_batch_size=1, global_batch_size=12),
    iterations=50,
    short_iterations=9,
    rounds=2,
    window_s=0.5,
)
QUICK = Size(
    model=ModelShape(6, 64, 4, 2, 64, ffn_hidden_size=128),
    training=TrainingShape(micro_batch_size=1, global_batch_size=12),
    iterations=6,
    short_iterations=5,
    rounds=1,
    window_s=0.1,
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.demo", description="A mixed cluster trains a small Llama on this machine."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (default: runs/demo)")
    parser.add_argument("--iterations", type=int, help="training iterations (default: 50)")
    parser.add_argument("--rounds", type=int, help="short runs of each plan in the comparison (default: 2)")
    parser.add_argument("--max-cores", type=int, default=4, help="use at most this many cores (default: 4)")
    parser.add_argument("--source", type=Path, help="folder of .py files to train on (default: the standard library)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few iterations, to see that it works")
    parser.add_argument(
        "--readme", action="store_true", help="write the figures and the picture into README.md; not on a busy machine"
    )
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


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 0 when the report has been written."""
    options = parse(argv)
    size = QUICK if options.quick else FULL
    size = dataclasses.replace(
        size, iterations=options.iterations or size.iterations, rounds=options.rounds or size.rounds
    )
    screen = Screen()
    try:
        result = Demo(options, size, screen).run()
        if options.readme:
            report.publish(result, options.out.resolve(), screen)
    except (jobs.JobError, report.BusyError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


def even_splits(model: ModelShape, training: TrainingShape, kinds: Sequence[str]) -> list[Plan]:
    """Returns the plans that stock Megatron can run on so many devices: equal stages, equal shares of the batch.

    Args:
        model: Its layers are divided over the stages.
        training: Its microbatches are divided over the replicas.
        kinds: Of every rank's device.
    """
    found = []
    for count in range(1, len(kinds) + 1):
        width = len(kinds) // count
        if len(kinds) % count or model.num_layers % count or training.num_microbatches % width:
            continue
        stages = []
        for s in range(count):
            ranks = range(s * width, (s + 1) * width)
            shares = [tuple(range(q, training.num_microbatches, width)) for q in range(width)]
            replicas = (Replica((r,), share, kinds[r]) for r, share in zip(ranks, shares, strict=True))
            stages.append(Stage((model.num_layers // count,), tuple(replicas)))
        found.append(Plan(model=model, training=training, stages=tuple(stages), notes="an even split"))
    return found


class Demo:
    """The steps of the demo, in order.

    Args:
        options: The command line.
        size: Model and effort.
        screen: Where to show it.
    """

    def __init__(self, options: argparse.Namespace, size: Size, screen: Screen) -> None:
        os.environ.setdefault("HET_PLAN_VERIFY", "0")  # 'emit' need not send the demo's own flags through Megatron
        self.size, self.screen = size, screen
        self.out: Path = options.out.resolve()
        self.source: Path | None = options.source
        self.devices = paced_devices(available_cores(), options.max_cores)
        self.gpus = jobs.gpus_here()
        self.inputs = ["--cluster", str(self.out / "cluster.yaml"), "--model", str(self.out / "model.yaml")]

    def run(self) -> dict[str, Any]:
        """Carry out all steps; returns the report."""
        started = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        self.screen.title("The cluster")
        self.screen.line(describe(self.devices))
        others = busy_cores()
        if reason := report.busy_reason(others, len(available_cores())):
            self.screen.line(f"Note: {reason}")
        self.interpreter = jobs.write_interpreter(self.out)
        self.data = self._data()
        self._describe_model()
        self._profile()
        trial, even = self._plan(), self._even_split()
        self._compare(trial, even)
        order, training = self._train(trial)
        result = report.build(trial, even, training, order)
        result |= report.circumstances(result["runs"], others, len(available_cores()), self.devices)
        result["elapsed_s"] = time.monotonic() - started
        self._finish(result, trial)
        return result

    def _planner(self, *words: str, is_shown: bool = True) -> dict[str, Any]:
        """Run a command of the planner, as it would be typed; returns what ``--json`` prints.

        Raises:
            JobError: The command failed.
        """
        if is_shown:
            self.screen.command(["-m", "tools.planner", *words])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = planner.main([*words, "--json"])
        if code:
            raise jobs.JobError(f"'{words[0]}' failed:\n{printed.getvalue()}")
        return dict(json.loads(printed.getvalue()))

    def _data(self) -> DataFiles:
        """Prepare real text as Megatron datasets."""
        self.screen.title("Data: the Python standard library, one token per byte")
        data = prepare_apart(self.out, self.source)
        self.screen.line(
            f"{data.documents} files, {data.train_tokens:,} tokens for training and "
            f"{data.validation_tokens:,} for validation"
        )
        return data

    def _describe_model(self) -> None:
        """Write the model file."""
        model, training = self.size.model, self.size.training
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        document = {"name": "demo", **{name: getattr(model, name) for name in names}}
        document |= {"vocab_size": _PADDED_VOCAB, "seq_length": model.seq_length, "precision": "fp32"}
        document |= {"global_batch_size": training.global_batch_size, "attention": "unfused", "recompute": ["none"]}
        document |= {"micro_batch_sizes": [training.micro_batch_size]}
        (self.out / "model.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def _profile(self) -> None:
        """Measure layers and links, on all devices at the same time as in training; then write the cluster file."""
        self.screen.title("Profile: real layers on every device, and the links between them")
        profile = self.out / "profile.json"
        profile.unlink(missing_ok=True)  # speeds of an earlier run may be of a busier machine
        world = {"WORLD_SIZE": str(len(self.devices)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words = ["-m", "tools.planner", "profile", "--model", str(self.out / "model.yaml"), "--out", str(profile)]
        words += ["--micro-batch-sizes", "1", "--window-s", f"{self.size.window_s:g}"]
        commands = [[str(self.interpreter), *words, "--kind", device.kind] for device in self.devices]
        self.screen.command(commands[0][1:])
        self.screen.line(f"  the same with --kind of its own on each of the {len(self.devices)} devices")
        own = [{**world, "RANK": str(i), **e} for i, e in enumerate(self._environments(self.devices))]
        jobs.start(commands, own, self.out / "logs-profile", timeout_s=600.0)
        report.show_profile(json.loads(profile.read_text(encoding="utf-8")), self.screen)
        rate, latency_s = measured_link(profile)
        memory_bytes = _SHARED_GPU_BYTES if self.gpus else 1 << 30
        document = cluster_document(self.devices, rate, latency_s, memory_bytes, is_cpu=not self.gpus)
        (self.out / "cluster.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def _environments(self, devices: Sequence[CpuDevice]) -> list[dict[str, str]]:
        return jobs.environments(devices, self.gpus)

    def _plan(self) -> report.Trial:
        """Let the planner choose the plan."""
        self.screen.title("Plan: which device gets which layers and microbatches")
        file, profile = self.out / "plan.json", str(self.out / "profile.json")
        self._planner("plan", *self.inputs, "--profile", profile, "--out", str(file), "--no-verify", "--limit-s", "60")
        return self._trial(file, "planned")

    def _even_split(self) -> report.Trial:
        """Choose the faster one of the even splits, by the planner's simulation."""
        files = []
        for i, plan in enumerate(even_splits(self.size.model, self.size.training, [d.kind for d in self.devices])):
            files.append(self.out / f"plan-even-{i}.json")
            save_plan(plan, files[-1])
        trials = [self._trial(file, "even split") for file in files]
        best = min(trials, key=lambda trial: trial.predicted_s)
        save_plan(best.plan, self.out / "plan-even.json")
        return best

    def _trial(self, file: Path, name: str) -> report.Trial:
        """Simulate a plan file with its own routing."""
        words = ["simulate", str(file), *self.inputs, "--profile", str(self.out / "profile.json")]
        found = self._planner(*words, "--trace", str(file.with_suffix(".trace.json")), is_shown=False)
        plan = load_plan(file)
        trial = report.Trial(plan, file, found["iteration_s"], found["bubble_fraction"])
        self.screen.line(f"{name:>10}: {report.describe(plan)}, predicted {trial.predicted_s:.3f} s")
        return trial

    def _launch(
        self, trial: report.Trial, folder: str, iterations: int, name: str, evaluate: bool = False
    ) -> tuple[list[CpuDevice], list[dict[str, Any]]]:
        """Emit a plan's launch files and start them.

        Returns:
            The device of every rank, and the ranks' reports.
        """
        run = self.out / folder
        shutil.rmtree(run, ignore_errors=True)  # else the scripts would resume from its checkpoint
        extra = [*self.data.arguments, "--data-cache-path", str(self.out / "data" / "cache")]
        extra += [*jobs.machine_arguments(bool(self.gpus)), "--init-method-std", "0.02", "--seed", "1234"]
        extra += ["--lr-warmup-fraction", "0.1", "--log-interval", "1", "--eval-interval", str(iterations)]
        extra += ["--eval-iters", "4" if evaluate else "0"]
        extra += ["--het-report", str(run / "ranks"), "--het-trace", str(run / "trace")]
        words = ["emit", str(trial.file), *self.inputs, "--out", str(run), "--python", str(self.interpreter)]
        words += ["--train-iters", str(iterations), "--lr", _LR, "--job-name", "het-demo", "--extra", shlex.join(extra)]
        nodes = self._planner(*words, is_shown=evaluate)["nodes"]
        left = list(self.devices)
        by_node, by_rank = [], dict[int, CpuDevice]()
        for node in nodes:
            device = next(d for d in left if d.kind == node["kind"])
            left.remove(device)
            by_node.append(device)
            by_rank |= dict.fromkeys(node["ranks"], device)
        if evaluate:
            self.screen.line(f"$ bash {folder}/torchrun-node-N.sh   for each of the {len(nodes)} nodes")
        with self.screen.training(name, iterations) as show:
            reports = jobs.train(run, self._environments(by_node), on_loss=show)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        return [by_rank[rank] for rank in sorted(by_rank)], reports

    def _compare(self, trial: report.Trial, even: report.Trial) -> None:
        """Run both plans in turn, so that a drift of the machine hits both."""
        self.screen.title("The plan against the even split, in turn")
        count = self.size.short_iterations
        for turn in range(self.size.rounds):
            for name, one in (("plan", trial), ("even", even)):
                label = f"{name}, run {turn + 1}"
                one.runs.append(self._launch(one, f"comparison/{name}-{turn}", count, label)[1])
                times = sorted(one.iteration_times_s(-1))
                self.screen.line(f"{label}: median iteration {times[len(times) // 2]:.3f} s")

    def _train(self, trial: report.Trial) -> tuple[list[str], list[dict[str, Any]]]:
        """Train under the plan."""
        self.screen.title(f"Training: {self.size.iterations} iterations under the plan")
        order, training = self._launch(trial, "run", self.size.iterations, "training", evaluate=True)
        trial.runs.append(training)
        return [device.name for device in order], training

    def _finish(self, result: dict[str, Any], trial: report.Trial) -> None:
        """Write report.json, the page and the pictures, and show the tables."""
        traces = [self.out / "run" / "trace" / f"trace-rank-{r['rank']}.json" for r in result["per_rank"]]
        report.save(result, self.out / "report.json")
        words = [str(trial.file), *self.inputs, "--profile", str(self.out / "profile.json")]
        page.write(words, result, traces, self.out / "report.html")
        written = [self.out / "report.json", self.out / "report.html"]
        try:
            page.loss_picture(result, self.out / "loss.png")
            written.append(self.out / "loss.png")
            names, predicted = [r["device"] for r in result["per_rank"]], trial.file.with_suffix(".trace.json")
            if page.timeline_picture(names, predicted, traces, self.out / "timeline.png"):
                written.append(self.out / "timeline.png")
        except ImportError:
            self.screen.line("no pictures: matplotlib is not installed (pip install 'megatron-het[planner]')")
        self.screen.title("Report")
        report.show(result, self.screen)
        self.screen.line("written: " + ", ".join(map(str, written)))
        self.screen.line(f"total time {result['elapsed_s']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
