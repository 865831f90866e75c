"""Real text without a download: the Python standard library's source files as byte-level tokens.

Every ``.py`` file is one document.  A token is a byte (0 to 255); token 256 ends a document.
The result is a pair of Megatron IndexedDatasets, one for training and one for validation, which
``--train-data-path`` and ``--valid-data-path`` read with ``--tokenizer-type NullTokenizer
--vocab-size 257`` (the ids are the tokenizer).

Command line: ``python -m examples.llama.data --out DIR``.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from examples.llama.job import JobError
from megatron_het.safe_io import ends_with_its_reader
from tools.planner.profile.settings import default_environment

VOCAB_SIZE = 257
END_OF_DOCUMENT = 256

#: Folders that hold other people's packages or mostly tables and expected outputs.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})


@dataclasses.dataclass(frozen=True, slots=True)
class DataFiles:
    """The paths and sizes of a prepared data set."""

    train_prefix: str  # path of the training IndexedDataset without ``.bin``/``.idx``
    validation_prefix: str  # the same for validation
    train_tokens: int  # number of training tokens
    validation_tokens: int  # number of validation tokens
    documents: int  # number of source files in both splits

    @property
    def arguments(self) -> list[str]:
        """Returns the Megatron flags that read this data set."""
        words = f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 32".split()
        return [*words, "--train-data-path", self.train_prefix, "--valid-data-path", self.validation_prefix]


def prepare_apart(out: Path, source: Path | None) -> DataFiles:
    """Run :func:`prepare` in a process of its own.

    Raises:
        JobError: It failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "examples.llama.data", "--out", str(out / "data")]
    command += [] if source is None else ["--source", str(source)]
    done = subprocess.run(command, env=default_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"preparing the data failed:\n{done.stderr}")
    return DataFiles(**json.loads(done.stdout))


def source_files(library: Path | None = None) -> list[Path]:
    """Returns the source files of this interpreter's standard library, sorted by path.

    Raises:
        FileNotFoundError: The interpreter has no standard library in source form.
    """
    root = library or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(
            f"no .py files under {root}: this Python has no standard library in source form; "
            "give another folder of text with --source"
        )
    return files


def prepare(out: Path, source: Path | None = None, validation_fraction: float = 0.05) -> DataFiles:
    """Write both splits under ``out`` unless the same data set is there already.

    Args:
        out: Folder for ``train.{bin,idx}``, ``validation.{bin,idx}`` and ``data.json``.
        source: Folder of ``.py`` files; None means the standard library.
        validation_fraction: Share of the documents kept for validation.

    Returns:
        Paths and sizes.  ``data.json`` is written last, so an interrupted run is repeated.
    """
    files = source_files(source)
    root = source or Path(sysconfig.get_paths()["stdlib"])
    key = _fingerprint(files, root, validation_fraction)
    marker = out / "data.json"
    if marker.is_file():
        stored = json.loads(marker.read_text(encoding="utf-8"))
        if stored.pop("fingerprint", None) == key:
            return DataFiles(**stored)
    out.mkdir(parents=True, exist_ok=True)
    train, validation = _split(files, root, validation_fraction)
    written = DataFiles(
        train_prefix=str(out / "train"),
        validation_prefix=str(out / "validation"),
        train_tokens=_write(train, out / "train"),
        validation_tokens=_write(validation, out / "validation"),
        documents=len(files),
    )
    scratch = marker.with_suffix(".tmp")
    scratch.write_text(
        json.dumps({"fingerprint": key, **dataclasses.asdict(written)}, indent=2) + "\n", encoding="utf-8"
    )
    os.replace(scratch, marker)
    return written


def _fingerprint(files: Sequence[Path], root: Path, validation_fraction: float) -> str:
    """Returns a hash that changes with a source file, the interpreter or the split."""
    digest = hashlib.sha256(f"{validation_fraction}".encode())
    for path in files:
        digest.update(f"{path.relative_to(root)}:{path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _split(files: Sequence[Path], root: Path, validation_fraction: float) -> tuple[list[Path], list[Path]]:
    """Order files by a hash of the name, so that both splits are mixed and the same on every machine."""
    ordered = sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    held_out = max(1, round(len(ordered) * validation_fraction))
    return ordered[held_out:] or ordered, ordered[:held_out]


def _write(files: Sequence[Path], prefix: Path) -> int:
    """Write one IndexedDataset; returns its number of tokens."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(VOCAB_SIZE))
    tokens = 0
    for path in files:
        content = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8).astype(numpy.int32)
        document = torch.from_numpy(numpy.append(content, numpy.int32(END_OF_DOCUMENT)))
        builder.add_document(document, [document.numel()])
        tokens += document.numel()
    builder.finalize(get_idx_path(str(prefix)))
    return tokens


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the standard library's sources as Megatron datasets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the datasets")
    parser.add_argument("--source", type=Path, help="folder of .py files (default: the standard library)")
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    options = parser.parse_args(argv)
    if not 0 < options.validation_fraction < 1:
        parser.error(f"--validation-fraction = {options.validation_fraction}: must lie between 0 and 1")
    try:
        files = prepare(options.out, options.source, options.validation_fraction)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(json.dumps(dataclasses.asdict(files), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
