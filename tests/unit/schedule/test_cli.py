"""The command line and the pictures, in process."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from schedule_helpers import full, run

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.window.passes import add_parameters
from megatron_het.safe_io import write_json
from megatron_het.schedule import Link, Memory, Shape, dumps
from megatron_het.schedule.view.cli import main
from megatron_het.schedule.view.visualize import chrome_trace, draw, text_picture


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> object:
    def call(words: str, *files: object) -> tuple[int, str, str]:
        code = main([*words.split(), *map(str, files)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_compare_json(output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "rows.json"
    words = "compare --pp 4 --microbatches 4 --slices 8 --chunks 2 --attention-share 0.4 --output-share 0.1"
    code, text, _ = output(f"{words} --json", out)
    rows = json.loads(out.read_text())
    assert code == 0
    keys = {"schedule", "bubble_fraction", "activation_fraction", "communication_volume", "makespan"}
    assert all(set(row) == keys for row in rows)
    assert {row["schedule"] for row in rows} >= {"gpipe", "1f1b", "interleaved", "zb-v", "ministage", "slimpipe"}
    assert all(row["schedule"] in text for row in rows)
    best = min(rows, key=lambda row: row["bubble_fraction"])
    assert best["schedule"] == "slimpipe-helping"


def test_compare_says_what_cannot_run(output) -> None:  # type: ignore[no-untyped-def]
    """Interleaved 1F1B needs as many microbatches as stages; it is not in the JSON."""
    words = "compare --pp 8 --microbatches 4 --slices 8 --chunks 2"
    code, text, _ = output(words)
    assert code == 0 and "interleaved cannot run: schedule" in " ".join(text.split())
    code, text, _ = output(f"{words} --json")
    assert "interleaved" not in {row["schedule"] for row in json.loads(text)}


def test_check_verdicts(output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = dumps(full("slimpipe", Shape.uniform(2, 2, slices=4)))
    good, broken, other = tmp_path / "good.txt", tmp_path / "broken.txt", tmp_path / "other.txt"
    good.write_text(text)
    broken.write_text(text.replace("RF0.1.0>0.0 ", "", 1))
    other.write_bytes(b"\xff\xfe\x00")
    code, out, _ = output("check", good)
    assert code == 0 and "slimpipe: valid" in out and out.count("ok") == 4
    code, out, _ = output("check", broken)
    assert code == 1 and "slimpipe: broken" in out and "transfer: device 0.0" in out
    code, out, _ = output("check --json -", broken)
    verdict = json.loads(out)
    assert not verdict["valid"] and verdict["problems"][0]["rule"] == "transfer"
    code, _, err = output("check", other)
    assert code == 2 and "not UTF-8 text" in err
    code, _, err = output("check", tmp_path / "absent.txt")
    assert code == 2 and "neither a file nor a schedule" in err


def test_check_of_all_passes_together(output) -> None:  # type: ignore[no-untyped-def]
    """What is checked is the program with all of its operations, not one before the last pass."""
    code, out, _ = output("check slimpipe --pp 4 --slices 8 --microbatches 2 --exchange-units 2 --offload")
    assert code == 0 and "slimpipe: valid" in out and "problem" not in out


def test_check_transports(output) -> None:  # type: ignore[no-untyped-def]
    """Late receives need one queue per edge."""
    words = "check 1f1b --transfers late --json -"
    code, out, _ = output(words)
    assert code == 1 and json.loads(out)["deadlock"] == {"blocking": True, "rank": True, "pair": True, "edge": False}
    assert output(f"{words} --transport edge")[0] == 0


def test_simulate(output) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = output("simulate 1f1b --pp 2 --microbatches 2 --json")
    data = json.loads(out)
    assert code == 0 and (data["makespan_s"], data["bubble_fraction"]) == (9.0, 0.5)
    tables = ("--layers", "3 2|2 2|1 1", "--replicas", "1 2 1", "--speeds", "1 1 0.5 2")
    words = "simulate ministage --parameters --gather 1 --latency 0.1 --transfer 0.2 --offload --output-share 0.1"
    code, out, _ = output(words, *tables)
    assert code == 0 and "communication" in out and "critical path" in out
    words = "simulate slimpipe --slices 8 --exchange-units 2 --helping --keep-kv --vocabulary"
    code, out, _ = output(f"{words} --attention-share 0.5 --output-share 0.1 --json")
    assert code == 0 and json.loads(out)["bubble_fraction"] < 0.1


def test_show(output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = output("show 1f1b --pp 2 --microbatches 2 --width 27")
    assert code == 0 and out.splitlines()[1] == "1.0 |...F0=B0====F1=B1====......|"
    code, out, _ = output("show zb-v --program-text")
    assert code == 0 and out.startswith("program: zb-v\n") and "placement: v" in out
    code, out, _ = output("show slimpipe --slices 8 --transfers none --exchange-plan")
    assert code == 0 and "1 8 7 6 |" in out
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    assert output("show slimpipe --slices 8 --picture", picture, "--trace", trace)[0] == 0
    assert "<svg" in picture.read_text() and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show slimpipe --pp 4 --slices 6 --chunks 2",), "a multiple of the 4 stages"),
        (("show 1f1b --route", "0 0|0 0|0 0|0 9"), r"route[3][1] = 9"),
        (("show 1f1b --picture a.bmp",), "a.bmp: unknown kind of file"),
        (("simulate 1f1b --latncy 1",), "--latncy is no option of this command, --latency is"),
        (("compare --pp 0 --microbatches 4 --slices 4",), "--pp: '0'"),
        (("compare --pp 2 --microbatches 4 --slices 4 --output-share 1",), "--output-share: '1'"),
    ],
)
def test_bad_arguments(output, arguments: tuple[object, ...], words: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = output(*arguments)
    assert code == 2 and words in err and err.startswith("error: ") and not out


def test_nothing_else_is_replaced(output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A file that the command reads, and one of another kind; its own may be written again."""
    program, plan = tmp_path / "program.txt", tmp_path / "plan.json"
    program.write_text(output("show 1f1b --program-text")[1])
    plan.write_text('{"schedule": {"name": "1f1b"}}')
    for file, words in ((program, "is read by the same command"), (plan, "a file of another kind")):
        before = file.read_bytes()
        for option in ("--json", "--trace"):
            code, out, err = output("simulate", program, option, file)
            assert code == 2 and words in err and not out and file.read_bytes() == before
    assert output("simulate", program, "--trace", plan, "--force")[0] == 0
    check, show, pairs, exchange = (tmp_path / f"{name}.json" for name in ("check", "show", "pairs", "exchange"))
    for own in (
        *(("check", program, "--json", check), ("simulate", program, "--json", show, "--trace", plan)),
        ("show slimpipe --slices 8 --exchange-plan --json", exchange),
        ("compare --pp 2 --microbatches 4 --slices 4 --json", pairs),
    ):
        assert [output(*own)[0] for _ in range(2)] == [0, 0], own


@pytest.mark.parametrize(("module", "words"), [("rich", "check 1f1b"), ("matplotlib", "show 1f1b --picture a.png")])
def test_missing_extras(  # type: ignore[no-untyped-def]
    output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    real = builtins.__import__

    def fake(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == module:
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", fake)
    code, _, err = output(words)
    assert code == 2 and f"pip install {module}" in err


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape.uniform(3, 4, chunks=2)
    program = add_activation_offload(add_parameters(full("ministage", shape), offload=True))
    two = ((0.5, 0.5),) * 3
    memory = Memory(parameter_bytes=((1e9,) * 2,) * 3, activation_bytes=((1e9,) * 2,) * 3)
    result = run(program, gather_s=two, act_offload_s=two, memory=memory)
    for name in ("a.png", "a.svg"):
        draw(result, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"must end in \.svg"):
        draw(result, tmp_path / "a.gif")
    monkeypatch.setattr("matplotlib.pyplot.close", (figures := []).append)
    draw(run(full("1f1b", Shape.uniform(40, 1))), tmp_path / "tall.png")
    (title,) = (text for text in (*figures[0].texts, figures[0].axes[0].title) if text.get_text())
    assert title.get_window_extent().y0 > figures[0].axes[0].get_window_extent().y1


def test_text_picture_is_as_wide_as_asked() -> None:
    for width in (20, 200):
        lines = text_picture(run(full("slimpipe", Shape.uniform(4, 2, slices=8))), width=width).splitlines()
        assert len(lines) == 5 and all(len(line) == width + 6 for line in lines[:4])


def test_chrome_trace() -> None:
    result = run(full("1f1b", Shape.uniform(2, 2)), link=lambda a, b: Link(0.5))
    events = chrome_trace(result, process="predicted")["traceEvents"]
    assert isinstance(events, list)
    assert all(type(e["pid"]) is int and type(e["tid"]) is int for e in events)
    computed = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(computed) == 8 and max(e["ts"] + e["dur"] for e in computed) == pytest.approx(result.makespan_s * 1e6)
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 4
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"predicted 0.0", "predicted 1.0"}
    assert any(e["ph"] == "C" for e in events)


def test_json_is_written_at_once(tmp_path: Path) -> None:
    """A failure leaves the old file and no temporary one."""
    path = tmp_path / "a.json"
    write_json(path, [1])
    with pytest.raises(TypeError):
        write_json(path, [object()])
    assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("words", ["show 1f1b", "check 1f1b", "simulate 1f1b", "simulate zb-v", "compare --slices 2"])
def test_what_is_printed_fits_80_columns(output, words):
    code, out, _ = output(f"{words} --pp 4 --microbatches 8")
    assert code == 0 and max(map(len, out.splitlines())) <= 80


def test_a_reader_that_has_left_is_no_error():
    """As ``| head`` leaves: small outputs are written at the exit only."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "megatron_het.schedule", "show", "1f1b"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, check=False, env=buffered, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
