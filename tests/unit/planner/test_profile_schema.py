"""Profiles: round trip, and strict reading that names file, key and value."""

import json
from dataclasses import asdict

import pytest

from tools.planner.errors import PlannerError
from tools.planner.inputs.profile_schema import (
    DeviceProfile,
    LargestBatch,
    LayerTiming,
    LinkProfile,
    Profile,
    ProfiledModel,
    load_profile,
    profile_from_document,
    save_profile,
)


def example() -> Profile:
    model = ProfiledModel(64, 256, 4, 4, 512, 128, "fp32", "tiny")
    timing = LayerTiming("layer", 2, 1, 128, 0.01, 0.02, 0.001, 50_000, 1 << 20, 64 * 128 * 8)
    link = LinkProfile("network", "a", "b", "p2p", 2, 1e-5, 1e9, [(1024, 1.1e-5)])
    device = DeviceProfile("a", 1 << 30, 4, [timing], [LargestBatch(1, 1, 8)])
    return Profile(model, [device], [link])


def test_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(example(), path)
    assert load_profile(path) == example()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda d: d["devices"][0]["timings"][0].update(forward_s=-1.0), "devices[0].timings[0].forward_s"),
        (lambda d: d["devices"][0]["timings"][0].pop("tp"), "devices[0].timings[0].tp"),
        (lambda d: d["devices"][0].update(colour="red"), "devices[0].colour"),
        (lambda d: d["links"][0].update(bytes_per_s=0), "links[0].bytes_per_s"),
        (lambda d: d["links"][0].update(operation="gossip"), "links[0].operation"),
        (lambda d: d["model"].update(precision="fp7"), "model.precision"),
        (lambda d: d["devices"].append(d["devices"][0]), "devices[1].kind"),
        (
            lambda d: d["devices"][0]["timings"].append({**d["devices"][0]["timings"][0], "forward_s": 0.02}),
            "devices[0].timings[1]",
        ),
        (lambda d: d.update(version=99), "version"),
        (lambda d: d.update(format="other"), "format"),
    ],
)
def test_bad_profiles_name_the_key(tmp_path, change, key):
    path = tmp_path / "profile.json"
    save_profile(example(), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(PlannerError) as caught:
        load_profile(path)
    assert caught.value.key == key
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)


def test_other_points_of_the_same_layer_are_kept(tmp_path):
    document = json.loads(json.dumps(asdict(example())))
    timings = document["devices"][0]["timings"]
    for change in (
        {"tp": 2},
        {"micro_batch_size": 4},
        {"recompute": "full"},
        {"slice_tokens": 64, "context_tokens": 64},
    ):
        timings.append({**timings[0], **change})
    profile = profile_from_document({"format": "megatron_het.profile", "version": 1, **document}, "p.json")
    assert len(profile.devices[0].timings) == 5


def test_truncated_and_missing_files(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(PlannerError, match="no such file"):
        load_profile(path)
    path.write_text('{"format": ')
    with pytest.raises(PlannerError, match="truncated"):
        load_profile(path)
