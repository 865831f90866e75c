"""The cost model: against published runs, against the simulator, and its parts against enumeration."""

from itertools import product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.planner.accuracy import compare
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.catalog import catalog
from tools.planner.cluster import Cluster, NodeGroup
from tools.planner.estimate import Estimator, allocate
from tools.planner.layercost import CatalogCosts, MeasuredCosts
from tools.planner.model import Model
from tools.planner.reference import measured_runs, reference_model, reference_nodes, reference_profile
from tools.planner.simulation import simulate_block


def test_published_runs_are_predicted():
    """Bars: 5 % mean error for time and memory, no memory underestimate above 5 %."""
    found = compare()
    assert len(found) == 14
    assert mean(abs(c.time_error) for c in found) <= 0.05
    memory = [c.memory_error for c in found if c.memory_error is not None]
    assert mean(abs(e) for e in memory) <= 0.05
    assert min(memory) >= -0.05


def test_constants_are_not_per_run():
    """Scaling one run's measurement must not change any prediction."""
    before = [(c.iteration_s, c.memory_bytes) for c in compare()]
    runs = measured_runs()
    object.__setattr__(runs[0], "iteration_s", 10 * runs[0].iteration_s)
    assert [(c.iteration_s, c.memory_bytes) for c in compare(runs=runs)] == before


@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_allocation_is_optimal(kinds, total):
    """No other division of the microbatches has an earlier slowest replica."""
    times, counts = [t for t, _ in kinds], [n for _, n in kinds]
    found = allocate(times, counts, total)
    replicas = [t for t, n in kinds for _ in range(n)]
    if found is None:
        assert total < len(replicas) or _best(replicas, total) is None
        return
    slowest, largest = found
    assert sum(n * k for n, k in zip(counts, largest)) >= total
    best = _best(replicas, total)
    if best is not None:
        assert slowest <= best * (1 + 1e-9)


def _best(replicas, total):
    """Shortest slowest time when every replica gets at least one, by growing greedily (exact for equal jobs)."""
    if total < len(replicas):
        return None
    share = [1] * len(replicas)
    for _ in range(total - len(replicas)):
        i = min(range(len(replicas)), key=lambda i: (share[i] + 1) * replicas[i])
        share[i] += 1
    return max(k * t for k, t in zip(share, replicas))


def gcp() -> Estimator:
    model = reference_model("OPT-350", 64)
    cluster = Cluster(nodes=(reference_nodes("A100-40", 8), reference_nodes("V100-16", 8)))
    return Estimator(cluster, model, MeasuredCosts(model, reference_profile("OPT-350"), lambda g: catalog()[g]), memory_margin=99)


@pytest.mark.parametrize(
    ("stages", "changes"),
    [
        ([(24, 0, 1, 8)], {}),
        ([(14, 0, 1, 4), (10, 1, 1, 16)], {}),
        ([(12, 0, 2, 4), (12, 0, 2, 4)], {}),
        ([(6, 1, 1, 1)] * 4, {}),
        ([(6, 1, 1, 1)] * 4, {"schedule": "interleaved", "chunks": 2}),
        ([(6, 1, 1, 1)] * 4, {"schedule": "slimpipe", "slices": 8}),
        ([(12, 0, 1, 2), (12, 0, 1, 2)], {"schedule": "ministage", "chunks": 3, "zero_stage": 1}),
    ],
)
def test_closed_form_agrees_with_the_simulator(stages, changes):
    """Within 2 % for plans with matching stages."""
    estimator = gcp()
    candidate = Candidate(tuple(Stage(n, (Group(p, tp, k),)) for n, p, tp, k in stages), 1, **changes)
    estimate = estimator.estimate(candidate)
    simulated = simulate_block(estimator, candidate, estimate)
    assert estimate.iteration_s == pytest.approx(simulated.iteration_s, rel=0.02)
    if candidate.schedule == "1f1b":
        assert max(m.total_bytes for m in estimate.memory) == pytest.approx(max(simulated.peak_bytes), rel=0.02)


def test_more_layers_cost_more_time_and_memory():
    estimator = gcp()
    small = estimator.estimate(Candidate((Stage(10, (Group(0, 1, 2),)), Stage(14, (Group(1, 1, 4),))), 1))
    large = estimator.estimate(Candidate((Stage(14, (Group(0, 1, 2),)), Stage(10, (Group(1, 1, 4),))), 1))
    assert large.stage_busy_s[0] > small.stage_busy_s[0]
    assert large.memory[0].total_bytes > small.memory[0].total_bytes


def test_a_precision_that_the_gpu_lacks():
    """V100 and T4 have no bf16: no figures, so no plan uses them."""
    model = Model(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=1000,
                  seq_length=128, global_batch_size=4, precision="bf16")
    cluster = Cluster(nodes=(NodeGroup(gpu="V100-16", count=1, gpus_per_node=4), NodeGroup(gpu="A100-40", count=1, gpus_per_node=4)))
    estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]))
    assert estimator.unit(0, 1, 1, "none") is None
    assert estimator.unit(1, 1, 1, "none") is not None


def test_flash_attention_is_for_half_precision():
    """In fp32 and TF32 an A100 materialises attention matrices; SlimPipe's own kernels do not in any precision."""
    def costs(precision: str, attention: str) -> CatalogCosts:
        model = Model(num_layers=2, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, vocab_size=1000,
                      seq_length=4096, global_batch_size=4, precision=precision, attention=attention)
        return CatalogCosts(model, lambda g: catalog()[g])

    for precision in ("fp32", "tf32", "fp16", "bf16"):
        default, fused, unfused = (costs(precision, a) for a in ("flash", "fused", "unfused"))
        mine = default.cost("A100-40", "layer", 1, 1, "none")
        expected = fused if precision in ("fp16", "bf16") else unfused
        assert mine == expected.cost("A100-40", "layer", 1, 1, "none") and fused.fused("A100-40")
        sliced = mine.activation_bytes * default.sliced_share("A100-40", 1, 1, "none")
        assert sliced == pytest.approx(fused.cost("A100-40", "layer", 1, 1, "none").activation_bytes)


def test_memory_of_the_catalog_follows_recompute_and_zero():
    model = Model(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, vocab_size=1000,
                  seq_length=1024, global_batch_size=16, distributed_optimizer=True)
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-40", count=1, gpus_per_node=8),))
    estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]))
    size = {}
    for recompute, zero in product(("none", "full"), (0, 1)):
        found = estimator.estimate(Candidate((Stage(8, (Group(0, 1, 8),)),), 2, recompute, zero_stage=zero))
        size[recompute, zero] = found.memory[0].total_bytes
    assert size["full", 0] < size["none", 0]
    assert size["none", 1] < size["none", 0]
    assert size["none", 0] - size["none", 1] == pytest.approx(12 * model.parameters * 7 / 8, rel=0.1)


def test_plain_zero_2_holds_less_and_reduces_after_every_microbatch():
    """Gradients are sharded; over a slow network the reduction of every microbatch outlasts its backward."""
    model = Model(num_layers=8, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=16, vocab_size=1000,
                  seq_length=512, global_batch_size=32, distributed_optimizer=True, micro_batch_sizes=(1,))
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-40", count=8, gpus_per_node=1, network_bytes_per_s=1e9),))
    estimator = Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]))
    found = [estimator.estimate(Candidate((Stage(8, (Group(0, 1, 8),)),), 1, zero_stage=z)) for z in (1, 2, 3)]
    assert found[1].memory[0].gradient_bytes < found[0].memory[0].gradient_bytes / 4
    assert found[2].memory[0].parameter_bytes < found[1].memory[0].parameter_bytes
    assert found[0].iteration_s < found[1].iteration_s < found[2].iteration_s


def test_slack_is_priced_in_time_and_memory():
    """A fast stage before a wide slow one: more in flight is faster and larger, and both figures follow the simulator."""
    estimator = gcp()
    times, memory = [], []
    for slack in (0.0, 0.5, 1.0):
        candidate = Candidate((Stage(14, (Group(0, 1, 4),)), Stage(10, (Group(1, 1, 16),))), 1, slack=slack)
        estimate = estimator.estimate(candidate)
        simulated = simulate_block(estimator, candidate, estimate)
        assert estimate.iteration_s == pytest.approx(simulated.iteration_s, rel=0.02)
        assert max(m.total_bytes for m in estimate.memory) == pytest.approx(max(simulated.peak_bytes), rel=0.02)
        times.append(estimate.iteration_s)
        memory.append(max(m.total_bytes for m in estimate.memory))
    assert times[0] > times[1] > times[2]
    assert memory[0] < memory[1] < memory[2]
