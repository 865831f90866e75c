"""The report page in a real browser without a network: what it fetches, shows, draws and does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, save_plan
from testing.planner_cases import write_inputs
from tests.functional.browser import Tab, browser, chromium
from tools.planner.__main__ import main
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import estimator_of
from tools.planner.inputs.cluster import load_cluster
from tools.planner.inputs.model import load_model
from tools.planner.report.html import seconds, share, shown, size

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (scripts/install_chromium.sh)")

EVIL = "<img src=x onerror=alert(1)>"
CLUSTER = {
    "name": f"</script><script>document.title='broken'</script>{EVIL}",
    "nodes": [
        {"gpu": "A100-40", "count": 1, "gpus_per_node": 2, "zone": "lab-a", "usd_per_gpu_hour": 3.0},
        {"gpu": "RTX-3090", "count": 2, "gpus_per_node": 1, "zone": "yard-b", "usd_per_gpu_hour": 0.4},
    ],
    "links": [{"between": ["lab", "yard"], "bytes_per_s": 1.0e9, "latency_s": 0.01, "usd_per_gb": 0.02}],
}
MODEL = {"name": f"m & {EVIL}", "num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8}
MODEL |= {"vocab_size": 8192, "seq_length": 512, "global_batch_size": 16, "micro_batch_sizes": [1]}
BOX = "(selector => { const b = document.querySelector(selector).getBoundingClientRect(); return [b.x, b.y, b.width] })"


def two_stages(cluster: str, model: str) -> Plan:
    """Two replicas on the A100, one RTX-3090 before them, and one RTX-3090 that stays unused."""
    estimator = estimator_of(load_cluster(cluster), load_model(model))
    candidate = Candidate((Stage(2, (Group(1, 1, 1),)), Stage(4, (Group(0, 1, 2),))), micro_batch_size=1)
    estimate = estimator.estimate(candidate)
    return build_plan(estimator, candidate, estimate)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a plan with names that try to break it, and what the command printed as JSON."""
    folder = tmp_path_factory.mktemp("page")
    files = [*write_inputs(folder, CLUSTER, MODEL), "--schedules", "1f1b"]
    save_plan(two_stages(str(folder / "c.yaml"), str(folder / "m.yaml")), folder / "p.json")
    with pytest.MonkeyPatch.context() as patch, open(folder / "said.json", "w") as said:
        patch.setattr("sys.stdout", said)
        assert main(["report", str(folder / "p.json"), *files, "--html", str(folder / "r.html"), "--json"]) == 0
    return folder / "r.html", json.loads((folder / "said.json").read_text())


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def test_nothing_is_fetched_and_names_stay_text(made: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    file, _ = made
    tab.requests.clear()
    tab.said.clear()
    tab.open(file)
    assert tab.requests == [file.as_uri()]
    assert tab.said == []
    assert tab.value("document.images.length") == 0
    assert EVIL in tab.value("document.title") and EVIL in tab.value("document.querySelector('h1').textContent")
    # Whatever got in as a script would not run: only the page's own do.
    tab.value("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert tab.value("window.ran") is None
    assert any("Content Security Policy" in text for text in tab.said)


def test_figures_are_those_of_the_json(made: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    file, body = made
    tab.open(file)
    text = tab.value("document.querySelector('main').innerText")
    assert seconds(body["iteration_s"]) in text
    assert shown(body["usd_per_iteration"], "usd") in text
    rows = tab.value("[...document.querySelectorAll('.stage')].map(e => e.innerText)")
    assert len(rows) == len(body["stages"])
    for row, stage in zip(rows, body["stages"], strict=True):
        assert size(stage["total_bytes"]) in row and stage["gpu"] in row and f"{stage['layers']} layers" in row
    squares = tab.value("[...document.querySelectorAll('.gpu')].map(e => e.textContent)")
    assert len(squares) == 4 and len([s for s in squares if s]) == sum(body["gpus"].values())
    tables = tab.value("[...document.querySelectorAll('tbody')].map(e => e.innerText)")
    for compared in body["comparison"]:
        if compared["iteration_s"]:
            assert any(seconds(compared["iteration_s"]) in table for table in tables), compared
    for gain in body["one_more_node"]:
        assert any(f"{100 * gain['change']:+.1f} %" in table and gain["gpu"] in table for table in tables)
    embedded = tab.value("page")
    assert embedded["timelines"][0]["makespan_s"] == pytest.approx(body["iteration_s"])
    compute = {lane["stage"]: lane for lane in embedded["timelines"][0]["lanes"]}
    bars = tab.value("[...document.querySelectorAll('.time')].map(e => e.innerText)")
    assert len(bars) == len(compute)
    # Memory bars are as long as the figures say.
    widths = tab.value(
        "[...document.querySelectorAll('.stage .bar')].map(e => [...e.querySelectorAll('i')].reduce("
        "(a, i) => a + i.getBoundingClientRect().width, 0) / e.getBoundingClientRect().width)"
    )
    wanted = [s["total_bytes"] / s["capacity_bytes"] for s in body["stages"]]
    assert widths == pytest.approx(wanted, abs=0.02)
    assert share(0.1) == "10.0 %"


def test_zoom_move_and_hover(made: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    file, body = made
    tab.open(file)
    window = "document.getElementById('shown-time').textContent"
    whole = tab.value(window)
    pixels = "document.querySelector('canvas').toDataURL()"
    before = tab.value(pixels)
    tab.click("button[data-do=in]")
    tab.frames()
    near = tab.value(window)
    assert near != whole and tab.value(pixels) != before
    tab.click("button[data-do=right]")
    tab.frames()
    assert tab.value(window) not in (near, whole)
    tab.click("button[data-do=all]")
    tab.frames()
    assert tab.value(window) == whole and tab.value(pixels) == before
    # The longest pass of the first device.
    tab.value("document.querySelector('canvas').scrollIntoView({block: 'center'})")
    tab.frames()
    x, y, wide = tab.value(BOX + "('canvas')")
    timeline = tab.value("page.timelines[0]")
    events = timeline["events"]
    passes = {i for i, (_, _, group) in enumerate(timeline["labels"]) if group in ("forward", "backward")}
    mine = [i for i, lane in enumerate(events["lane"]) if lane == 0 and events["label"][i] in passes]
    longest = max(mine, key=lambda i: events["duration"][i])
    middle = (events["start"][longest] + events["duration"][longest] / 2) / (body["iteration_s"] * 1e9)
    gutter = tab.value("document.querySelector('canvas').dataset.gutter")
    tab.mouse("mouseMoved", x + float(gutter) + middle * (wide - float(gutter)), y + 22 + 10)
    tip = tab.value("document.getElementById('tip').innerText")
    assert f"microbatch {events['microbatch'][longest]}" in tip and "activations" in tip, tip
    tab.mouse("mouseWheel", x + wide / 2, y + 40, deltaX=0, deltaY=-300, modifiers=2)
    assert tab.value(window) != whole
    # A GPU says who uses it.
    tab.value("document.querySelector('.gpu.used').scrollIntoView({block: 'center'})")
    x, y, _ = tab.value(BOX + "('.gpu.used')")
    tab.mouse("mouseMoved", x + 9, y + 9)
    assert "rank" in tab.value("document.getElementById('tip').innerText")
    assert tab.value("document.querySelectorAll('.gpu.dim').length") > 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window_in_both_colour_schemes(
    made: tuple[Path, dict[str, Any]], tab: Tab, width: int, scheme: str
) -> None:
    tab.open(made[0], width, 900, scheme)
    assert tab.value("document.documentElement.scrollWidth") <= width
    paper, ink = (tab.value(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    bright = [sum(int(n) for n in colour[4:-1].split(",")) / 3 for colour in (paper, ink)]
    assert (bright[0] > 200 and bright[1] < 60) if scheme == "light" else (bright[0] < 60 and bright[1] > 200)
    assert tab.picture()[:8] == b"\x89PNG\r\n\x1a\n"


def test_on_paper_it_is_light_and_without_controls(made: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    tab.open(made[0], 1280, 900, "dark")
    assert tab.printed().startswith(b"%PDF")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(document.querySelector('.controls')).display") == "none"
    tab.call("Emulation.setDeviceMetricsOverride", width=688, height=974, deviceScaleFactor=1, mobile=False)
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value("getComputedStyle(document.querySelector('.links')).display") != "none"
    joined = """(() => {
        const box = document.querySelector("[data-pool='0']").getBoundingClientRect();
        const line = document.querySelector(".links path").getBoundingClientRect();
        return Math.min(Math.abs(line.x - box.right), Math.abs(line.y - box.bottom), Math.abs(line.bottom - box.y))
    })()"""
    assert tab.value(joined) <= 5, "the line between pools ends at its pool, also at the widths of paper"
    assert tab.value("Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientHeight))") <= 600
    tab.value("dispatchEvent(new Event('afterprint'))")
    tab.call("Emulation.setEmulatedMedia", media="")


def test_no_label_of_a_line_is_hidden_on_a_telephone(made: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    tab.open(made[0], 400, 900)
    hidden = """[...document.querySelectorAll(".links text")].filter(text => {
        const t = text.getBoundingClientRect();
        return [...document.querySelectorAll(".pool")].some(pool => {
            const p = pool.getBoundingClientRect();
            return t.x < p.right && p.x < t.right && t.y < p.bottom && p.y < t.bottom;
        });
    }).length"""
    assert tab.value("document.querySelectorAll('.links text').length") > 0
    assert tab.value(hidden) == 0
