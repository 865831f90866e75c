"""Random-number states come from the checkpoint that Megatron has loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het import device as platform

platform.activate()  # before Megatron is imported, which binds what the platform replaces

from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # noqa: E402

from megatron_het.checkpoint import loading  # noqa: E402
from megatron_het.checkpoint.state_dict import RANDOM_STATE_KEY  # noqa: E402
from megatron_het.plan import topology_hash  # noqa: E402
from tests.unit.plan.test_plan import document, read  # noqa: E402


def save(folder: Path, iteration: int) -> Path:
    """What says which checkpoint of a folder is the latest."""
    (folder / f"iter_{iteration:07}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def arguments(load: Path, **changed: Any) -> SimpleNamespace:
    given = {
        "load": str(load),
        "ckpt_step": None,
        "non_persistent_ckpt_type": "global",
        "non_persistent_global_ckpt_dir": None,
        "tensor_model_parallel_size": 1,
        "no_load_rng": False,
        "no_load_optim": False,
        "no_save_optim": True,
        "finetune": False,
        "padded_vocab_size": 640,
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.mark.parametrize(
    ("persistent", "temporary", "changed", "loaded", "expected"),
    [
        (4, None, {"non_persistent_ckpt_type": None}, 4, "iter_0000004"),
        (4, 6, {"non_persistent_ckpt_type": None}, 4, "iter_0000004"),
        (4, 6, {}, 6, "non_persistent/iter_0000006"),
        (4, 4, {}, 4, "non_persistent/iter_0000004"),
        (8, 6, {}, 8, "iter_0000008"),
        (8, 6, {"ckpt_step": 4}, 6, "non_persistent/iter_0000006"),
        (8, 6, {"ckpt_step": 7}, 7, "iter_0000007"),
        (4, None, {}, 4, "iter_0000004"),
        (None, 6, {}, 6, "non_persistent/iter_0000006"),
    ],
)
def test_states_of_the_loaded_checkpoint(
    persistent: int | None,
    temporary: int | None,
    changed: dict[str, Any],
    loaded: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron import training
    from megatron.core import dist_checkpointing

    if persistent is not None:
        save(tmp_path, persistent)
    if temporary is not None:
        save(tmp_path / "non_persistent", temporary)
    plan = read(document())
    common = {"args": SimpleNamespace(het_topology=topology_hash(plan), padded_vocab_size=608)}
    seen: list[str] = []
    monkeypatch.setattr(training, "get_args", lambda: arguments(tmp_path, **changed))
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda path: seen.append(path) or common)
    stored = {f"{RANDOM_STATE_KEY}/shard_0_5": None}
    serialization = dist_checkpointing.serialization
    monkeypatch.setattr(serialization, "load_sharded_metadata", lambda path: seen.append(path) or stored)
    monkeypatch.setattr(loading, "restore_random_state", seen.append)
    chosen = loading.choose(arguments(tmp_path, **changed), lambda candidate: []).candidate
    assert chosen is not None
    monkeypatch.setattr(loading, "whole_checkpoint", lambda args: (chosen.folder, None, {}))  # no files are here
    assert loading.LoadHook(plan, lambda *_: None, lambda *_: None).wrap(lambda: (loaded, 0))() == (loaded, 0)
    assert seen == [str(tmp_path / expected)] * 3
    assert "--padded-vocab-size 608" in capsys.readouterr().out


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, 4)
    own = save(tmp_path / "fast", 5)
    found = loading.choose(arguments(tmp_path, non_persistent_global_ckpt_dir=str(own)), lambda candidate: [])
    assert found.candidate is not None and found.candidate.folder == own / "iter_0000005"


@pytest.mark.parametrize(("flag", "rate"), [("override", 2e-3), ("use_checkpoint", 1e-3)])
def test_groups_are_found_under_another_learning_rate(flag: str, rate: float) -> None:
    """Megatron knows a group by its largest learning rate too."""

    class Optimizer:
        def __init__(self, groups: list[dict[str, Any]]) -> None:
            self.optimizer = SimpleNamespace(param_groups=groups)
            self.loaded: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.loaded = [group["max_lr"] for part in state for group in part["optimizer"]["param_groups"]]

    def groups(rate: float) -> list[dict[str, Any]]:
        kinds = ((0.0, True), (1.0, True), (1.0, False))  # --decoupled-lr has a group with a rate of its own
        return [{"wd_mult": wd, "default_config": own, "max_lr": rate * (5 - 4 * own)} for wd, own in kinds]

    made = Optimizer(groups(2e-3))
    state = [{"optimizer": {"param_groups": groups(1e-3)[::-1]}}]  # experts have an optimizer of their own elsewhere
    args = SimpleNamespace(**{f"{flag}_opt_param_scheduler": True})
    with loading._with_matched_groups(made, args):
        made.load_state_dict(state)
    assert made.loaded == [5 * rate, rate, rate]
    assert [group["max_lr"] for group in made.optimizer.param_groups] == [rate, rate, 5 * rate]
    assert "load_state_dict" not in vars(made)
    with loading._with_matched_groups(made, SimpleNamespace()):
        assert "load_state_dict" not in vars(made)


def test_the_loss_scale_of_stock_megatron_is_for_sums() -> None:
    """A plan divides sums over tokens by their number, so that the same scale would make gradients vanish in fp16."""
    stock = {"fp16": True, "calculate_per_token_loss": True, "loss_scale": None}
    others = {"fp16": False}, {"calculate_per_token_loss": False}, {"loss_scale": 4.0}, {"het_topology": "another"}
    for saved, scale in ((stock, 1024.0), *((stock | other, 4.0) for other in others)):
        part = SimpleNamespace(grad_scaler=DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 3, 1))
        loading.take_loss_scale(part, SimpleNamespace(**saved), 256)
        assert part.grad_scaler.scale.item() == scale, saved


def test_what_no_plan_loads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"decoder.weight", "rng_state/shard_0_1"}
    monkeypatch.setattr("megatron.core.dist_checkpointing.serialization.load_sharded_metadata", lambda _: keys)
    with pytest.raises(ValueError, match="'raise_all'.* has rng_state, "):
        loading.check_strictness(SimpleNamespace(dist_ckpt_strictness="raise_all"), tmp_path)
