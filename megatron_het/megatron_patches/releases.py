"""The supported releases of megatron-core and torch, and the installed one.

The hashes in patches and features are those of the first release.  A name whose source differs in another release is
listed here with that release's hash, once the change has been read: ``python -m megatron_het.megatron_patches
--against CHECKOUT`` shows changes, and docs/megatron_releases.md explains what to do with each.  A patch that differs
between releases calls :func:`installed_release`.  Only :func:`differences` imports torch, and nothing here imports
Megatron.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_het.safe_io import FileError, read_text


class PatchError(RuntimeError):
    """A patch cannot be installed, or an upstream name or source is missing; the message has reason and remedy."""


@dataclass(frozen=True, slots=True)
class Megatron:
    """A Megatron-LM checkout or an installed megatron-core."""

    folder: Path  # the parent of its ``megatron`` folder
    version: str  # version of megatron-core, e.g. ``0.19.2``

    def __str__(self) -> str:
        return f"megatron-core {self.version} in {self.folder}"


def find() -> Megatron:
    """The Megatron that ``import megatron.core`` would import.

    Raises:
        PatchError: There is none, or its version cannot be read.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("there is no megatron-core: install it, or start a script of a Megatron-LM checkout")
    return at(Path(next(iter(spec.submodule_search_locations))).parent.parent)


def at(folder: Path) -> Megatron:
    """The Megatron whose ``megatron`` folder is in this folder; raises PatchError if its version cannot be read."""
    file = folder / "megatron" / "core" / "package_info.py"
    try:
        numbers = _constants(read_text(file))
        version = ".".join(str(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    except (FileError, SyntaxError, KeyError) as error:
        raise PatchError(f"{file} does not say which megatron-core this is ({error})") from None
    return Megatron(folder, version)


def _constants(source: str) -> dict[str, object]:
    """Values by name of the module-level assignments ``NAME = constant`` in a source."""
    assigned = ((n.targets[0], n.value) for n in ast.parse(source).body if isinstance(n, ast.Assign))
    return {k.id: v.value for k, v in assigned if isinstance(k, ast.Name) and isinstance(v, ast.Constant)}


_CORE, _TRAINING = "megatron.core", "megatron.training"
_ROPE, _LINEAR = f"{_CORE}.models.common.embeddings.rope_utils", f"{_CORE}.tensor_parallel.layers"
_SCHEDULES, _MTP = f"{_CORE}.pipeline_parallel.schedules", f"{_CORE}.transformer.multi_token_prediction"
_HYBRID, _MODELS = f"{_CORE}.models.hybrid", f"{_TRAINING}.models"
_STATES = f"{_CORE}.ssm"


@dataclass(frozen=True, slots=True)
class Release:
    """A supported release of Megatron."""

    name: str  # the first two numbers of its version
    version: str  # the newest version that was read
    origin: str  # where to get the release, for error messages
    # hashes of names whose source differs from that of the first release
    changed: Mapping[str, str] = field(default_factory=dict)
    # hashes of names whose source differs in an earlier version of this release without a change in behaviour
    earlier: Mapping[str, str] = field(default_factory=dict)


RELEASES = (
    Release(
        "0.19",
        "0.19.2",
        "a checkout of tag core_v0.19.0, or the wheel megatron-core==0.19.2",
        earlier={f"{_MTP}.MultiTokenPredictionBlock.forward": "4d5ae68542ef05d7"},
    ),
    Release(
        "0.20",
        "0.20.0",
        "a checkout of the main branch, commit d98e8a64dd (August 2026)",
        {
            f"{_CORE}.distributed.param_and_grad_buffer.group_params_for_buffers": "99190f6269e2fe49",
            f"{_ROPE}._apply_rotary_pos_emb_bshd": "366e3353e0f83f7a",
            f"{_ROPE}.apply_rotary_pos_emb": "4379fd9789709b67",
            f"{_HYBRID}.hybrid_block.HybridStack.__init__": "9b479848591eec07",
            f"{_HYBRID}.hybrid_model.HybridModel.forward": "a93ca14d12d078d6",
            f"{_STATES}.gated_delta_net.gdn.GatedDeltaNet.forward": "62adcc9829218bee",
            f"{_STATES}.gated_delta_net.common._GDNBase._gated_norm_and_a2a": "8e7ec1e808fd4fac",
            f"{_STATES}.mamba_mixer.MambaMixer.forward": "b3b9db860f8901e5",
            f"{_CORE}.optimizer.distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable": (
                "7cdfe48e0461fc9b"
            ),
            f"{_CORE}.packed_seq_params.PackedSeqParams": "4f00fefbcd011734",
            f"{_SCHEDULES}.backward_step": "3fca651af10a63a9",
            f"{_SCHEDULES}.forward_step": "550eac9a6281ca28",
            f"{_LINEAR}.ColumnParallelLinear.forward": "d6c53e55893a3467",
            f"{_LINEAR}.LinearWithGradAccumulationAndAsyncCommunication": "2b1f0fb448ddd09c",
            f"{_CORE}.transformer.attention.Attention.forward": "1eb554e40cf2975e",
            f"{_MTP}.MultiTokenPredictionBlock.forward": "ab3797da57163442",
            f"{_MTP}.MultiTokenPredictionLayer._get_embeddings": "1da1c14737505a9b",
            f"{_MTP}._roll_tensor_packed_seq": "8191d2b59792438b",
            f"{_MTP}.roll_tensor": "2fad2eb0487765ba",
            f"{_CORE}.transformer.torch_norm.WrappedTorchNorm.__new__": "6c22ec472be77204",
            f"{_TRAINING}.arguments.validate_args": "2129f0e1f9f9ebe1",
            f"{_TRAINING}.checkpointing.generate_state_dict": "02b0435bb737fa49",
            f"{_MODELS}.dist_utils.prepare_existing_model_chunks_for_distributed_training": "3fa558b97b9a132d",
            f"{_MODELS}.gpt.GPTModelBuilder.build_distributed_models": "3a580fe68c8925a8",
            f"{_MODELS}.hybrid.HybridModelBuilder.build_distributed_models": "e5684a85091be165",
            f"{_TRAINING}.pretrain": "c3d588bae60e8ed7",
            f"{_TRAINING}.training.initialize_megatron": "c43d40e002596102",
            f"{_TRAINING}.training.load_checkpoint": "967da2509ebb29d1",
            f"{_TRAINING}.training.training_log": "023790356a3fbad6",
        },
    ),
)


def release_of(megatron: Megatron) -> Release | None:
    """The release of a Megatron; None if it is not among :data:`RELEASES`."""
    name = megatron.version.rsplit(".", 1)[0]
    return next((release for release in RELEASES if release.name == name), None)


def check(megatron: Megatron) -> None:
    """Refuse a release that the patches were not written for.

    Patches also compare the sources that they replace; this check comes before anything is imported.

    Raises:
        PatchError: A release that is not among :data:`RELEASES`.
    """
    if release_of(megatron) is None:
        known = " and ".join(release.name for release in RELEASES)
        raise PatchError(
            f"{megatron}: this release of megatron_het knows megatron-core {known}. "
            f"Use {', or '.join(release.origin for release in RELEASES)}"
        )


@functools.cache
def installed_release() -> Release:
    """The release that ``import megatron.core`` imports; the first of :data:`RELEASES` if it is none of them."""
    return release_of(find()) or RELEASES[0]


# Private names of torch that a run uses.
#
# Their source changes from release to release of torch, so a hash would refuse releases that work.  Only the existence
# of the name and its parameters are checked here; ``distributed/groups.py`` also checks the result.

TORCH_VERSIONS = ("2.11", "2.15")  # the oldest and the newest release whose names were read


@dataclass(frozen=True)
class TorchName:
    """A private name of torch."""

    name: str  # dotted
    parameters: tuple[str, ...] | None  # names of its parameters, in order; None if it has no signature to inspect
    reason: str  # its use here, and why no public name can replace it


TORCH_NAMES = (
    TorchName(
        "torch.distributed.distributed_c10d._process_group_name",
        ("ranks", "use_hashed_name"),
        "new_group asks it for the name of a group; wrapped while a group is created, because the public ways to "
        "name a group need every rank of the world in every creation",
    ),
    TorchName(
        "torch.distributed.distributed_c10d._get_default_store",
        (),
        "the store on which ranks tell who has stopped; torch.distributed shows it nowhere else",
    ),
    TorchName(
        "torch.distributed.distributed_c10d._world",
        None,
        "its pg_group_ranks is where get_rank looks up a group; the pipeline of a plan, which hybrid models ask for "
        "while they are built, is no group that torch has created",
    ),
    TorchName(
        "torch.distributed.checkpoint.filesystem._StorageWriterTransforms",
        ("extensions",),
        "gives the stream for each object of a checkpoint; wrapped, because a write that fails makes the process crash "
        "later on, and the public extensions are noted in the checkpoint",
    ),
    TorchName(
        "torch._foreach_add_",
        None,
        "adds to many tensors in one kernel; torch's optimizers use it, and its public form does not exist",
    ),
)


def differences(names: Sequence[TorchName] = TORCH_NAMES) -> list[str]:
    """Returns one text per name that is missing in this torch or has other parameters; empty if there is none."""
    found = []
    for one in names:
        module, _, attribute = one.name.rpartition(".")
        target = getattr(importlib.import_module(module), attribute, None)
        if target is None:
            found.append(f"{one.name} is not there; {one.reason}")
        elif one.parameters is not None:
            parameters = tuple(inspect.signature(target).parameters)
            if parameters != one.parameters:
                found.append(f"{one.name} takes {', '.join(parameters)}, not {', '.join(one.parameters)}; {one.reason}")
    return found
