"""Which checkpoint is loaded, when files are damaged or missing."""

import argparse
import io
import json
import os
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_het.checkpoint import choice
from megatron_het.checkpoint.choice import (
    TRACKER,
    CheckpointError,
    ChecksumWriter,
    check_optimizer_state,
    check_tracked_form,
    choose,
    problems,
    read_checksums,
    repair_tracker,
    write_checksums,
)
from megatron_het.features.optimizers.spec import SHARDED_LION
from megatron_het.megatron_patches import torch_checkpoints


def checkpoint(folder: Path, iteration: int) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True, exist_ok=True)
    save({"weight": torch.arange(64.0) + iteration}, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def run(folder: Path, *iterations: int, tracker: str | None = None) -> Path:
    for iteration in iterations:
        write_checksums(checkpoint(folder, iteration), 0)
    folder.mkdir(exist_ok=True)
    (folder / TRACKER).write_text(str(iterations[-1]) if tracker is None else tracker)
    return folder


def arguments(load: Path, **changed: Any) -> SimpleNamespace:
    given = {
        "load": str(load),
        "ckpt_step": None,
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
        "exit_on_missing_checkpoint": True,
        "pretrained_checkpoint": None,
    }
    return SimpleNamespace(**{**given, **changed})


def chosen(load: Path, **changed: Any) -> tuple[int | None, int]:
    """Iteration that is loaded, and how many notes there are."""
    choice = choose(arguments(load, **changed), lambda candidate: problems(candidate.folder))
    return None if choice.candidate is None else choice.candidate.iteration, len(choice.notes)


def _edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return edit


DAMAGE = {
    "truncated": _edit("__0_0.distcp", lambda data: data[:-1]),
    "flipped": _edit("__0_0.distcp", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]),
    "description": _edit(".metadata", lambda data: data[: len(data) // 2]),
    "described otherwise": _edit("metadata.json", lambda data: b"[]"),
    "missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "without description": lambda folder: (folder / ".metadata").unlink(),
}


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


PLANTS = {
    "pipe": _fifo,
    "device": _device,
    "deep": _text("[" * 100_000),
    "long number": _text("9" * 5000),
    "wrong types": _text(
        '{"files": {"__0_0.distcp": [1], ".metadata": {"bytes": "x", "crc32": {}}}, "sharded_backend": 7}'
    ),
    "half of a character": _text('{"files": {"\\ud800": 1}}'),
    "empty": _text(""),
}
SIDE_FILES = (".metadata", "metadata.json", "common.pt", "het-checksums-0.json", "het-checksums-9.json", "__0_0.distcp")


@pytest.mark.parametrize("plant", list(PLANTS))
@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_side_file_may_be_anything(name: str, plant: str, tmp_path: Path) -> None:
    """Nobody waits, and no error is a traceback."""
    path = checkpoint(tmp_path, 3)
    if name != ".metadata":
        write_checksums(path, 0)
    PLANTS[plant](path / name)
    found = problems(path)
    is_note = name.startswith("het-checksums-") or (name == "common.pt" and plant not in ("pipe", "device"))
    assert bool(found) != is_note, found
    assert all(len(text) < 500 and "Traceback" not in text for text in found)


@pytest.mark.parametrize("plant", list(PLANTS))
def test_a_tracker_may_be_anything(plant: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2, 4)
    PLANTS[plant](folder / TRACKER)
    assert chosen(folder) == (4, 1)
    if plant in ("pipe", "device"):
        with pytest.raises(
            CheckpointError, match=r"cannot be written \((this is a device, pipe|/dev/zero is no place)"
        ):
            repair_tracker(folder, choice.Candidate(4, folder))
    else:
        repair_tracker(folder, choice.Candidate(4, folder))
        assert chosen(folder) == (4, 0)


class Planted:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_planted_description_runs_nothing(is_noted: bool, tmp_path: Path) -> None:
    path, trace = checkpoint(tmp_path, 3), tmp_path / "trace"
    if is_noted:
        write_checksums(path, 0)
    (path / ".metadata").write_bytes(pickle.dumps(Planted(trace)))
    (found,) = problems(path)
    assert ("another checksum" if is_noted else "'posix.mkdir', which is no part") in found
    with pytest.raises(pickle.UnpicklingError, match="--het-trust-checkpoint"):  # as stock's loading reads it
        FileSystemReader(path).read_metadata()
    assert not trace.exists()
    torch_checkpoints.guard_reads(trusts=True)
    try:
        with pytest.raises(AttributeError):
            FileSystemReader(path).read_metadata()
    finally:
        torch_checkpoints.guard_reads(trusts=False)
    assert trace.exists(), "whoever trusts it has it run"


@pytest.mark.parametrize(
    "named",
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "serialization.load"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch.distributed.checkpoint.filesystem", "dataclass"),
    ],
)
def test_a_description_names_only_the_records_of_its_format(named: tuple[str, str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no part of a checkpoint's description"):
        torch_checkpoints._Reader(io.BytesIO()).find_class(*named)


def test_paths_are_read_by_the_names_of_any_python() -> None:
    assert torch_checkpoints._Reader(io.BytesIO()).find_class("pathlib._local", "PosixPath") is pathlib.PosixPath


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 3)
    assert problems(path) == []
    write_checksums(path, 0)
    assert problems(path) == []
    DAMAGE[damage](path)
    found = problems(path)
    assert len(found) == 1
    # Every rank sees what is missing or short; checksums are shared out.
    parts = [problems(path, part, 3) for part in range(3)]
    assert {text for texts in parts for text in texts} == set(found)


def test_the_newest_whole_one(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2, 4, 6)
    assert chosen(folder) == (6, 0)
    assert chosen(folder, ckpt_step=4) == (4, 0)
    DAMAGE["flipped"](folder / "iter_0000006")
    assert chosen(folder) == (4, 1)
    DAMAGE["missing"](folder / "iter_0000004")
    assert chosen(folder) == (2, 2)
    with pytest.raises(CheckpointError, match=r"iter_0000004 cannot be loaded: __0_0.distcp"):
        chosen(folder, ckpt_step=4)
    DAMAGE["description"](folder / "iter_0000002")
    with pytest.raises(CheckpointError, match=r"iter_0000006.*iter_0000004.*iter_0000002.*--ckpt-step"):
        chosen(folder)


@pytest.mark.parametrize(("tracker", "expected"), [("9", (6, 1)), ("", (6, 1)), ("four", (6, 1)), ("4", (4, 0))])
def test_trackers(tracker: str, expected: tuple[int, int], tmp_path: Path) -> None:
    assert chosen(run(tmp_path / "run", 2, 4, 6, tracker=tracker)) == expected


def test_without_a_tracker(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2, 4)
    (folder / TRACKER).unlink()
    assert chosen(folder) == (4, 1)
    DAMAGE["missing"](folder / "iter_0000004")
    DAMAGE["missing"](folder / "iter_0000002")  # no save has ever ended
    assert chosen(folder, exit_on_missing_checkpoint=False) == (None, 3)
    with pytest.raises(CheckpointError, match="iter_0000002"):
        chosen(folder)


def test_nothing_to_load(tmp_path: Path) -> None:
    assert chosen(tmp_path, exit_on_missing_checkpoint=False) == (None, 0)
    assert chosen(tmp_path, pretrained_checkpoint="elsewhere") == (None, 0)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        chosen(tmp_path)


def test_a_newer_non_persistent_one_is_preferred_while_it_is_whole(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2, 4)
    temporary = run(folder / "non_persistent", 5)
    flags = {"non_persistent_ckpt_type": "global"}
    choice = choose(arguments(folder, **flags), lambda candidate: problems(candidate.folder))
    assert choice.candidate is not None and (choice.candidate.iteration, choice.candidate.persistent) == (5, False)
    DAMAGE["truncated"](temporary / "iter_0000005")
    choice = choose(arguments(folder, **flags), lambda candidate: problems(candidate.folder))
    assert choice.candidate is not None and (choice.candidate.iteration, choice.candidate.persistent) == (4, True)


def test_a_broken_tracker_is_repaired(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2, 4, tracker="")
    choice = choose(arguments(folder), lambda candidate: [])
    assert choice.tracker_is_broken and choice.candidate is not None
    repair_tracker(folder, choice.candidate)
    assert (folder / TRACKER).read_text() == "4"


def test_checksums_are_noted_once_a_save_is_complete(tmp_path: Path) -> None:
    """Also when an iteration is saved again, which forgets the old ones first."""
    folder = run(tmp_path / "run", 2, 4)
    writer = ChecksumWriter(0)
    writer.begin([folder, folder / "non_persistent"], 4)
    assert read_checksums(folder / "iter_0000004") == {} and problems(folder / "iter_0000004") == []
    writer.poll()
    writer.finish()
    assert read_checksums(folder / "iter_0000004") == {}  # the tracker is that of the save before
    (folder / TRACKER).write_text("4")
    writer.poll()
    writer.finish()
    assert set(read_checksums(folder / "iter_0000004")) == {"__0_0.distcp", ".metadata", "metadata.json"}
    for iteration in (6, 8):  # the second one begins while the first one is still written
        writer.begin([folder, folder / "non_persistent"], iteration)
    for iteration in (6, 8):
        (folder / TRACKER).write_text(checkpoint(folder, iteration).name.removeprefix("iter_"))
        writer.poll()
        writer.finish()
        assert read_checksums(folder / f"iter_{iteration:07}")


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is_complete(tmp_path: Path) -> None:
    """Files of both saves would be a checkpoint of neither, and old checksums are gone."""
    folder = run(tmp_path / "run", 2, 4)
    ChecksumWriter(1).begin([folder], 4)
    assert problems(folder / "iter_0000004") == []  # the first rank's to remove
    ChecksumWriter(0).begin([folder], 4)
    assert problems(folder / "iter_0000004") == [".metadata is missing"]
    assert problems(folder / "iter_0000002") == []


def test_two_jobs_that_save_into_one_folder_are_one_error(tmp_path: Path) -> None:
    """Files of both would be one checkpoint. A job that goes on where another one ended takes the folder over."""
    first, second = ChecksumWriter(0), ChecksumWriter(0)
    for iteration in (2, 4):
        first.begin([tmp_path / "run"], iteration)
        ChecksumWriter(1).begin([tmp_path / "run"], iteration)
    for iteration in (4, 6):
        second.begin([tmp_path / "run"], iteration)
    with pytest.raises(CheckpointError, match="another job saves there too"):
        first.begin([tmp_path / "run"], 6)
    first.begin([tmp_path / "another"], 6)
    (tmp_path / "run" / "het-writer").unlink()
    second.begin([tmp_path / "run"], 8)  # somebody tidied up


def test_two_jobs_that_save_an_iteration_at_the_same_time_leave_no_checkpoint_of_it(tmp_path: Path) -> None:
    """Also when it is the first save of both: whoever ends last removes the description that the other one wrote."""
    folder = run(tmp_path / "run", 2)
    for iterations, ended, left in (((4, 4), 2, [".metadata is missing"]), ((8, 6), 1, [])):
        writers = [ChecksumWriter(0), ChecksumWriter(0)]
        for writer, iteration in zip(writers, iterations):
            writer.begin([folder], iteration)
        for writer, iteration in zip(writers[:ended], iterations):
            (folder / TRACKER).write_text(checkpoint(folder, iteration).name.removeprefix("iter_"))
            with pytest.raises(CheckpointError, match="another job saves there too"):
                writer.poll()
            assert problems(folder / f"iter_{iteration:07d}") == left


def test_a_note_that_was_cut_short_counts_as_none(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 2)
    note = write_checksums(path, 0)
    whole = json.loads(note.read_text())
    assert len(whole["files"]) == 3
    note.write_text(note.read_text()[:40])
    assert problems(path) == []


SHARDED = {"use_distributed_optimizer": True, "optimizer": "adam"}
BY_RANK = "'dp_(reshardable|zero_gather_scatter)'.*--dist-ckpt-optim-fully-reshardable.*--no-load-optim"
FORM = "distrib_optim_sharding_type"
LION = {**SHARDED, SHARDED_LION: True}


@pytest.mark.parametrize(
    ("saved", "given", "reason"),
    [
        (SHARDED, SHARDED, None),
        (SHARDED | {FORM: "fully_reshardable"}, SHARDED, None),
        (SHARDED | {FORM: "dp_reshardable"}, SHARDED, BY_RANK),
        (SHARDED | {FORM: "dp_zero_gather_scatter"}, SHARDED, BY_RANK),
        (LION, LION, None),
        ({"use_distributed_optimizer": True}, SHARDED, None),  # it does not say which optimizer
        (SHARDED, LION, "saved with --optimizer adam, this run trains with lion.*--no-load-optim"),
        (LION, SHARDED, "saved with --optimizer lion, this run trains with adam"),
        ({"optimizer": "sgd"}, {"optimizer": "muon"}, "saved with --optimizer sgd, this run trains with muon"),
        ({"decoupled_lr": 1e-3}, {"decoupled_lr": 2e-3}, "--decoupled-lr = 0.002"),
        ({"no_save_optim": True}, {}, "saved with --no-save-optim: add --no-load-optim"),
        ({"optimizer": "lion"}, LION, "saved without the distributed optimizer, this run trains with it"),
    ],
)
def test_state_of_another_form_is_refused(
    saved: dict[str, Any], given: dict[str, Any], reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"args": SimpleNamespace(**saved), "content_metadata": {FORM: saved.get(FORM)}}
    monkeypatch.setattr(choice, "common_state", lambda folder: common)
    kept = {"no_load_optim": False, "finetune": False, "use_distributed_optimizer": False}
    args = SimpleNamespace(**{**kept, **given})
    if reason is None:
        check_optimizer_state(args, tmp_path)
    else:
        with pytest.raises(CheckpointError, match=reason):
            check_optimizer_state(args, tmp_path)
    args.no_load_optim = True
    check_optimizer_state(args, tmp_path)


def test_another_schedule_of_the_learning_rate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    flags = "--lr 1e-3 --min-lr 0 --global-batch-size 6 --train-iters 10 --start-weight-decay 0 --end-weight-decay 0"
    state = {"max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 0, "num_steps": 6, "lr_decay_style": "linear"}
    state |= {"lr_decay_steps": 60, "start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant", "wd_incr_steps": 60}
    common = {"args": SimpleNamespace(), "opt_param_scheduler": state}
    monkeypatch.setattr(choice, "common_state", lambda folder: common)
    for given in ("", "--lr 2e-3 --override-opt_param-scheduler", "--min-lr 1 --use-checkpoint-opt_param-scheduler"):
        check_optimizer_state(parser.parse_args(f"{flags} {given}".split()), tmp_path)
    for given, reason in {
        "--lr 2e-3": "this run's value 0.002 and value in .* 0.001 for learning rate .*--override-opt_param-scheduler",
        "--min-lr 1e-5": "value 1e-05 and value in .* 0.0 for minimum learning rate",
        "--train-iters 8": "value 48 and value in .* 60 for total number of iterations .*; lengths are in samples",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            check_optimizer_state(parser.parse_args(f"{flags} {given}".split()), tmp_path)


def test_a_checkpoint_of_the_older_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("4")
    args = SimpleNamespace(load=str(tmp_path), ckpt_step=None, no_load_optim=True, finetune=False)
    with pytest.raises(CheckpointError, match="iter_0000004 is of the format torch.*--ckpt-convert-format torch_dist"):
        check_tracked_form(args)
    (tmp_path / "iter_0000004" / "metadata.json").write_text("{}")
    check_tracked_form(args)
