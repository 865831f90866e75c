"""The report page without a browser: what is collected, what is left out of large plans, what is escaped."""

import html.parser
import json
import re

import pytest

from megatron_het.lowering.programs import schedule_shape
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.schedule.cost import Costs, Memory
from megatron_het.schedule.kinds import Kind, Stream
from megatron_het.schedule.simulate import simulate
from tests.unit.planner.emit_plans import MIDDLE
from tools.planner.__main__ import main
from tools.planner.costs.build import build_plan, seats
from tools.planner.costs.candidate import Candidate, Group
from tools.planner.costs.candidate import Stage as Layers
from tools.planner.costs.estimate import estimator_of
from tools.planner.costs.simulation import program_of
from tools.planner.inputs.cluster import cluster_from_document
from tools.planner.inputs.model import model_from_document
from tools.planner.report.collect import COLUMNS, collect, group_of, timeline_of
from tools.planner.report.data import PageData
from tools.planner.report.html import render, seconds, significant, size, usd
from tools.planner.report.tables import summary_tables

CLUSTER = {
    "name": "two zones",
    "nodes": [
        {"gpu": "A100-40", "count": 2, "gpus_per_node": 2, "zone": "lab-a", "network_bytes_per_s": 1e9},
        {"gpu": "RTX-3090", "count": 1, "gpus_per_node": 4, "zone": "lab-b", "network_bytes_per_s": 2e9},
    ],
}
MODEL = {"name": "small", **MIDDLE, "distributed_optimizer": True}


def estimator():
    return estimator_of(cluster_from_document(CLUSTER, "c.yaml"), model_from_document(MODEL, "m.yaml"))


def page_of(candidate: Candidate) -> tuple[PageData, dict, Plan]:
    e = estimator()
    estimate = e.estimate(candidate)
    plan = build_plan(e, candidate, estimate)
    page, body = collect(e, candidate, estimate, plan, seats(e.cluster, candidate.stages, candidate.cp), title="a plan")
    return page, body, plan


PIPELINE = Candidate((Layers(2, (Group(1, 2, 1),)), Layers(4, (Group(0, 1, 4),))), 1, zero_stage=1)


def test_the_page_shows_the_figures_of_the_cost_model():
    page, body, plan = page_of(PIPELINE)
    figures = {f["name"]: f["value"] for f in page["figures"]}
    assert figures["Iteration"] == body["iteration_s"] == page["timelines"][0]["makespan_s"]
    assert figures["Price of an iteration"] == body["usd_per_iteration"]
    assert [r["memory_bytes"] for r in page["stages"]] == [r["memory_bytes"] for r in body["stages"]]
    for lane in page["timelines"][0]["lanes"]:
        assert lane["compute_s"] + sum(lane["idle_s"].values()) == pytest.approx(body["iteration_s"])
    lanes = page["timelines"][0]["lanes"]
    for row in page["stages"]:  # of the same simulation: no stage computes longer than the iteration
        assert row["busy_s"] == max(lane["compute_s"] for lane in lanes if lane["stage"] == row["stage"])
    held = [g for pool in page["cluster"]["pools"] for node in pool["nodes"] for g in node["gpus"]]
    assert sorted(g[2] for g in held if g) == list(range(plan.world_size))
    assert sum(not g for g in held) == 2


def test_the_settings_name_what_the_search_has_chosen():
    plain = Candidate((Layers(3, (Group(0, 2, 1),)), Layers(3, (Group(1, 2, 1),))), 1, zero_stage=1)
    split = plain.with_(rows=((0.5, 0.5), (0.5, 0.5)), host_activations=0.5)
    sliced = plain.with_(schedule="slimpipe", slices=4, exchange=True)
    settings = [page_of(c)[0]["subtitle"].split(": ")[1].split("; ")[0] for c in (plain, split, sliced)]
    assert settings == [
        "1f1b, micro batch 1, recompute none",
        "1f1b, micro batch 1, recompute none, split vocabulary, 50 % of activations offloaded",
        "slimpipe, micro batch 1, recompute none, 4 slices per sequence, exchange",
    ]
    divided = plain.with_(stages=(Layers(6, (Group(0, 1, 1),)),), cp=2)
    page, body, _ = page_of(divided)
    assert page["subtitle"].split("; ")[0].endswith("recompute none, cp2")
    (where,) = (t for t in summary_tables(body) if getattr(t, "title", None) == "Stages")
    assert [column.header for column in where.columns][2:4] == ["TP", "CP"] and "1 × 2 A100-40 · CP 2" in render(page)


def test_what_flows_between_nodes():
    """Activations once, gradients once per microbatch; the ring of the second stage through its two nodes."""
    page, _, _ = page_of(PIPELINE)
    boundary = 512 * 512 * 2
    links = {(link["first"], link["second"]): link for link in page["cluster"]["links"]}
    assert links[0, 1]["transfer_bytes"] == 2 * 16 * boundary and links[0, 1]["collective_bytes"] == 0
    unit = estimator().unit(0, 1, 1, "none")
    parameters = 4 * unit.layer_parameters + unit.head_parameters
    # Reduce-scatter in fp32 and all-gather in bf16, 3/4 of them each over 4 replicas, from both nodes to the other.
    assert links[0, 0]["collective_bytes"] == pytest.approx(2 * 0.75 * parameters * (4 + 2))
    assert links[0, 0]["transfer_bytes"] == 0
    makespan = page["timelines"][0]["makespan_s"]
    assert links[0, 0]["load"] == pytest.approx(0.75 * parameters * 6 / (1e9 * makespan))
    nodes = page["cluster"]["pools"][0]["nodes"]
    assert nodes[0]["sent_bytes"] == pytest.approx(0.75 * parameters * 6 + 8 * boundary)


def test_gathers_of_a_parameter_window_are_counted():
    windows = Candidate((Layers(6, (Group(0, 1, 4),)),), 1, schedule="ministage", chunks=3, zero_stage=1)
    page, _, plan = page_of(windows)
    gathers = sum(op.kind is Kind.PARAM_GATHER for op in program_of(plan).ops[0])
    parameters = estimator().unit(0, 1, 1, "none")
    whole = 6 * parameters.layer_parameters + parameters.embedding_parameters + parameters.head_parameters
    (link,) = page["cluster"]["links"]
    assert gathers >= 3
    assert link["collective_bytes"] >= 2 * 0.75 * whole * (2 + 4)
    groups = {group for _, _, group in page["timelines"][0]["labels"]}
    assert "collective" in groups


def big(stages: int, replicas: int, microbatches: int) -> Plan:
    each = range(replicas)
    rows = []
    for s in range(stages):
        mine = [Replica((s * replicas + q,), tuple(range(q, microbatches, replicas))) for q in each]
        rows.append(Stage((1,), tuple(mine)))
    return Plan(ModelShape(stages, 64, 4, 4, 64), TrainingShape(1, microbatches), tuple(rows), ScheduleSpec("1f1b"))


def simulated(plan: Plan):
    devices = len(schedule_shape(plan).devices)
    costs = Costs(((1.0,),) * devices, ((2.0,),) * devices, message_bytes=8.0, memory=Memory(((5.0,),) * devices))
    return simulate(program_of(plan), costs)


def test_large_plans_are_cut_and_the_page_says_so():
    result = simulated(big(4, 6, 24))
    names = [str(d) for d in result.program.devices]
    whole = timeline_of(result, "t", names)
    assert whole["left_out"] == [] and len(whole["lanes"]) == 24
    columns = whole["events"]
    assert set(columns) == set(COLUMNS) and len({len(c) for c in columns.values()}) == 1
    assert columns["lane"].count(0) == 2 * 4
    fewer = timeline_of(result, "t", names, max_lanes=9)
    assert len(fewer["lanes"]) == 9 and {lane["stage"] for lane in fewer["lanes"]} == {0, 1, 2, 3}
    assert fewer["left_out"] == ["9 of 24 replicas are drawn: the first ones of every stage"]
    short = timeline_of(result, "t", names, max_events=50)
    assert len(short["events"]["lane"]) == 50 and "50 of 192 computations" in short["left_out"][-1]
    assert "before" in short["left_out"][-1]
    few = timeline_of(result, "t", names, max_lanes=3)
    assert len(few["lanes"]) == 3 and "first 3 of 4 stages" in few["left_out"][0]


def test_every_kind_of_operation_has_a_colour():
    assert {group_of(kind) for kind in Kind} <= {
        "forward", "backward", "weight gradient", "other compute", "transfer", "collective", "host copy",
    }  # fmt: skip
    assert group_of(Kind.BACKWARD_WEIGHT) == "weight gradient" and group_of(Kind.BACKWARD_INPUT) == "backward"
    assert all(group_of(kind) == "transfer" for kind in Kind if kind.stream in (Stream.SEND, Stream.RECEIVE))


NASTY = "</script><img src=x onerror=alert(1)>&\"'\u2028"


class Elements(html.parser.HTMLParser):
    """All elements and attributes of a document, and the text that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_names_cannot_break_the_page():
    page = page_of(PIPELINE)[0]
    page["title"] = page["subtitle"] = NASTY
    page["notes"] = [NASTY]
    page["cluster"]["name"] = page["cluster"]["zones"][0]["name"] = NASTY
    page["cluster"]["pools"][0]["nodes"][0]["name"] = page["cluster"]["pools"][0]["gpu"] = NASTY
    page["stages"][0]["gpu"] = page["stages"][0]["zone"] = page["stages"][0]["note"] = NASTY
    page["stages"][0]["memory_bytes"][NASTY] = 5.0
    page["timelines"][0]["lanes"][0]["name"] = page["timelines"][0]["title"] = NASTY
    text = render(page)
    found = Elements()
    found.feed(text)
    assert "img" not in found.names and found.names.count("script") == 4
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    body = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.DOTALL).group(1)
    assert json.loads(body)["title"] == NASTY
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text.replace("http://www.w3.org/2000/svg", ""))


def test_figures_as_people_read_them():
    assert [significant(v) for v in (0, 0.1234, 7.0, 43.89, 248.482, 71546.2)] == [
        "0", "0.123", "7.00", "43.9", "248", "71,546",
    ]  # fmt: skip
    assert [seconds(v) for v in (7.328, 0.0121, 4.5e-5, 0)] == ["7.33 s", "12.1 ms", "45.0 µs", "0 s"]
    assert [size(v) for v in (100, 3 << 30)] == ["100 B", "3.00 GiB"] and usd(248.48) == "$ 248.48"


def test_a_number_that_json_has_no_text_for_is_refused():
    page = page_of(PIPELINE)[0]
    page["timelines"][0]["makespan_s"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        render(page)


def test_report_refuses_what_is_no_page(tmp_path, capsys):
    words = ["report", "p.json", "--cluster", "c.yaml", "--model", "m.yaml", "--html", str(tmp_path / "r.pdf")]
    assert main(words) == 2
    assert "--html" in capsys.readouterr().err
