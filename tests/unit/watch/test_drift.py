"""What drifted is named, whatever else is noisy: devices, single operations, links, figures of a whole kind."""

from __future__ import annotations

import random
from collections.abc import Callable

from megatron_het.watch.drift import DriftWatch, Finding, Subject, lower_median

_OPERATIONS = {"FORWARD": 0.10, "BACKWARD": 0.20}


def _devices(*kinds: str) -> list[Subject]:
    return [Subject(f"rank {i}", "device", kind, _OPERATIONS) for i, kind in enumerate(kinds)]


def _link() -> Subject:
    return Subject("rank 0 -> rank 1", "link", "a -> a", {"transfer": 0.002}, ends=("rank 0", "rank 1"))


Figures = Callable[[int, int, str], float]
"""(iteration, device, operation) -> measured over predicted."""


def _follow(
    watch: DriftWatch, devices: int, figures: Figures, transfer: Callable[[int], float], until: int = 40
) -> list[Finding]:
    draw = random.Random(1)
    found = []
    for iteration in range(1, until + 1):
        rows = {
            f"rank {d}": {
                op: seconds * figures(iteration, d, op) * draw.uniform(0.97, 1.03)
                for op, seconds in _OPERATIONS.items()
            }
            for d in range(devices)
        }
        found += watch.add(iteration, 0.4, rows, {"rank 0 -> rank 1": (transfer(iteration), 8.0)})
    return found


def test_nothing_is_found_where_all_is_as_planned() -> None:
    watch = DriftWatch([*_devices("a", "a", "b"), _link()])
    assert not _follow(watch, 3, lambda i, d, op: 1.0, lambda i: 0.002)


def test_a_device_that_slows_down_is_named_within_few_iterations() -> None:
    watch = DriftWatch([*_devices("a", "a", "b"), _link()])
    found = _follow(watch, 3, lambda i, d, op: 2.0 if d == 1 and i >= 20 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name) for f in found] == [("device", "rank 1")]
    assert found[0].since == 20 and found[0].found <= 23
    assert 1.9 < found[0].factor < 2.1
    assert "rank 1" in found[0].text() and "since iteration 20" in found[0].text()


def test_the_only_device_of_its_kind_is_named_too() -> None:
    watch = DriftWatch([*_devices("a", "b"), _link()])
    found = _follow(watch, 2, lambda i, d, op: 1.5 if d == 1 and i >= 20 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name) for f in found] == [("device", "rank 1")]


def test_a_drift_that_ends_is_over() -> None:
    watch = DriftWatch([*_devices("a", "b"), _link()])
    found = _follow(watch, 2, lambda i, d, op: 1.5 if d == 1 and 15 <= i < 25 else 1.0, lambda i: 0.002)
    assert [f.name for f in found] == ["rank 1", "rank 1"] and found[0] is found[1]
    assert found[1].ended is not None and 25 <= found[1].ended <= 30
    assert not watch.active


def test_a_single_long_iteration_says_nothing() -> None:
    watch = DriftWatch([*_devices("a", "b"), _link()])
    assert not _follow(watch, 2, lambda i, d, op: 9.0 if i % 10 == 9 else 1.0, lambda i: 0.002)


def test_one_kind_of_operation_on_one_device() -> None:
    watch = DriftWatch([*_devices("a", "a", "a"), _link()])
    slow = {(2, "BACKWARD")}
    found = _follow(watch, 3, lambda i, d, op: 1.6 if (d, op) in slow and i >= 15 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name, f.operation) for f in found] == [("operation", "rank 2", "BACKWARD")]


def test_a_wrong_profile_is_one_of_a_kind_and_an_operation() -> None:
    watch = DriftWatch([*_devices("a", "a", "b"), _link()])
    found = _follow(watch, 3, lambda i, d, op: 1.5 if op == "BACKWARD" and d < 2 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name, f.operation, f.since) for f in found] == [("profile", "a", "BACKWARD", 0)]


def test_a_wrong_profile_of_all_operations_and_a_slow_device_are_told_apart() -> None:
    watch = DriftWatch([*_devices("a", "a", "a"), _link()])
    found = _follow(watch, 3, lambda i, d, op: (2.0 if d == 0 and i >= 20 else 1.0) * 0.5, lambda i: 0.002)
    assert [(f.what, f.name, f.operation) for f in found] == [("profile", "a", ""), ("device", "rank 0", "")]
    assert 0.45 < found[0].factor < 0.55 and 1.9 < found[1].factor < 2.1


def test_a_device_that_is_slow_from_the_start_is_not_a_wrong_profile() -> None:
    watch = DriftWatch([*_devices("a", "a", "a"), _link()])
    found = _follow(watch, 3, lambda i, d, op: 2.0 if d == 1 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name, f.since) for f in found] == [("device", "rank 1", 0)]


def test_all_devices_of_a_kind_that_slow_down_together() -> None:
    watch = DriftWatch([*_devices("a", "a", "b"), _link()])
    found = _follow(watch, 3, lambda i, d, op: 1.5 if d < 2 and i >= 20 else 1.0, lambda i: 0.002)
    assert [(f.what, f.name) for f in found] == [("profile", "a")]


def test_a_slow_link_is_named_and_no_device() -> None:
    watch = DriftWatch([*_devices("a", "a"), _link()])
    found = _follow(watch, 2, lambda i, d, op: 1.0, lambda i: 0.02 if i >= 20 else 0.002)
    assert [(f.what, f.name, f.since) for f in found] == [("link", "rank 0 -> rank 1", 20)]


def test_a_link_to_a_slow_device_is_not_named() -> None:
    watch = DriftWatch([*_devices("a", "a"), _link()])
    found = _follow(
        watch,
        2,
        lambda i, d, op: 2.0 if d == 1 and i >= 20 else 1.0,
        lambda i: 0.02 if i >= 19 else 0.002,  # its window is full of it before that of the device
    )
    assert [(f.what, f.name) for f in found] == [("device", "rank 1")]


def test_a_link_that_costs_next_to_nothing_is_not_named() -> None:
    watch = DriftWatch([*_devices("a", "a"), _link()])
    assert not _follow(watch, 2, lambda i, d, op: 1.0, lambda i: 0.003 if i >= 20 else 0.002)


def test_the_lower_median() -> None:
    assert lower_median([3.0, 1.0]) == 1.0
    assert lower_median([3.0, 1.0, 2.0]) == 2.0
    assert lower_median([4.0, 3.0, 1.0, 2.0]) == 2.0


def test_a_link_that_is_waited_for_late_is_slow_since_then() -> None:
    links = [Subject(f"rank {a} -> rank {b}", "link", "a -> a", {"transfer": 0.002}) for a, b in ((0, 1), (1, 2))]
    watch = DriftWatch(links)
    found = []
    for iteration in range(3, 20):
        rows = {"rank 1 -> rank 2": (0.002, 8.0)}
        if iteration in (6, 9) or iteration >= 14:  # before it is slow, somebody waits for it now and then
            rows["rank 0 -> rank 1"] = (0.002 if iteration < 14 else 0.06, 8.0)
        found += watch.add(iteration, 0.4, {}, rows)
    assert [(f.what, f.name, f.since) for f in found] == [("link", "rank 0 -> rank 1", 14)]


def test_a_link_that_always_was_slow_is_slow_since_the_start() -> None:
    links = [Subject(f"rank {a} -> rank {b}", "link", "a -> a", {"transfer": 0.002}) for a, b in ((0, 1), (1, 2))]
    watch = DriftWatch(links)
    found = []
    for iteration in range(3, 20):
        rows = {"rank 1 -> rank 2": (0.002, 8.0), "rank 0 -> rank 1": (0.06, 8.0)}
        found += watch.add(iteration, 0.4, {}, rows)
    assert [(f.what, f.name, f.since) for f in found] == [("link", "rank 0 -> rank 1", 0)]
