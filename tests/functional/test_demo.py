"""The demo end to end, with a tiny model: what it writes and says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama.data import END_OF_DOCUMENT, prepare
from megatron_het.plan import load_plan
from tools.planner.inputs.profile_schema import load_profile

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    command = [
        sys.executable,
        "-m",
        "examples.llama.demo",
        "--quick",
        "--out",
        str(out),
        "--source",
        str(REPOSITORY / "megatron_het"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    (out / "stdout").write_text(done.stdout)
    return out


@pytest.mark.full
def test_report(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    times = "predicted_iteration_s measured_iteration_s even_split_iteration_s speedup_over_even_split"
    assert report.keys() >= {"losses", "validation_loss", *times.split(), "per_rank", "date", "doubts"}
    losses = [loss for _, loss in report["losses"]]
    # Six iterations; an untrained model is at log(vocabulary) = 5.6.
    assert len(losses) == 6 and 5.3 < losses[0] < 6.0 and losses[-1] < losses[0]
    assert 0 < report["validation_loss"] < losses[0]
    assert report["measured_iteration_s"] > 0 and report["predicted_iteration_s"] > 0
    plan = load_plan(run / "plan.json")
    assert [r["rank"] for r in report["per_rank"]] == list(range(plan.world_size))
    for row in report["per_rank"]:
        for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert row["predicted_memory"][kind] == pytest.approx(row["measured_memory"][kind], rel=0.02)
        assert row["predicted_memory_bytes"] == pytest.approx(row["measured_memory_bytes"], rel=0.25)


@pytest.mark.full
def test_the_even_split_has_the_losses_of_the_plan(run: Path) -> None:
    """The plan decides where a layer runs, not what is computed; sums in fp32 are made in another order."""
    runs = json.loads((run / "report.json").read_text())["runs"]
    ours, even = runs["plan_losses"][0], runs["even_split_losses"][0]  # of the short runs, as long as each other
    assert [i for i, _ in ours] == [i for i, _ in even] == list(range(1, 6))
    assert ours[0][1] == pytest.approx(even[0][1], rel=0, abs=1e-5)
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in even], rel=0, abs=1e-4)


@pytest.mark.full
def test_files(run: Path) -> None:
    names = "plan-even.json run/args.sh run/train.sbatch loss.png timeline.png run/logs/node-0.log"
    assert all((run / name).stat().st_size > 0 for name in names.split())
    profile = load_profile(run / "profile.json")
    assert profile.complete
    even = load_plan(run / "plan-even.json")
    assert len({s.layers for s in even.stages}) == 1
    assert len({len(r.microbatches) for s in even.stages for r in s.replicas}) == 1
    script = f'source "{run}/run/args.sh" && printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--het-plan") + 1] == str(run / "run" / "plan.json")
    assert words[words.index("--num-layers") + 1] == "6"


@pytest.mark.full
def test_what_it_says(run: Path) -> None:
    text = (run / "stdout").read_text()
    commands = [f"tools.planner {name}" for name in ("profile", "plan", "emit")]
    for words in ("The cluster", *commands, "even split", "speedup over the even split", "report.json", "report.html"):
        assert words in text


def test_data_is_prepared_once_and_holds_the_files(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = tmp_path / "source"
    source.mkdir()
    for i in range(10):
        (source / f"module_{i}.py").write_text(f"x = {i}  # \u00e4\n", encoding="utf-8")
    files = prepare(tmp_path / "data", source, validation_fraction=0.2)
    train, validation = (IndexedDataset(p) for p in (files.train_prefix, files.validation_prefix))
    assert len(train) == 8 and len(validation) == 2 and files.documents == 10
    documents = {
        bytes(d[:-1].astype("uint8")).decode() for s in (train, validation) for d in (s[i] for i in range(len(s)))
    }
    assert documents == {f"x = {i}  # \u00e4\n" for i in range(10)}
    assert all(train[i][-1] == END_OF_DOCUMENT for i in range(8))
    assert files.train_tokens == sum(len(train[i]) for i in range(8))
    stamp = (tmp_path / "data" / "train.bin").stat().st_mtime_ns
    assert prepare(tmp_path / "data", source, validation_fraction=0.2) == files
    assert (tmp_path / "data" / "train.bin").stat().st_mtime_ns == stamp
    (source / "module_0.py").write_text("y = 0\n")
    assert prepare(tmp_path / "data", source, validation_fraction=0.2) != files
    with pytest.raises(FileNotFoundError, match="no .py files"):
        prepare(tmp_path / "other", tmp_path / "data")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--iterations", "2"], "at least 4"),
        (["--rounds", "0"], "--rounds = 0"),
        (["--source", "/nowhere"], "no such folder"),
    ],
)
def test_bad_options(arguments: list[str], words: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "examples.llama.demo", "--out", str(out), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2 and words in done.stderr
    assert not out.exists()
