"""What the platform promises on this machine, and that CUDA machines are left alone."""

import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_het import device as platform
from megatron_het.device import share_devices

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU support is not active")


@pytest.fixture(scope="module", autouse=True)
def active() -> platform.Platform:
    return platform.activate()


def test_activate_twice_is_activate_once(active):
    before = (torch.empty, torch.Tensor.to, torch.cuda.current_device)
    assert platform.activate() is active
    assert before == (torch.empty, torch.Tensor.to, torch.cuda.current_device)
    assert platform.is_active()


def test_kind_device_and_backend_agree(active):
    assert active.is_cuda == torch.cuda.is_available()
    assert active.device.type == active.kind
    assert active.default_backend == ("nccl" if active.is_cuda else "gloo")


def test_usable_cuda_changes_nothing_at_all():
    """With a device that only claims to exist, every name of torch stays what it was."""
    code = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
owners = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module]
before = [dict(vars(owner)) for owner in owners]
import sys
from megatron_het import device as platform
from megatron_het.device import share_devices
active = platform.activate()
assert active.is_cuda and active.default_backend == "nccl"
assert "megatron_het.device.cpu" not in sys.modules
for owner, old in zip(owners, before):
    changed = [name for name in old if vars(owner)[name] is not old[name]]
    assert not changed, (owner, changed)
print("same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "same", done.stderr


@cpu_only
def test_cuda_devices_mean_the_cpu():
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).new_zeros(2, device=device).device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.device.type == "cpu"
    assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
    assert torch.arange(3, device=torch.cuda.current_device()).tolist() == [0, 1, 2]
    assert torch.empty(2, pin_memory=True).pin_memory().device.type == "cpu"


@cpu_only
def test_dtypes_and_tensors_still_work_as_targets():
    tensor = torch.ones(2)
    assert tensor.to(torch.bfloat16).dtype == torch.bfloat16
    assert tensor.to("cuda", torch.float64, non_blocking=True).dtype == torch.float64
    assert tensor.to(torch.zeros(1, dtype=torch.int32)).dtype == torch.int32
    assert torch.nn.Linear(2, 2).to(dtype=torch.float64, device="cuda").weight.dtype == torch.double


@cpu_only
def test_torch_itself_still_knows_that_there_is_no_cuda():
    assert not torch.cuda.is_available()


@cpu_only
def test_seeding_cuda_seeds_what_is_drawn():
    torch.cuda.manual_seed(7)
    first = torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), second)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), first)
    assert not torch.equal(first, second)


@cpu_only
def test_megatrons_random_tracker_forks_and_returns(caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draws(seed: int) -> tuple[list[float], list[float], list[float]]:
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", seed)
        torch.manual_seed(1)
        outside = torch.rand(2).tolist()
        with tracker.fork("model-parallel-rng"):
            inside = torch.rand(2).tolist()
        return outside, inside, torch.rand(2).tolist()

    (outside_5, inside_5, after_5), (outside_6, inside_6, after_6) = draws(5), draws(6)
    assert (outside_5, after_5) == (outside_6, after_6)
    assert inside_5 != inside_6
    assert draws(5) == (outside_5, inside_5, after_5)
    assert "RNG state changed" not in caplog.text


@cpu_only
def test_tensor_type_names_are_those_that_optimizers_compare():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


@cpu_only
def test_streams_and_events_are_always_done():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), None
    with torch.cuda.stream(stream):
        start.record()
        end = torch.cuda.current_stream().record_event()
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(end)
    end.synchronize()
    assert stream.query() and end.query() and start.elapsed_time(end) >= 0.0


@cpu_only
def test_compile_hands_the_function_back():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(dynamic=True)(double) is double


@cpu_only
def test_cpu_flags_are_flags_that_megatron_knows(active, monkeypatch):
    from megatron.training.arguments import parse_args

    def parsed(*words: str):
        monkeypatch.setattr(sys, "argv", ["train", *words])
        return parse_args()

    flags = active.flags()
    assert flags and all(flag.reason for flag in flags)
    bare = parsed()
    assert {flag.words for flag in active.unmet_flags(bare)} == {flag.words for flag in flags if flag.required}
    given = parsed(*active.default_flags())
    assert active.unmet_flags(given) == ()
    for flag in flags:
        assert getattr(given, flag.attribute) == flag.value != getattr(bare, flag.attribute), flag


def test_flags_with_everything_installed_are_none(monkeypatch):
    monkeypatch.setattr(platform, "_has", lambda *modules: True)
    assert platform.platform_flags(is_cuda=True) == ()
    assert platform.platform_flags(is_cuda=False) != ()


def test_flags_without_transformer_engine_choose_the_local_layers(monkeypatch):
    monkeypatch.setattr(platform, "_has", lambda *modules: False)
    words = {flag.words for flag in platform.platform_flags(is_cuda=True)}
    assert ("--transformer-impl", "local") in words
    assert ("--distributed-backend", "gloo") not in words


def test_megatron_finds_the_kernels_of_apex_where_that_is_not_installed(monkeypatch):
    """Its own output layer wants them, whatever the other layers are."""
    monkeypatch.setattr(platform, "_has", lambda *modules: "transformer_engine" in modules)
    assert platform.platform_flags(is_cuda=True) == ()
    monkeypatch.delitem(sys.modules, platform.APEX, raising=False)
    platform.provide_accumulation()
    found = sys.modules[platform.APEX]
    assert importlib.util.find_spec(platform.APEX) is not None
    monkeypatch.setitem(sys.modules, platform.APEX, own := ModuleType(platform.APEX))
    platform.provide_accumulation()  # one that is there stays
    assert sys.modules[platform.APEX] is own
    for dtype in (torch.float32, torch.bfloat16):
        source, grad, total = torch.randn(8, 6).to(dtype), torch.randn(8, 4).to(dtype), torch.ones(4, 6)
        found.wgrad_gemm_accum_fp32(source, grad, total)
        torch.testing.assert_close(total, 1 + (grad.t() @ source).float())


def test_unmet_flag_names_itself_and_why(active):
    args = SimpleNamespace(**{flag.attribute: object() for flag in active.flags()})
    for flag in active.unmet_flags(args):
        assert flag.words[0] in str(flag) and flag.reason in str(flag)


def shared(devices: int, **more: str) -> tuple[dict[str, str], str]:
    environment = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", **more}
    return environment, share_devices(environment, devices)


def test_ranks_that_share_a_device_are_hosts_of_their_own_for_nccl():
    environment, said = shared(2, TORCHELASTIC_RUN_ID="none", NCCL_MAX_NCHANNELS="8")
    assert "4 ranks share 2 devices" in said and "NCCL_HOSTID" in said
    assert environment["NCCL_HOSTID"].endswith("-3") and environment["LOCAL_RANK"] == "1"
    assert environment["NCCL_SOCKET_IFNAME"] == "lo" and environment["NCCL_MAX_NCHANNELS"] == "8"
    other, _ = shared(2, SAME_DEVICES="1", TORCHELASTIC_RUN_ID="none", LOCAL_RANK="1")
    assert other["NCCL_HOSTID"] != environment["NCCL_HOSTID"]


def test_ranks_of_several_hosts_keep_their_network():
    environment, said = shared(1, WORLD_SIZE="8", HET_SAME_DEVICES="1")
    assert said and "NCCL_SOCKET_IFNAME" not in environment and "NCCL_IB_DISABLE" not in environment


@pytest.mark.parametrize(("devices", "more"), [(4, {"TORCHELASTIC_RUN_ID": "none"}), (1, {})])
def test_ranks_with_devices_of_their_own_are_left_alone(devices: int, more: dict[str, str]):
    """A launcher that shows every rank one device of its own says nothing, and is not taken for one that shares."""
    before = shared(64, **more)[0]
    assert shared(devices, **more) == (before, "")
