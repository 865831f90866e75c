"""Choice of the checkpoint to load: the newest one whose files are complete.

Megatron loads the checkpoint in the tracker file, and ends if that cannot be read; with an empty tracker it ends
without an error.  Here a damaged or missing checkpoint is reported, and the one before is loaded.
"""

import contextlib
import copy
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_het.distributed.groups import replaced
from megatron_het.features.optimizers.spec import name_of
from megatron_het.megatron_patches import torch_checkpoints
from megatron_het.safe_io import FileError, read_json, read_text, write_text
from megatron_het.safe_io.reading import check_regular

# Checksums beside the files of a checkpoint: written after a save, compared before a load.
#
# Every rank writes the checksums of its own files to ``het-checksums-<rank>.json``; rank 0 also those of the
# files that describe the checkpoint.  They are computed from the files, in a thread, while training goes on.  A
# checkpoint without them, such as one of stock Megatron, is compared with its description only: the files that it
# must have, and their minimum lengths.

_PREFIX = "het-checksums-"
_DESCRIPTION = (".metadata", "metadata.json")
_BLOCK_BYTES = 8 * 2**20
_COMMON = "common.pt"
_WRITER = "het-writer"
_TRACKER_BYTES, _SETTINGS_BYTES = 64, 2**16


def checksum(path: Path) -> dict[str, int]:
    """Length and CRC-32 of a file: ``{"bytes": ..., "crc32": ...}``.

    Raises:
        FileError: The path is no regular file.
        OSError: The file cannot be read.
    """
    value, length = 0, 0
    check_regular(path, os.stat(path).st_mode)
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(memoryview(block)[:count], value)
            length += count
    return {"bytes": length, "crc32": value}


def written_by(folder: Path, rank: int) -> list[Path]:
    """Files of a checkpoint that a rank wrote: ``__<rank>_<n>.distcp``, and on rank 0 the description."""
    found = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        found += [folder / name for name in _DESCRIPTION if (folder / name).exists()]
    return found


def write_checksums(folder: Path, rank: int) -> Path:
    """Write the checksums of a rank's files; returns the path of the checksum file."""
    files = {path.name: checksum(path) for path in written_by(folder, rank)}
    target = folder / f"{_PREFIX}{rank}.json"
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps({"version": 1, "files": files}, indent=1), encoding="utf-8")
    os.replace(scratch, target)
    return target


def invalidate(folder: Path, *, described: bool) -> None:
    """Before a folder is overwritten, remove its checksums and, unless ``described``, its description."""
    for path in (*folder.glob(f"{_PREFIX}*.json"), *(folder / name for name in _DESCRIPTION if not described)):
        path.unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, dict[str, int]]:
    """Checksums of a checkpoint by file name, for files that have one."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            files = read_json(path)["files"].items()
            found.update((name, {"bytes": int(noted["bytes"]), "crc32": int(noted["crc32"])}) for name, noted in files)
        except (FileError, ValueError, KeyError, TypeError, AttributeError):
            continue  # an incomplete checksum file: its entries do not count
    return found


def needed_bytes(folder: Path) -> Mapping[str, int]:
    """The minimum length of every data file, from the description that torch writes last.

    Raises:
        Exception: Any error of reading a damaged description.
    """
    from torch.distributed.checkpoint import FileSystemReader

    torch_checkpoints.guard_reads()
    stored: Any = FileSystemReader(folder).read_metadata().storage_data
    found: dict[str, int] = {}
    for place in stored.values():
        name = place.relative_path
        found[name] = max(found.get(name, 0), place.offset + place.length)
    return found


def problems(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Returns the problems of a checkpoint's files; empty if there are none.

    Args:
        part: Index of the share of checksums to compare; missing and short files are found with any share.
        parts: Number of ranks that share the checksums.
    """
    if not folder.is_dir():
        return [f"there is no {folder.name}"]
    missing = [name for name in _DESCRIPTION if not (folder / name).exists()]
    if missing:
        return [f"{missing[0]} is missing"]
    noted = read_checksums(folder)
    if found := _wrong_description(folder, noted):
        return found
    try:
        needed = needed_bytes(folder)
    except Exception as error:  # a damaged pickle raises anything
        return [f".metadata cannot be read ({type(error).__name__}: {error})"]
    found = [text for name, length in sorted(needed.items()) if (text := _wrong(folder / name, least=length))]
    if not found:
        names = sorted(set(needed) & set(noted))
        found = [text for name in names[part::parts] if (text := _wrong(folder / name, noted[name]))]
    return found


def _wrong_description(folder: Path, noted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the problems of the files that describe a checkpoint, before their contents are used."""
    names = (name for name in (*_DESCRIPTION, _COMMON) if name in noted or (folder / name).exists())
    found = [text for name in names if (text := _wrong(folder / name, noted.get(name)))]
    if not found:
        try:
            settings = read_json(folder / _DESCRIPTION[1], _SETTINGS_BYTES)
        except FileError as error:
            return [f"{_DESCRIPTION[1]} cannot be read ({error.problem})"]
        if not isinstance(settings, dict) or not isinstance(settings.get("sharded_backend"), str):
            found.append(f"{_DESCRIPTION[1]} names no format")
    return found


def _wrong(path: Path, noted: Mapping[str, int] | None = None, least: int = 0) -> str:
    """Returns the problem of a file against its recorded checksum or its minimum length; empty if there is none."""
    try:
        check_regular(path, path.stat().st_mode)
        if (size := path.stat().st_size) < least:
            return f"{path.name} has {size} bytes, at least {least} are needed"
        is_other = noted is not None and checksum(path) != dict(noted)
    except (FileError, OSError) as error:
        return f"{path.name} cannot be read ({error.problem if isinstance(error, FileError) else error.strerror})"
    return f"{path.name} is not what was written (another checksum)" if is_other else ""


class ChecksumWriter:
    """Writes the checksums of this rank's files after each complete save, and marks the folder as this job's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._name = os.urandom(8).hex()
        self._claimed: Path | None = None
        self._due: list[_Save] = []
        self._thread: threading.Thread | None = None

    def begin(self, folders: Sequence[Path], iteration: int) -> None:
        """Register a save that begins in one of ``folders``: of ordinary or of non-persistent checkpoints.

        If the save is interrupted, parts of an older checkpoint of the iteration remain and must not count as whole.

        Raises:
            CheckpointError: Another job has saved into the first folder since this one did; on the first rank.
        """
        self.finish()
        for folder in folders[:1] if self._rank == 0 else ():
            self._claim(folder, iteration)
        for folder in folders:
            save = _Save(folder / f"iter_{iteration:07d}", iteration, _tracker(folder)[1])
            if self._rank == 0:
                # With two folders it is not known which one is written, and the other one must stay valid.
                invalidate(save.folder, described=len(folders) > 1)
            self._due.append(save)

    def _claim(self, folder: Path, iteration: int) -> None:
        """Mark a folder as this job's; the first save of a job takes the folder over from an earlier job."""
        if folder == self._claimed:
            self._check_claim()
        self._claimed = None
        with contextlib.suppress(FileError, OSError):  # a full disk: the save itself will say so
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / _WRITER, f"{self._name} {iteration}")
            self._claimed = folder

    def _check_claim(self, saves: "Iterable[_Save]" = ()) -> None:
        """Raise CheckpointError if another job saves into the folder, too.

        Args:
            saves: Complete saves.  If the other job has begun to save the same iteration, that save is invalidated.
        """
        if self._claimed is None:
            return
        with contextlib.suppress(FileError, OSError):
            name, _, iteration = read_text(self._claimed / _WRITER, _TRACKER_BYTES).partition(" ")
            if name == self._name:
                return
            for save in saves:
                if iteration == str(save.iteration):
                    write_text(self._claimed / _WRITER, f"both {iteration}")  # for the other job to find
                    invalidate(save.folder, described=False)
            raise CheckpointError(
                f"--save = {str(self._claimed)!r}: another job saves there too, and files of both would be one "
                "checkpoint. Give each job a folder of its own, and restart this one from what it saved alone"
            )

    def poll(self) -> None:
        """Start writing the checksums of saves that are complete now; called between iterations.

        Raises:
            CheckpointError: Another job has begun to save into the first folder meanwhile; on the first rank.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        complete = [save for save in self._due if save.is_complete()]
        if complete:
            last = complete[-1].iteration  # of the folders of one iteration only one was written
            self._due = [save for save in self._due if save.iteration > last]
            self._check_claim(complete)
            self._thread = threading.Thread(target=self._write, args=(complete,), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the checksums are written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, saves: "Iterable[_Save]") -> None:
        for save in saves:
            # Deleted meanwhile, or a full disk: the checkpoint stays valid without checksums.
            with contextlib.suppress(OSError):
                write_checksums(save.folder, self._rank)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that has begun: its folder, its iteration, and when the tracker was last written before it."""

    folder: Path
    iteration: int
    before_ns: int

    def is_complete(self) -> bool:
        """Whether the tracker has been written since; a save writes it last."""
        iteration, written_ns = _tracker(self.folder.parent)
        return iteration >= self.iteration and written_ns != self.before_ns


def _tracker(folder: Path) -> tuple[int, int]:
    """The iteration in a folder's tracker file and the file's time of modification; -1 and 0 without one."""
    path = folder / TRACKER
    try:
        return int(read_text(path, _TRACKER_BYTES)), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return -1, 0


TRACKER = "latest_checkpointed_iteration.txt"
_NON_PERSISTENT = "non_persistent"
_FREE_OF_LAYOUT = ("fully_reshardable", "fully_sharded_model_space")
"""Forms of the distributed optimizer's state that any layout can load."""
_ITERATION = re.compile(r"iter_(\d{7,})")


class CheckpointError(ValueError):
    """No checkpoint can be loaded; the message names what was tried and the remedy."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that might be loaded."""

    iteration: int
    folder: Path
    persistent: bool = True  # False for a non-persistent checkpoint


@dataclass(frozen=True, slots=True)
class Choice:
    """Checkpoint to load, and the problems of newer ones."""

    candidate: Candidate | None  # the checkpoint; None to leave the choice to Megatron
    tracker_is_broken: bool = False  # whether the tracker file exists but has no iteration
    notes: tuple[str, ...] = ()  # problems of newer checkpoints, for the user


def tracked(folder: Path) -> int | str | None:
    """Returns the content of a tracker file: an iteration, ``"release"``, ``""`` if unreadable; None without a file."""
    if not (folder / TRACKER).exists():
        return None
    try:
        text = read_text(folder / TRACKER, _TRACKER_BYTES).strip()
    except FileError:
        return ""
    return int(text) if text.isascii() and text.isdecimal() else ("release" if text == "release" else "")


def candidates(folder: Path, limit: int | None, persistent: bool = True) -> list[Candidate]:
    """Checkpoints of a folder up to an iteration (None for any), the newest first."""
    found = []
    for path in folder.glob("iter_*"):
        match = _ITERATION.fullmatch(path.name)
        if match and path.is_dir() and (limit is None or int(match[1]) <= limit):
            found.append(Candidate(int(match[1]), path, persistent))
    return sorted(found, key=lambda c: c.iteration, reverse=True)


def non_persistent_folder(args: Any, beside: str) -> Path | None:
    """Folder of the non-persistent checkpoints of a run; ``beside`` is the ordinary folder.  None without any."""
    if args.non_persistent_ckpt_type != "global":
        return None
    return Path(args.non_persistent_global_ckpt_dir or os.path.join(beside, _NON_PERSISTENT))


def save_folders(args: Any) -> list[Path]:
    """Folders in which a run saves checkpoints: ordinary ones and, if there are any, non-persistent ones."""
    temporary = non_persistent_folder(args, args.save) if args.save else None
    return [Path(folder) for folder in (args.save, temporary) if folder]


def choose(args: Any, agree: Callable[[Candidate], Sequence[str]]) -> Choice:
    """The newest checkpoint that can be loaded, and the problems of newer ones.

    Args:
        agree: Returns the problems of a checkpoint, the same on all ranks.

    Raises:
        CheckpointError: There are checkpoints, or one was requested, and none can be loaded.
    """
    folder = Path(args.load)
    latest = tracked(folder)
    if latest == "release" or (latest is None and getattr(args, "pretrained_checkpoint", None)):
        return Choice(None)
    asked = getattr(args, "ckpt_step", None)
    limit = asked or (latest if isinstance(latest, int) else None)
    listed = candidates(folder, limit)
    if limit is not None and not any(c.iteration == limit for c in listed):
        listed.insert(0, Candidate(limit, folder / f"iter_{limit:07d}"))
    if asked:
        listed = listed[:1]
    temporary = non_persistent_folder(args, args.load)
    if temporary is not None:
        newest = tracked(temporary)
        listed += candidates(temporary, newest if isinstance(newest, int) else -1, persistent=False)[:1]
        listed.sort(key=lambda c: (c.iteration, not c.persistent), reverse=True)
    if not listed and latest is None and not args.exit_on_missing_checkpoint:
        return Choice(None)
    notes = [f"{folder / TRACKER} names no iteration"] if latest == "" else []
    if latest is None and not asked and any(c.persistent for c in listed):
        notes.append(f"{folder / TRACKER} is missing")
    for candidate in listed:
        found = agree(candidate)
        if not found:
            return Choice(candidate, latest == "", tuple(notes))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        notes.append(f"checkpoint {candidate.folder} cannot be loaded: {found[0]}{more}")
    if latest is None and not asked and not args.exit_on_missing_checkpoint:
        return Choice(None, notes=tuple(notes))  # an interrupted first save: training starts from scratch
    raise CheckpointError(
        f"--load = {str(folder)!r}: {'; '.join(notes) or 'there is no checkpoint'}. "
        "Restore the files, name another iteration with --ckpt-step, or start without --load"
    )


def agreed_problems(candidate: Candidate) -> list[str]:
    """Problems found by any rank, in the order of ranks; collective.  Each rank reads a share of the files."""
    import torch.distributed as dist

    mine = problems(candidate.folder, dist.get_rank(), dist.get_world_size())
    if not mine and dist.get_rank() == 0:
        try:
            common_state(candidate.folder)
        except UnreadableError as error:
            mine = [str(error)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return list(dict.fromkeys(text for texts in found for text in texts))


class UnreadableError(ValueError):
    """The common state of a checkpoint cannot be read."""


def common_state(folder: Path) -> dict[str, Any]:
    """Returns the state that all ranks of a checkpoint share; raises UnreadableError if it cannot be read."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return dist_checkpointing.load_common_state_dict(str(folder))
    except (Exception, CheckpointException) as error:  # CheckpointException is no subclass of Exception
        cause = str(error).strip().splitlines()[-1:] or [""]
        raise UnreadableError(f"its common state cannot be read ({type(error).__name__}: {cause[0]})") from None


def check_optimizer_state(args: Any, folder: Path) -> None:
    """Refuse a checkpoint whose optimizer state has another form than this run's.

    Raises:
        CheckpointError: The checkpoint has no optimizer state, or one of another optimizer, one saved with the
            distributed optimizer for a run without it or the reverse, or one in a form that depends on the layout.
        UnreadableError: The checkpoint's common state cannot be read.
    """
    if args.no_load_optim or args.finetune:
        return
    common = common_state(folder)
    saved = common.get("args")
    if saved is None:
        return
    if getattr(saved, "no_save_optim", False):
        raise CheckpointError(f"--load: {folder} was saved with --no-save-optim: add --no-load-optim, or --finetune")
    before, now = bool(getattr(saved, "use_distributed_optimizer", False)), bool(args.use_distributed_optimizer)
    if before != now:
        words = {True: "with", False: "without"}
        raise CheckpointError(
            f"--load: {folder} was saved {words[before]} the distributed optimizer, this run trains {words[now]} it, "
            "and the optimizer's state has another form there. Use a plan with training.distributed_optimizer "
            f"{str(before).lower()}, or load the weights alone with --no-load-optim"
        )
    _check_schedule(args, common, folder)
    names = name_of(saved), name_of(args)
    if None not in names and names[0] != names[1]:
        raise CheckpointError(
            f"--load: {folder} was saved with --optimizer {names[0]}, this run trains with {names[1]}, whose state is "
            "another one. Load the weights alone with --no-load-optim"
        )
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if now and form is not None and form not in _FREE_OF_LAYOUT:
        raise CheckpointError(
            f"--load: {folder} has the distributed optimizer's state as {form!r}, by the number of the rank that had "
            "it, and a plan counts ranks in another way. Save it with --dist-ckpt-optim-fully-reshardable, or load the "
            "weights alone with --no-load-optim"
        )


_REMEDY = "Add --override-opt_param-scheduler (this run's) or --use-checkpoint-opt_param-scheduler (the checkpoint's)"


def _check_schedule(args: Any, common: Mapping[str, Any], folder: Path) -> None:
    """Refuse another learning rate, length or decay than the checkpoint's, unless a flag selects one of the two."""
    from megatron.training import training

    if any(getattr(args, f"{which}_opt_param_scheduler", False) for which in ("override", "use_checkpoint")):
        return
    for key in ("decoupled_lr", "decoupled_min_lr"):
        before, now = getattr(common["args"], key, None), getattr(args, key, None)
        if None not in (before, now) and before != now:
            raise CheckpointError(f"--{key.replace('_', '-')} = {now!r}: {folder} was saved with {before!r}. {_REMEDY}")
    if not (saved := common.get("opt_param_scheduler")) or not (args.train_iters or args.train_samples):
        return
    with replaced(training, get_args=lambda: copy.copy(args), update_train_iters=lambda _: None):
        own = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    try:
        own.load_state_dict(saved)
    except AssertionError as error:
        why = str(error).partition("input")[2].replace("checkpointvalue", f"value in {folder}")
        raise CheckpointError(f"--load: this run's{why}; lengths are in samples. {_REMEDY}") from None


def check_tracked_form(args: Any) -> None:
    """Calls :func:`check_optimizer_state` for the tracker's checkpoint, before groups exist; raises CheckpointError.

    An unreadable checkpoint passes: later all ranks together choose another one.
    """
    if not args.load:
        return
    iteration = getattr(args, "ckpt_step", None) or tracked(Path(args.load))
    if not isinstance(iteration, int):
        return
    folder = Path(args.load) / f"iter_{iteration:07d}"
    if not (folder / "metadata.json").exists() and any(folder.glob("mp_rank_*")):  # Megatron's older format
        raise CheckpointError(
            f"--load: {folder} is of the format torch, which a plan cannot load: it has a part for each rank of one "
            "layout. Convert it with stock Megatron in that layout: --ckpt-format torch "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    with contextlib.suppress(UnreadableError):
        check_optimizer_state(args, folder)


def repair_tracker(folder: Path, candidate: Candidate) -> None:
    """Write the iteration of the loaded checkpoint into a tracker file that has none.

    Raises:
        CheckpointError: The tracker cannot be written.
    """
    path = folder / TRACKER
    try:
        if candidate.persistent:
            write_text(path, str(candidate.iteration))
        else:
            path.unlink()
    except (FileError, OSError) as error:
        why = error.problem if isinstance(error, FileError) else error.strerror
        raise CheckpointError(
            f"{path} names no iteration and cannot be written ({why}). Write {candidate.iteration} into it"
        ) from None
