"""Checks the connection of every pair of ranks that transfer, and measures latency and bandwidth.

Every pair gets a communicator of only its two ranks, so that a pair that cannot connect delays only these
two ranks, for a bounded time.  Pairs are measured in rounds: in a round a host takes part in
one pair at most, so that every figure is of a link without other traffic.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megatron_het.doctor.check import Answers, Check, Expectations, Finding, Names, Seat, duration, meet, rate
from megatron_het.lowering.programs import build, choose_transport
from megatron_het.lowering.ranks import boundary_map, edges
from megatron_het.plan import Placement, Plan

_CONNECT_S = 8.0
_PINGS = 12
_SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_LONG_S = 0.08
_BUDGET_S = 35.0
_LATENCY_RATIO, _LATENCY_SLACK_S = 5.0, 2e-4
_FAST_RATIO = 2.0


@dataclass
class Links(Check):
    """Latency and bandwidth of every pair of ranks that the plan's programs send between."""

    slow_ratio: float = 1.5  # a link below the expected bandwidth divided by this is a fault
    expectations: Expectations = field(default_factory=Expectations)
    name: str = field(default="links", init=False)
    limit_s: float = field(default=60.0, init=False)
    needs_all: bool = field(default=True, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Measures this rank's pairs; the lower rank of each pair reports."""
        platform = seat.platform()
        transport = chosen_transport(seat, platform).transport
        rounds = rounds_of(pairs_of(seat.plan), seat.hosts)
        deadline_s = time.monotonic() + _BUDGET_S
        found: dict[str, Any] = {}
        for number, pairs in enumerate(rounds):
            for pair in pairs:
                if seat.rank in pair:
                    result = _measure_pair(seat, pair, transport, platform)
                    if seat.rank == pair[0] or "error" in result:
                        found[f"{pair[0]}-{pair[1]}"] = result
            goes_on = meet(seat, f"round/{number}", time.monotonic() < deadline_s, 3 * _CONNECT_S)
            if goes_on is None:
                raise RuntimeError(f"not all ranks have ended round {number} within {3 * _CONNECT_S:g} s")
            if not goes_on:
                break
        return {"pairs": found, "transport": transport, "wanted": sum(map(len, rounds))}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Returns one finding per bad pair, and one for all good ones."""
        measured: dict[tuple[int, int], dict[str, Any]] = {}
        for answer in answers.values():
            for text, result in answer["pairs"].items():
                one, other = map(int, text.split("-"))
                if "error" in result or (one, other) not in measured:
                    measured[one, other] = result
        found = [f for pair, result in sorted(measured.items()) for f in self._judge_pair(pair, result, names)]
        good = [r for r in measured.values() if "error" not in r]
        first = next(iter(answers.values()))
        if good:
            speeds, latencies = [r["bytes_per_s"] for r in good], [r["latency_s"] for r in good]
            text = (
                f"{len(good)} of {first['wanted']} pairs of neighbouring stages over {first['transport']}: "
                f"{rate(min(speeds))} to {rate(max(speeds))}, latency {duration(min(latencies))} to "
                f"{duration(max(latencies))}"
            )
            found.append(self.ok("all ranks", text))
        elif not first["wanted"]:
            found.append(self.ok("all ranks", "one stage: nothing travels between stages"))
        if len(measured) < first["wanted"]:
            text = f"{first['wanted'] - len(measured)} pairs were not measured within {_BUDGET_S:.0f} s"
            found.append(self.warning("all ranks", text))
        return found

    def _judge_pair(self, pair: tuple[int, int], result: dict[str, Any], names: Names) -> list[Finding]:
        where = f"{names.of([pair[0]])} - {names.of([pair[1]])}"
        if "error" in result:
            hint = "Check the network, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and the firewall between them"
            return [self.fault(where, f"no transfer: {result['error']}", hint)]
        expected = self.expectations.link(*pair)
        if expected is None:
            return []
        speed, promised = result["bytes_per_s"], expected.bytes_per_s
        text = f"{rate(speed)}, and the {expected.source} promises {rate(promised)}"
        found = []
        if speed * self.slow_ratio < promised:
            found.append(self.fault(where, text, "Mend the link, or correct the file and plan again"))
        elif speed > _FAST_RATIO * self.slow_ratio * promised:
            found.append(self.warning(where, text, "A plan of the true figure may be better"))
        if result["latency_s"] > _LATENCY_RATIO * expected.latency_s + _LATENCY_SLACK_S:
            text = f"latency {duration(result['latency_s'])}, and the {expected.source} promises "
            found.append(self.warning(where, text + duration(expected.latency_s)))
        return found


def chosen_transport(seat: Seat, platform: Any) -> Any:
    """The transport that the training would use; raises ValueError if this machine does not support it."""
    return choose_transport(seat.transport, platform.default_backend, platform.has_nccl)


def pairs_of(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of ranks that transfer activations or gradients, the lower rank first."""
    found = edges(list(build(plan).values()), boundary_map(Placement(plan)))
    return sorted({(min(edge), max(edge)) for edge in found})


def rounds_of(pairs: Iterable[tuple[int, int]], hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Pairs in rounds, in each of which a host takes part in one pair at most.

    Pairs of hosts without a measurement come first, so that pairs that remain when time is over are
    between hosts with a known figure.
    """
    left, seen = list(pairs), dict[frozenset[str], int]()
    order = []
    for pair in left:
        ends = frozenset(hosts[rank] for rank in pair)
        seen[ends] = seen.get(ends, 0) + 1
        order.append((seen[ends], pair))
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[str]] = []
    for _, pair in sorted(order):
        here = {hosts[rank] for rank in pair}
        number = next((n for n, taken in enumerate(busy) if not taken & here), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number] |= here
    return rounds


def _measure_pair(seat: Seat, pair: tuple[int, int], transport: str, platform: Any) -> dict[str, Any]:
    """Latency and bandwidth, or the failure; bounded by the timeout of the communicator."""
    end = None
    try:
        end = _End(seat, pair, transport, platform)
        return end.measure()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0][:300]}
    finally:
        if end is not None:
            end.close()


class _End:
    """One end of a ping-pong measurement between two ranks."""

    def __init__(self, seat: Seat, pair: tuple[int, int], transport: str, platform: Any) -> None:
        import torch.distributed as dist

        from megatron_het.store.torch_store import TorchStore

        self._first = seat.rank == pair[0]
        self._me, self._peer = (0, 1) if self._first else (1, 0)
        self._staged, self._platform = transport == "staged", platform
        store = TorchStore(seat.store, _CONNECT_S, name=f"pair/{pair[0]}-{pair[1]}")
        self._store = store  # the group holds its part in C++ only
        timeout = timedelta(seconds=_CONNECT_S)
        self._group: Any
        if transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, self._me, 2, options)
        else:
            self._group = dist.ProcessGroupGloo(store, self._me, 2, timeout)
        self._timeout = timeout

    def measure(self) -> dict[str, Any]:
        """Measures small messages for the latency, then larger ones until one takes long enough."""
        import torch

        small = torch.zeros(1, device=self._platform.device)
        self._ping(small)
        latency_s = min(self._timed(self._ping, small) for _ in range(_PINGS)) / 2  # other work only adds to it
        speed = 0.0
        for size in _SIZES:
            data = torch.zeros(size // 4, device=self._platform.device)
            self._ping(data)
            seconds = min(self._timed(self._ping, data) for _ in range(2)) / 2
            # Both ends must agree on whether to go on: the first one decides.
            go_on = torch.tensor([float(seconds < _LONG_S)], device=self._platform.device)
            self._send(go_on) if self._first else self._receive(go_on)
            speed = max(speed, size / seconds)
            if not go_on.item():
                break
        return {"latency_s": latency_s, "bytes_per_s": speed}

    def close(self) -> None:
        """Destroy the communicator."""
        if hasattr(self._group, "abort"):
            self._group.abort()
        self._group = None

    def _timed(self, work: Callable[[Any], None], tensor: Any) -> float:
        self._platform.synchronize()
        start_s = time.perf_counter()
        work(tensor)
        self._platform.synchronize()
        return time.perf_counter() - start_s

    def _ping(self, tensor: Any) -> None:
        """Send a tensor to the other rank and back."""
        for sends in (self._first, not self._first):
            self._send(tensor) if sends else self._receive(tensor)

    def _send(self, tensor: Any) -> None:
        source = tensor.to("cpu", copy=True) if self._staged else tensor
        self._group.send([source], self._peer, 0).wait(self._timeout)

    def _receive(self, tensor: Any) -> None:
        target = tensor.cpu() if self._staged else tensor
        self._group.recv([target], self._peer, 0).wait(self._timeout)
        if target is not tensor:
            tensor.copy_(target)
