"""``het-run``: elastic training from the command line."""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_het.elastic.job import Board, ServedBoard, signature_of
from megatron_het.elastic.pool import GivenPlans, Planner
from megatron_het.elastic.searched import Search, SearchedPlans
from megatron_het.elastic.worth import describe
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, PlanError, load_plan
from megatron_het.safe_io import FileError, LineParser, count, ends_with_its_reader, shown, split_words, write_text
from megatron_het.store.job import address, token_of_file

_LONGEST_S = 86400.0
_LINGER_S = 3.0  # for agents to read how the job ended; they end after their workers
_LONGEST_NAME = 200
_HERE = "127.0.0.1:29400"
COMMANDS = {
    "status": "what a job does, and who takes part",
    "leave": "take a node out of a job",
    "replan": "ask for another plan",
}
"""Commands for a running job."""


class UsageError(ValueError):
    """A command line that cannot work; the message has the remedy."""


@ends_with_its_reader
def main(words: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 done, 1 the job failed, 2 bad input."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        if words[:1] and words[0] in COMMANDS:
            return _ask(words)
        return _run(words)
    except (UsageError, PlanError, FileError, ImportError) as error:
        sys.stderr.write(f"het-run: {error}\n")
        return 2
    except RuntimeError as error:
        sys.stderr.write(f"het-run: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def parser_of(command: str = "") -> argparse.ArgumentParser:
    """Returns the parser of ``het-run``, or of one of its ``COMMANDS``."""
    if command:
        text = COMMANDS[command]
        parser = LineParser(prog=f"het-run {command}", description=f"{text[0].upper()}{text[1:]}.")
        _connection(parser)
        if command == "leave":
            parser.add_argument("node", help="name of the node to remove")
        if command == "status":
            parser.add_argument("--json", action="store_true", help="the controller's whole state, as JSON")
        return parser
    parser = LineParser(
        prog="het-run",
        description="Elastic training: start it with the same command on every node, on one of them with "
        "--start-controller. Commands for a job that runs: het-run status, het-run leave NODE, het-run replan "
        "(each with --controller and --token-file).",
        usage="het-run --controller HOST:PORT --token-file FILE [options] -- FLAGS OF pretrain_gpt.py",
    )
    _connection(parser)
    parser.add_argument("--node", default=socket.gethostname(), help="name of this node (default: its host name)")
    parser.add_argument("--device", default="", help="kind of the node's GPUs, by its name in plans and cluster file; "
                        "for several kinds each with its count, like 'A100-40*4,V100-16*4'")  # fmt: skip
    parser.add_argument("--workers", type=count(0, 4096), default=0, help="workers of this node (default: its GPUs, "
                        "or 1)")  # fmt: skip
    parser.add_argument("--restarts", type=count(0, 10**6), default=3, metavar="N", help="new workers that a device "
                        "gets after workers were killed by a signal (default 3)")  # fmt: skip
    parser.add_argument("--copy-every", type=_pace, default=None, metavar="K", help="iterations between copies "
                        "of the state into the memory of another node; 0: none, auto: the fewest iterations with which "
                        "copies take at most 3 %% of the time (default auto)")  # fmt: skip
    parser.add_argument("--timeout-s", type=float, default=60.0, help="bound on every wait of a change (default 60)")
    parser.add_argument("--away-s", type=float, default=1800.0, help="how long a worker that needs a decision waits "
                        "for an absent controller; training continues without one (default 1800)")  # fmt: skip
    own = parser.add_argument_group("controller")
    own.add_argument("--start-controller", action="store_true", help="this node runs the controller as well")
    own.add_argument("--controller-only", action="store_true", help="this command is the controller, without workers")
    own.add_argument("--nodes", type=count(1, 10**6), default=1, help="nodes to wait for at the start (default 1)")
    own.add_argument("--start-s", type=float, default=600.0, help="time for --nodes nodes to join (default 600)")
    own.add_argument("--plans", nargs="+", type=Path, default=[], metavar="FILE", help="plans, the best one first")
    own.add_argument("--cluster", type=Path, help="cluster file, to search plans for pools that "
                     "none of --plans fits")  # fmt: skip
    own.add_argument("--model", type=Path, help="model file, with --cluster")
    own.add_argument("--profile", type=Path, help="measured profile, with --cluster")
    own.add_argument("--plan-limit-s", type=float, default=60.0, help="bound on a search (default 60)")
    own.add_argument("--lost-s", type=float, default=30.0, help="a worker without a heartbeat is lost (default 30)")
    own.add_argument("--leave-s", type=float, default=30.0, help="time for survivors to leave a session (default 30)")
    own.add_argument("--return-s", type=float, default=60.0, help="time for lost workers to return, if no plan works "
                     "without them (default 60)")  # fmt: skip
    own.add_argument("--stuck-s", type=float, default=1800.0, help="if no iteration ends in this time, all ranks leave "
                     "their session, and ranks that do not are killed; must exceed the time of a save or evaluation "
                     "(default 1800)")  # fmt: skip
    own.add_argument("--save-fallback", type=Path, metavar="FOLDER", help="shared folder for checkpoints that cannot "
                     "be written into --save")  # fmt: skip
    own.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate of the controller (PEM): connections "
                     "are encrypted")  # fmt: skip
    own.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (default: in the same file)")
    return parser


def _pace(text: str) -> int | None:
    """Parses the number of iterations between copies; None for ``auto``."""
    return None if text == "auto" else count(0, 10**9, "auto or ")(text)


def _connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--controller", default=_HERE, metavar="HOST:PORT", help="the only address on which the "
                        "controller listens (default %(default)s: for this machine only)")  # fmt: skip
    parser.add_argument("--token-file", type=Path, help="file with the job's token; --start-controller writes it "
                        "if it does not exist (default FOLDER/token)")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="for logs and state (default ./elastic)")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="file into which the controller writes "
                        "HOST:PORT; agents read it before --controller (default FOLDER/address)")  # fmt: skip
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificate authority, or the certificate itself, "
                        "that verifies the controller's certificate (PEM)")  # fmt: skip


def _run(words: Sequence[str]) -> int:
    own, given = split_words(words)
    if own and not own[0].startswith("-"):
        raise UsageError(f"{shown(own[0])} is no command; {', '.join(COMMANDS)} are")
    flags = given or []
    parser = parser_of()
    options = parser.parse_args(own)
    host, port = _address(options.controller)
    if options.start_controller and options.controller_only:
        raise UsageError("--start-controller runs workers here, and --controller-only none: give one of them")
    controls = options.start_controller or options.controller_only
    _check_options(options)
    if not options.controller_only:
        _check_flags(flags)
    if controls:  # before a folder and a token are created
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            problem = f"cannot be listened on: {error}. Give a name or an address of this machine"
            raise UsageError(f"--controller {shown(host)} {problem}") from None
    planner = _planner(options) if controls else None
    token = _token(options.token_file or options.folder / "token", create=controls)
    if options.controller_only:
        assert planner is not None
        return _control(options, host, port, token, planner)
    group = next(group for group in parser._action_groups if group.title == "controller")
    idle = [a.option_strings[0] for a in group._group_actions if getattr(options, a.dest) != a.default]
    if idle and not controls:
        _say(f"{', '.join(idle)}: without effect here, give them to the node with --start-controller")
    helper = None
    if options.start_controller:
        if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the agent handles it
        command = [sys.executable, "-m", "megatron_het.elastic", *own, "--controller-only"]
        helper = subprocess.Popen([word for word in command if not word.startswith("--start-c")])
    try:
        return _serve_node(options, host, port, token, flags, helper)
    except SystemExit:  # the node has not begun, and the controller would wait for it with port and folder
        if helper is not None:
            helper.terminate()
        raise
    finally:
        if helper is not None:
            try:
                helper.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                helper.terminate()


def _control(options: Any, host: str, port: int, token: str, planner: Planner) -> int:
    from megatron_het.elastic.controller import Controller
    from megatron_het.elastic.members import Bounds, FolderLock, JobError

    options.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(options.folder)
    board = None
    try:
        board = ServedBoard(host, port, token, options.tls_cert, options.tls_key)
        bounds = Bounds(options.lost_s, options.leave_s, options.start_s, options.return_s, options.stuck_s)
        state, fallback = options.folder / "state.json", options.save_fallback
        controller = Controller(
            board=board,
            planner=planner,
            state=state,
            nodes=options.nodes,
            bounds=bounds,
            say=_say,
            is_replaced=lambda: lock.is_lost,
            fallback="" if fallback is None else str(fallback.absolute()),
        )
        try:
            write_text(_address_file(options), f"{host}:{port}\n")
        except (OSError, ValueError) as error:
            _say(f"{error}; workers look for the controller where --controller says")
        _say(f"the controller listens on {host}:{port}")
        controller.run()
        time.sleep(_LINGER_S)
    except JobError as error:
        _say(str(error))
        time.sleep(_LINGER_S)
        return 1
    finally:
        lock.release()
        if board is not None:
            board.close()
    return 0


def _address_file(options: Any) -> Path:
    return Path(options.address_file or options.folder / "address").absolute()


def _serve_node(
    options: Any, host: str, port: int, token: str, flags: list[str], helper: subprocess.Popen[bytes] | None
) -> int:
    import torch

    from megatron_het.elastic.agent import Agent, Node
    from megatron_het.elastic.worker import Setting

    workers = options.workers or max(1, torch.cuda.device_count())
    setting = Setting(
        host=host,
        port=port,
        token=token,
        process=0,
        node=options.node,
        device=options.device,
        folder="",
        copy_every=options.copy_every,
        timeout_s=options.timeout_s,
        signature=signature_of(flags),
        workers=workers,
        address_file=str(_address_file(options)),
        tls_ca="" if options.tls_ca is None else str(options.tls_ca.absolute()),
        away_s=options.away_s,
    )
    folder = options.folder / f"node-{options.node}"
    return Agent(Node(setting, workers, folder, tuple(flags), options.restarts), _say, helper).run()


def _ask(words: Sequence[str]) -> int:
    options = parser_of(words[0]).parse_args(list(words[1:]))
    host, port = _address(options.controller)
    token = _token(options.token_file or options.folder / "token", create=False)
    file, authority = _address_file(options), options.tls_ca
    board = Board(host, port, token, patience_s=5.0, address_file=file, tls_ca=authority)
    status = board.get("status")
    if words[0] == "status":
        sys.stdout.write(json.dumps(status, indent=1) + "\n" if options.json else describe(status))
        return 0
    if words[0] == "leave":
        nodes = sorted({member["node"] for member in (status or {}).get("members", [])})
        if options.node not in nodes:
            raise UsageError(f"no node of the job is called {options.node!r}; its nodes are {', '.join(nodes)}")
        board.post({"type": "leave", "node": options.node})
        sys.stdout.write(f"node {options.node} is asked to leave; het-run status lists it until it has gone\n")
    else:
        board.post({"type": "replan"})
        sys.stdout.write("another plan is asked for; het-run status and the controller say what comes of it\n")
    return 0


def _address(text: str) -> tuple[str, int]:
    found = address(text)
    if found is None:
        raise UsageError(f"--controller {shown(text)} is not HOST:PORT; for one machine take 127.0.0.1:29400")
    return found


def _check_flags(flags: Sequence[str]) -> None:
    if not flags:
        raise UsageError("no flags of the training: give those of pretrain_gpt.py after --")
    for word in flags:
        if word == "--use-precision-aware-optimizer":
            raise UsageError(f"{word}: its main parameters are where a change of plan cannot move them; leave it out")
        if word == "--het-measured-cp-shares":
            raise UsageError(f"{word}: ranks that join later could not measure; write cp_shares into the plans")
        if word.split("=")[0] in ("--het-plan", "--het-auto-batch"):
            raise UsageError(f"{word}: the plan comes from the controller; give it --plans or --cluster instead")


def _check_options(options: Any) -> None:
    for name in ("timeout_s", "away_s", "lost_s", "leave_s", "start_s", "return_s", "stuck_s", "plan_limit_s"):
        if not 0 < getattr(options, name) <= _LONGEST_S:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(options, name)} is not above 0 and at most {_LONGEST_S:g} seconds"
            )
    if not options.node.strip() or not options.node.isprintable() or "/" in options.node:
        raise UsageError(f"--node {shown(options.node)} is no name of a node; a folder is named after it")
    if len(options.node.encode()) > _LONGEST_NAME:
        raise UsageError(f"--node {shown(options.node)} is longer than {_LONGEST_NAME} bytes, and names a folder")
    if not options.device.isprintable():
        raise UsageError(f"--device {shown(options.device)} is no kind of GPU")
    if options.folder.exists() and not options.folder.is_dir():
        raise UsageError(f"--folder {options.folder} is no folder; logs and state are written into it")


def _token(file: Path, *, create: bool) -> str:
    try:
        return token_of_file(file, create=create)
    except ValueError as error:
        hint = "" if file.exists() else ". Give --token-file or --folder of the job"
        raise UsageError(f"--token-file {error}{hint}") from None


def _planner(options: Any) -> Planner:
    plans = [load_plan(file) for file in options.plans]
    _check_plans(options.plans, plans)
    if plans and not (options.cluster or options.model or options.profile):
        return GivenPlans(plans)
    if options.cluster is None or options.model is None:
        raise UsageError("the controller needs --plans, or --cluster and --model (and --profile) to search, or both")
    search = Search(options.cluster, options.model, options.profile, options.folder, options.plan_limit_s)
    try:
        searched = SearchedPlans(options.cluster, search, _say)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return GivenPlans(plans, searched) if plans else searched


def _check_plans(files: Sequence[Path], plans: Sequence[Plan]) -> None:
    """Check that every plan is valid, and that all plans have the same model, batch and numerics."""
    for file, plan in zip(files, plans, strict=True):
        check_plan_alone(plan)
        for name, mine, first in (
            ("model", plan.model, plans[0].model),
            ("training.global_batch_size", plan.training.global_batch_size, plans[0].training.global_batch_size),
            ("training.precision", plan.training.precision, plans[0].training.precision),
        ):
            if mine != first:
                raise PlanError(
                    name, mine, f"{file} differs in it from {files[0]} ({first})", "Give plans for one training"
                )


def _say(line: str) -> None:
    sys.stderr.write(f"het-run: {line}\n")


if __name__ == "__main__":
    sys.exit(main())
