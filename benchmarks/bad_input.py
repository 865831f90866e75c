"""A thousand and more malformed inputs: ``python -m benchmarks.bad_input --seed S --json OUT``.

Every case starts a command (the planner's, the schedule tool's, or the beginning of a training start) in a
folder of its own with one defect in its input.  The correct result is one clear error in time.  Counts that must be 0:
tracebacks, commands that take longer than 5 s of CPU time or 20 s of wall time on an idle machine
(``hang``), invalid input that is accepted, commands in the input that a shell executed, and files that were changed or
created in the wrong place.  Cases run in processes forked from one that has imported everything, because imports
take seconds.
"""

import collections
import contextlib
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import random
import resource
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.bad_input_cases import MARK, PLAN, Case, _start, document_text, good_files, mutated, random_numbers
from benchmarks.bad_input_listed import ONCE_WRONG, in_order, listed
from benchmarks.machine import add_part_argument, command_line, part_of, write_report
from megatron_het.checkpoint import choice
from megatron_het.doctor.flags import main as check_flags
from megatron_het.plan import PlanError
from testing import rank_server
from testing.forked import Forked
from tools.planner.emit import options as checks

_MANY = 5000


def many_replicas() -> str:
    """A plan whose first stage has a replica for each of many microbatches."""
    replicas = [{"ranks": [i], "microbatches": [i], "device": "A100-40", "speed": 1.0} for i in range(_MANY)]
    last = {**PLAN["stages"][1]["replicas"][0], "ranks": [_MANY], "microbatches": list(range(_MANY))}
    stages = [{"layers": [3], "replicas": replicas}, {"layers": [1], "replicas": [last]}]
    training = {**PLAN["training"], "global_batch_size": _MANY}
    return document_text(
        {**{k: v for k, v in PLAN.items() if k != "predicted"}, "training": training, "stages": stages}
    )


def reported() -> Iterator[Case]:
    """At least one case of every kind of malformed input that once caused a defect; all are in every test run."""
    yield Case("thousands of replicas", _start()[0], _start()[1], {"plan.json": many_replicas()}, wrong=False)
    yield Case("a plan given twice", "start", ("--het-plan", "plan.json", "--het-plan", "sliced.json"))
    cases = in_order()
    yield from (case for case in cases if case.kind in ONCE_WRONG["by_every_command"])
    last = {case.kind: case for case in cases}
    yield from (last[kind] for kind in ONCE_WRONG["by_one"])


CPU_S, CLOCK_S = 5.0, 20.0
_SAVE_S = 120.0
KEYS = ("clear", "accepted", "unclear", "traceback", "hang", "accepted_wrong", "executed", "written")
_OUTPUTS = ("out.json", "plan.json.x", "run", "target", "t.svg")
_MODULES = (
    *("yaml", "rich.table", "rich.console", "matplotlib.figure"),
    *("megatron_het.arguments.flags", "megatron_het.lowering.programs", "megatron_het.schedule.view.cli"),
    *("megatron_het.elastic.controller", "megatron_het.doctor.__main__", "tools.planner.cli.commands"),
    *("tools.planner.emit.command", "tools.planner.replay.command", "tools.planner.replay.replan"),
    *("tools.planner.profile.settings", "tools.planner.search.papers"),
    "tools.planner.costs.simulation",
)
_STUBS = {
    "python": '#!/bin/bash\n[[ " $* " == *" --no-python "* ]] && RANK=0 exec bash -c as_rank\nexit 0\n',
    "srun": "#!/bin/bash\nSLURM_NTASKS=$WORLD_SIZE SLURM_PROCID=0 SLURM_LOCALID=0 exec bash -c as_task\n",
    "scontrol": "#!/bin/bash\necho n1\n",
}


@dataclass
class Answer:
    """The outcome of a case."""

    verdict: str
    seconds: float
    code: int
    text: str
    case: Case = field(repr=False)


_MAINS = {
    "planner": "tools.planner.__main__",
    "schedule": "megatron_het.schedule.view.cli",
    "job": "megatron_het.elastic.__main__",
}


def _run_tool(case: Case) -> int:
    """Run the command in this process."""
    words = list(case.words)
    if case.tool in _MAINS:
        return int(importlib.import_module(_MAINS[case.tool]).main(words))
    run, refusals = _BEGINNINGS[case.tool]
    try:
        run(words)
    except refusals as error:
        sys.stderr.write(f"{'megatron_het' if case.tool == 'start' else 'error'}: {error}\n")
        return 2
    return 0


def _doctor(words: list[str]) -> None:
    """Read the inputs of the doctor's rank 0, up to the rendezvous."""
    from megatron_het.doctor.__main__ import parse, read_inputs

    read_inputs(parse(words), world_size=3)


def _begin(words: list[str]) -> None:
    """Check flags and plan as the start of a training does before it imports Megatron."""
    from megatron_het.arguments.flags import split_arguments
    from megatron_het.lowering.programs import build

    config, _ = split_arguments(words)
    if config.plan is not None:
        build(config.plan)
    if config.report_dir is not None:
        from megatron_het.arguments.hooks import check_outputs

        check_outputs(config)


def _choose_checkpoint(words: list[str]) -> None:
    """Choose the checkpoint in a folder as the start of a training does."""

    def agree(candidate: choice.Candidate) -> list[str]:
        if not (found := choice.problems(candidate.folder)):
            choice.common_state(candidate.folder)
        return found

    given = {"load": words[0], "non_persistent_ckpt_type": None, "exit_on_missing_checkpoint": True}
    choice.choose(SimpleNamespace(**given), agree)


_BEGINNINGS: dict[str, tuple[Callable[[list[str]], None], tuple[type[Exception], ...]]] = {
    "doctor": (_doctor, (PlanError, ValueError, OSError, ImportError)),
    "start": (_begin, (PlanError,)),
    "checkpoint": (_choose_checkpoint, (choice.CheckpointError, choice.UnreadableError)),
}
"""The function that runs each tool, and the error with which the tool refuses input."""


@functools.cache
def saved_checkpoint() -> dict[str, bytes]:
    """A small checkpoint in torch's format, by name of the file; a process of its own saves it, with threads."""
    with tempfile.TemporaryDirectory() as base:
        saved, log = Path(base) / "saved", Path(base) / "log"
        process = Forked(functools.partial(_save_checkpoint, saved), log)
        if not process.finish(_SAVE_S) or process.returncode:
            raise RuntimeError(f"the checkpoint was not saved: {log.read_text(errors='replace')[-400:]}")
        files = [file for file in saved.rglob("*") if file.is_file()]
        return {str(file.relative_to(base)): file.read_bytes() for file in files}


def _save_checkpoint(saved: Path) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = saved / "iter_0000004"
    folder.mkdir(parents=True)
    save({"weight": torch.arange(64.0)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({"iteration": 4}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    choice.write_checksums(folder, 0)
    (saved / choice.TRACKER).write_text("4")


def _parse_here(command: Sequence[str], *, env: Mapping[str, str], **_unused: Any) -> subprocess.CompletedProcess[str]:
    """Ask Megatron's parser in this process, which has imported it, instead of in one that would import it first."""
    said = io.StringIO()
    os.environ.clear()
    os.environ.update(env)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        check_flags(tuple(command[command.index("-m") + 2 :]))
    return subprocess.CompletedProcess(command, 0, said.getvalue())


def _run_limited(case: Case, folder: Path) -> int:
    """Run the case in a folder, with bounds on time and memory."""
    gc.freeze()  # or collections would copy what the parent holds, in the case's CPU time
    os.chdir(folder)
    checks.subprocess = SimpleNamespace(run=_parse_here, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return _run_tool(case)


def _snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Kind, size and contents of everything in a folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            digest = ""
            if stat.S_ISREG(status.st_mode):
                digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                digest = os.readlink(path)
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            found[os.path.relpath(path, folder)] = (kind, size, digest)
    return found


def _misplaced(case: Case, code: int, before: dict[str, tuple[int, int, str]], folder: Path) -> str:
    """Returns the files that the case changed against the rules; empty if there are none."""
    after = _snapshot(folder)
    for name, entry in before.items():
        if after.get(name) != entry:
            return f"{name} was changed"
    new = sorted(set(after) - set(before) - {MARK})
    if code and new:
        return f"{new[0]} was made although the command failed"
    outs = {w for w in case.words if case.words[case.words.index(w) - 1] in ("--out", "--trace", "--picture", "--json")}
    for name in new:
        if name.split("/")[0] not in {*_OUTPUTS, *(o.split("/")[0] for o in outs)} or name.endswith(".tmp"):
            return f"{name} was made"
    for out in outs:
        if out.startswith(("/dev/", "/sys/")) and os.path.lexists(out):
            return f"{out} was made"
    return ""


def _executed(folder: Path, out: str, stubs: Path) -> str:
    """Run the written scripts; returns which one is invalid, or executed text of the input."""
    mark = folder / MARK
    scripts = [*(folder / out).glob("*.sh"), *(folder / out).glob("*.sbatch")]
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "MARK_FOLDER": str(folder), "HOME": str(folder)}
    environment |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_0"), "n1")
    environment |= {"SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1"}
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False, timeout=10)
        if done.returncode:
            return f"{script.name} is no valid script: {done.stderr[-200:]}"
        for line in script.read_text().splitlines():
            words = shlex.split(line)[1:] if line.startswith("#SBATCH") else []
            if any(not w.startswith("--") for w in words) and words != ["hetjob"]:
                return f"{script.name} has a broken line: {line[:200]}"
        for unset in ((), ("MASTER_ADDR",)):
            given = {k: v for k, v in environment.items() if k not in unset}
            command = ["bash", str(script)] if script.name != "args.sh" else ["bash", "-c", 'source "$0"', str(script)]
            subprocess.run(command, env=given, cwd=folder, capture_output=True, check=False, timeout=10)
            if mark.exists():
                return f"{script.name} executed a command of the input"
    return ""


def run_case(case: Case, stubs: Path) -> Answer:
    """Run one case in a folder of its own."""
    base = Path(tempfile.mkdtemp(prefix="bad-input-"))
    folder, log = base / "work", base / "log"
    folder.mkdir()
    os.environ["MARK_FOLDER"] = str(folder)
    try:
        saved = saved_checkpoint() if case.tool == "checkpoint" else {}
        for name, content in {**good_files(), **saved, **case.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                here = os.getcwd()
                os.chdir(folder)
                content(Path(name))
                os.chdir(here)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(content, encoding="utf-8", errors="surrogatepass")
        before = _snapshot(folder)
        process = Forked(functools.partial(_run_limited, case, folder), log)
        ended = process.finish(CLOCK_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))
        code, seconds = process.returncode or 0, process.cpu_s
        text = log.read_text(errors="replace")
        verdict, why = _judge(case, code, seconds, ended, text)
        misplaced = _misplaced(case, code, before, folder)
        if misplaced:
            verdict, why = "written", misplaced
        if case.scripts and code == 0 and (problem := _executed(folder, _out_of(case), stubs)):
            verdict, why = "executed", problem
        if (folder / MARK).exists():
            verdict, why = "executed", why or "a command of the input was executed"
        return Answer(verdict, seconds, code, (why + " | " if why else "") + text[-400:], case)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _out_of(case: Case) -> str:
    return case.words[len(case.words) - 1 - case.words[::-1].index("--out") + 1]


def _judge(case: Case, code: int, seconds: float, ended: bool, text: str) -> tuple[str, str]:
    if not ended or seconds > CPU_S:
        return "hang", f"{seconds:.1f} s of CPU time"
    if "Traceback (most recent call last)" in text or code not in (0, 1, 2):
        return "traceback", ""
    if code == 0:
        return ("accepted_wrong", "") if case.wrong else ("accepted", "")
    named = any(word in text for word in ("error:", "megatron_het:", "het-run:", "Problems", "usage:"))
    return ("clear", "") if named and len(text) < 20_000 else ("unclear", f"{len(text)} characters")


def run(cases: Sequence[Case], show: bool = False) -> list[Answer]:
    """Run all cases, one after the other."""
    asks_parser = os.environ.get("HET_PLAN_VERIFY") != "0"
    _import_everything(with_megatron=asks_parser or any(case.tool == "checkpoint" for case in cases))
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder)
        for name, text in _STUBS.items():
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        for case in cases:
            answers.append(run_case(case, stubs))
            if show and answers[-1].verdict not in ("clear", "accepted"):
                last = answers[-1]
                print(
                    f"{last.verdict}: {case.kind}: {shlex.join(case.words)[:160]}\n    {last.text[-700:]}", flush=True
                )
    return answers


def _import_everything(*, with_megatron: bool) -> None:
    """Import the modules that commands import late, so that forked processes have them."""
    if with_megatron:
        rank_server.import_everything()
    for module in _MODULES:
        importlib.import_module(module)


def cases_of(seed: int, count: int) -> list[Case]:
    """Returns all listed cases, and mutations up to ``count``."""
    rng = random.Random(seed)
    fixed = listed(rng)
    left = max(0, count - len(fixed))
    return [*fixed, *mutated(rng, left - left // 5), *random_numbers(rng, left // 5)]


def report_of(answers: Sequence[Answer], seed: int, of: int, part: str, earlier: Sequence[Path]) -> dict[str, Any]:
    """Returns the counts of a run, with those of earlier runs of other parts added.

    Raises:
        SystemExit: An earlier run has another seed or number of cases, or cases that are counted already.
    """
    counts = collections.Counter(answer.verdict for answer in answers)
    longest_s = max(answer.seconds for answer in answers)
    parts, cases = [part], len(answers)
    for file in earlier:
        found = json.loads(file.read_text(encoding="utf-8"))
        if (found["seed"], found["of"]) != (seed, of):
            raise SystemExit(f"--add {file}: {found['of']} cases of seed {found['seed']}; this run: {of} of {seed}")
        for other in found["parts"]:
            if other in parts or part_of(other)[1] != part_of(part)[1]:
                raise SystemExit(f"--add {file}: part {other} has cases that are in part {', '.join(parts)} too")
            parts.append(other)
        cases += found["cases"]
        counts.update({key: found[key] for key in KEYS})
        longest_s = max(longest_s, found["longest_s"])
    report = {"benchmark": "bad_input", "seed": seed, "cases": cases, "of": of, "parts": sorted(parts, key=part_of)}
    return report | {key: counts[key] for key in KEYS} | {"longest_s": round(longest_s, 2)}


def main() -> int:
    """Command line; exit code 1 unless all counts but those of clear answers are 0."""
    parser = command_line("benchmarks.bad_input", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default %(default)s)")
    parser.add_argument("--count", type=int, default=1700, help="cases in all (default %(default)s)")
    add_part_argument(parser)
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="JSON", help="results of other parts, to be counted too"
    )
    options = parser.parse_args()
    cases, (index, parts) = cases_of(options.seed, options.count), options.part
    answers = run(cases[index - 1 :: parts], show=True)
    report = report_of(answers, options.seed, len(cases), f"{index}/{parts}", options.add)
    write_report(options.json, report, unprinted=())
    return 1 if any(report[key] for key in KEYS[2:]) else 0


if __name__ == "__main__":
    sys.exit(main())
