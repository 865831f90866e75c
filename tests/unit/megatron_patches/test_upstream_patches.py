"""The patches of the project against the installed Megatron."""

import subprocess
import sys
import unittest.mock
from types import SimpleNamespace

import pytest
import torch

from megatron_het import device as platform
from megatron_het import megatron_patches as upstream
from megatron_het.arguments import hooks
from megatron_het.families import GPT, HYBRID
from megatron_het.features import FEATURES
from megatron_het.megatron_patches import patches
from megatron_het.megatron_patches.patches import uses_torch_adam
from megatron_het.megatron_patches.releases import RELEASES, Release, installed_release
from megatron_het.plan import ScheduleSpec
from megatron_het.plan.run_config import HetConfig, plan_from_flags

platform.activate()  # before Megatron is imported, which binds what the platform replaces

import megatron.core.optimizer  # noqa: E402
from megatron.core.datasets import utils  # noqa: E402
from megatron.core.models.backends import WrappedTorchNorm  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.package_info import __shortversion__  # noqa: E402


@pytest.fixture
def clean():
    before = set(upstream.installed())
    yield
    names = [name for name in upstream.installed() if name not in before]
    if names:
        upstream.uninstall(*names)


@pytest.mark.parametrize("name", sorted(upstream.all_patches()))
def test_upstream_is_what_the_patch_was_written_for(name):
    patch = upstream.all_patches()[name]
    assert upstream.moved(patch.sources) == {}, (
        f"upstream moved under patch {name}; read the change, then see "
        "`python -m megatron_het.megatron_patches` for the new hashes"
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_upstream_is_what_the_features_lean_on(feature):
    assert upstream.moved(feature.upstream_names) == {}, (
        f"upstream moved under the feature {feature.name}; read the change, then see "
        "`python -m megatron_het.megatron_patches` for the new hashes"
    )


def test_what_the_parameter_window_leans_on_is_watched():
    window = next(feature for feature in FEATURES if feature.name == "window")
    watched = {dotted.rpartition(".")[2] for dotted in window.upstream_names}
    assert {
        "get_grads_for_grad_norm",
        "_filter_grads_for_norm",
        "_get_model_param_range_map",
        "build_distributed_models",
    } <= watched


def test_a_run_with_a_feature_stops_when_upstream_moved_under_it(monkeypatch):
    window = next(feature for feature in FEATURES if feature.name == "window")
    name = "megatron.core.optimizer.optimizer.MegatronOptimizer._filter_grads_for_norm"
    monkeypatch.setattr(type(window), "upstream_names", {**window.upstream_names, name: "0" * 64})
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    words = [*flags.split(), "--untie-embeddings-and-output-weights", "--use-distributed-optimizer"]
    plan, _ = plan_from_flags(words, 1, ScheduleSpec("ministage", {"window": True}))
    with pytest.raises(upstream.PatchError, match="the feature window.*_filter_grads_for_norm is different"):
        hooks._install_plan(HetConfig(plan=plan), platform.activate(), None, None)


def test_installed_release_is_the_one_the_patches_name():
    # Not __version__, which ends in a commit where .venv lies inside a git checkout.
    assert __shortversion__ == installed_release().version
    assert {patch.version for patch in upstream.all_patches().values()} <= {
        upstream.UPSTREAM_VERSION,
        installed_release().version,
    }


def test_every_release_names_only_what_is_watched_and_what_differs():
    named = [p.sources for p in upstream.all_patches().values()] + [f.upstream_names for f in (*FEATURES, GPT, HYBRID)]
    watched = {dotted: value for names in named for dotted, value in names.items()}
    for release in RELEASES:
        assert release.changed.keys() <= watched.keys()
        assert all(watched[dotted] != value for dotted, value in release.changed.items())
    assert not RELEASES[0].changed


def test_sources_are_those_of_the_installed_release(monkeypatch):
    dotted = "megatron.training.pretrain"
    first = upstream.all_patches()["plan_pretrain"].sources[dotted]
    other = Release("0.20", "0.20.0", "elsewhere", {dotted: "0" * 64})
    monkeypatch.setattr(upstream, "installed_release", lambda: other)
    assert upstream.moved({dotted: first}) == {dotted: upstream.source_hash(dotted)}
    monkeypatch.setattr(upstream, "installed_release", lambda: RELEASES[0])
    assert upstream.moved({dotted: "0" * 64}) == {dotted: upstream.source_hash(dotted)}
    earlier = Release("0.19", "0.19.2", "elsewhere", earlier={dotted: upstream.source_hash(dotted)})
    monkeypatch.setattr(upstream, "installed_release", lambda: earlier)
    assert upstream.moved({dotted: "0" * 64}) == {}


def test_upstream_is_what_the_families_lean_on():
    assert upstream.moved(HYBRID.upstream_names) == {}


def test_later_tokens_of_0_20_need_no_transformer_engine():
    """Whose classes are stand-ins there, of which nothing can be an instance."""
    patch = next(patch for patch in patches.OF_RELEASES["0.20"] if patch.name == "inference_layers")

    def original(module):
        return isinstance(module, unittest.mock.MagicMock())

    with pytest.raises(TypeError):
        original(torch.nn.Linear(1, 1))
    assert patch.build(original)(torch.nn.Linear(1, 1)) is False
    assert (patch.name in upstream.all_patches()) == (installed_release().name == "0.20")


def test_few_patches():
    """Ten for every release, and one more that goes with a release."""
    of_release = {patch.name for several in patches.OF_RELEASES.values() for patch in several}
    assert len(upstream.all_patches().keys() - of_release) <= 10
    assert len(of_release) <= 1


def test_listing_patches_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_het import megatron_patches; megatron_patches.all_patches(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron.core')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def _norm_config(**changes):
    values = {
        "layernorm_zero_centered_gamma": False,
        "persist_layer_norm": False,
        "sequence_parallel": True,
        "memory_efficient_layer_norm": False,
        "normalization": "RMSNorm",
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_weights_are_marked_for_sequence_parallel(clean, kind):
    config = _norm_config(normalization=kind)
    upstream.uninstall("torch_norm")
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config=config, hidden_size=8, eps=1e-5)
    upstream.install("torch_norm")
    norm = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-3)
    assert type(norm).__name__ == kind and norm.eps == 1e-3
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert config.sequence_parallel is True


def test_norms_without_sequence_parallel_are_unmarked_and_other_checks_stay(clean):
    upstream.install("torch_norm")
    norm = WrappedTorchNorm(_norm_config(sequence_parallel=False), 8)
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in norm.parameters())
    with pytest.raises(AssertionError, match="persist_layer_norm"):
        WrappedTorchNorm(_norm_config(persist_layer_norm=True), 8)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_weights_centred_at_zero_scale_by_one_more(clean, kind, sequence_parallel):
    config = _norm_config(normalization=kind, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=True)
    upstream.uninstall("torch_norm")
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        WrappedTorchNorm(config=config, hidden_size=8)
    upstream.install("torch_norm")
    norm = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-3)
    assert not any(parameter.any() for parameter in norm.parameters())
    assert all(hasattr(p, "sequence_parallel") is sequence_parallel for p in norm.parameters())
    plain = getattr(torch.nn, kind)(8, eps=1e-3)
    assert list(norm.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(norm(x), plain(x))
    with torch.no_grad():
        norm.weight += torch.arange(8.0)
        plain.weight += torch.arange(8.0)
    assert torch.equal(norm(x), plain(x))


def test_dataset_helpers_are_not_compiled_again(clean, monkeypatch):
    def make(*args, **kwargs):
        raise AssertionError("make was run")

    if not upstream.all_patches()["dataset_helpers"].applies():
        pytest.skip("helpers_cpp is not compiled here")
    upstream.install("dataset_helpers")
    monkeypatch.setattr(subprocess, "run", make)
    utils.compile_helpers()


class TestTorchAdam:
    """The repaired optimizer class on a stand-in for what the base class does with Adam."""

    @pytest.fixture
    def optimizer(self, clean):
        if not uses_torch_adam():
            pytest.skip("Apex or Transformer Engine is installed: torch's Adam is not used")
        upstream.install("distributed_optimizer")
        repaired = megatron.core.optimizer.DistributedOptimizer
        parameters = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
        instance = repaired.__new__(repaired)
        instance.is_stub_optimizer = False
        instance.optimizer = torch.optim.AdamW(parameters, lr=0.1)
        instance.grad_scaler = None
        instance.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        instance.config = SimpleNamespace(
            optimizer="adam", fp16=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        )
        instance.model_param_group_index_map = {parameter: (0, order) for order, parameter in enumerate(parameters)}
        return instance

    def test_is_still_a_distributed_optimizer(self, optimizer):
        assert isinstance(optimizer, DistributedOptimizer)
        assert type(optimizer) is not DistributedOptimizer

    def test_state_dict_before_the_first_step(self, optimizer):
        saved = optimizer.state_dict()
        assert [group["step"] for group in saved["optimizer"]["param_groups"]] == [0.0]

    def test_allocated_state_does_not_change_training(self, optimizer):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.optimizer.param_groups[0]["params"]]
        reference = torch.optim.AdamW(twins, lr=0.1)
        optimizer.state_dict()
        for _ in range(3):
            for p, twin in zip(optimizer.optimizer.param_groups[0]["params"], twins):
                p.grad = torch.full_like(p, 0.5)
                twin.grad = torch.full_like(twin, 0.5)
            optimizer.optimizer.step()
            reference.step()
        for p, twin in zip(optimizer.optimizer.param_groups[0]["params"], twins):
            assert torch.equal(p, twin)

    def test_every_parameter_gets_a_step_of_its_own_on_load(self, optimizer):
        saved = optimizer.state_dict()
        for group in saved["optimizer"]["param_groups"]:
            group["step"] = 7.0
        optimizer.load_state_dict(saved)
        steps = [state["step"] for state in optimizer.optimizer.state.values()]
        assert [float(step) for step in steps] == [7.0, 7.0]
        for parameter in optimizer.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.optimizer.step()
        steps = [state["step"] for state in optimizer.optimizer.state.values()]
        assert [float(step) for step in steps] == [8.0, 8.0]

    @pytest.mark.parametrize("step", [None, torch.tensor(0.0)], ids=["without", "stale"])
    def test_payload_sets_parameters_and_moments_but_not_the_step(self, optimizer, step):
        optimizer.state_dict()
        (parameter, _) = optimizer.optimizer.param_groups[0]["params"]
        state = optimizer.optimizer.state[parameter]
        state["step"].fill_(5.0)
        payload = {"param": torch.full((2,), 3.0), "exp_avg": torch.full((2,), 4.0)}
        payload |= {"exp_avg_sq": torch.full((2,), 6.0)} | ({} if step is None else {"step": step})
        optimizer._set_main_param_and_optimizer_states(parameter, payload)
        assert parameter.tolist() == [3.0, 3.0]
        assert (state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) == ([4.0] * 2, [6.0] * 2)
        assert float(state["step"]) == 5.0
