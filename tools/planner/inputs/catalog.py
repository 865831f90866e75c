"""The catalog of GPUs: datasheet figures for planning without a profile.  Sources are in ``data/gpus.json``."""

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from math import inf
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_het.safe_io import parse_yaml

from ..errors import PlannerError, validated

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]


class Strict(BaseModel):
    """Base of file contents: unknown keys are errors, all numbers are finite, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Gpu(Strict):
    """One kind of GPU (or CPU device).  Missing precisions are not supported by the hardware."""

    flops: dict[Format, float]  # peak dense FLOP/s by precision (tensor cores where there are any, without sparsity)
    # memory_bytes, memory_bytes_per_s: size and bandwidth of device memory
    memory_bytes: int = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    intra_node_bytes_per_s: float = Field(gt=0)  # bandwidth of one GPU to its node, one direction (NVLink or PCIe)
    host_bytes_per_s: float = Field(default=12e9, gt=0)  # PCIe or C2C bandwidth to host memory, one direction
    flash_attention_2: bool = False  # whether FlashAttention-2 runs on it (compute capability >= 8.0)
    is_processor: bool = False  # a CPU device: attention kernels of GPUs, and their limits, do not apply
    # share of peak that the largest matrix products reach, over seconds (power limits included)
    efficiency: float = Field(default=0.7, gt=0, le=1)
    # the same for causal attention with heads of 128, in the best kernel for the GPU
    attention_efficiency: float = Field(default=0.5, gt=0, le=1)
    flash_efficiency: float = Field(default=0.5, gt=0, le=1)  # the same in FlashAttention-2's kernel
    architecture: str | None = None  # compiler's name (``sm_80``, ``gfx942``); None if unknown
    # PyTorch's indexes of wheels with kernels for it (``cu126``, ``cu130``, ``rocm``)
    torch_builds: tuple[str, ...] = ()
    # whether NVIDIA's Transformer Engine runs on it (compute capability >= 8.0); none: where FlashAttention-2 does
    transformer_engine: bool | None = None
    # Bus bandwidth of collectives inside a node; None = 80 % of ``intra_node_bytes_per_s``, as over NVLink.  GPUs that
    # share PCIe get far less.
    collective_bytes_per_s: float | None = Field(default=None, gt=0)
    # memory taken by context and libraries before any model exists
    reserved_bytes: int = Field(default=1_500_000_000, ge=0)
    launch_s: float = Field(default=20e-6, ge=0, le=60)
    power_w: float | None = Field(default=None, gt=0)  # board power, for energy
    # a public list price of one GPU hour, when known; prices are user input
    usd_per_hour: float | None = Field(default=None, ge=0)
    source: str  # where the figures come from

    @property
    def collective_rate(self) -> float:
        """Bus bandwidth of collectives inside a node."""
        return self.collective_bytes_per_s or 0.8 * self.intra_node_bytes_per_s

    @property
    def has_transformer_engine(self) -> bool:
        """Whether Transformer Engine runs on it."""
        return self.flash_attention_2 if self.transformer_engine is None else self.transformer_engine

    @property
    def has_newer_attention(self) -> bool:
        """Whether it has a kernel newer than FlashAttention-2's, in slices too: compute capability 9.0 and later."""
        found = re.match(r"sm_(\d+)", self.architecture or "")
        return found is not None and int(found[1]) >= 90  # ``megatron_het.attention.kernel_choice``

    def supports(self, precision: str) -> bool:
        """Whether the hardware computes in this precision at full speed."""
        return self.peak(precision) > 0

    def peak(self, precision: str) -> float:
        """Peak FLOP/s, 0 without support.  ``tf32`` means: where the hardware has it, else fp32."""
        if precision == "tf32":
            return self.flops.get("tf32") or self.flops.get("fp32", 0.0)
        return self.flops.get(precision, 0.0)  # type: ignore[call-overload]


def common_builds(gpus: Mapping[str, Gpu]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Returns the builds of PyTorch with kernels for all kinds, newest first, and those of each known kind."""
    known = {name: gpu.torch_builds for name, gpu in gpus.items() if gpu.torch_builds}
    common = set.intersection(*map(set, known.values())) if known else set()
    return sorted(common, reverse=True), known


def data(file: str) -> Any:
    """Returns the content of one of the planner's data files."""
    text = resources.files(__package__).joinpath("data", file).read_text("utf-8")
    return json.loads(text) if file.endswith(".json") else parse_yaml(text, file)


@cache
def gpu_names() -> dict[str, str]:
    """Names of the catalog by regular expressions of what drivers and Slurm call a GPU; the first match wins."""
    names: dict[str, str] = data("gpu_names.yaml")
    return names


@cache
def catalog() -> dict[str, Gpu]:
    """All known GPUs by name."""
    document = data("gpus.json")
    return {name: parse_gpu(body, "gpus.json", name) for name, body in document["gpus"].items()}


def parse_gpu(body: Any, file: str, key: str) -> Gpu:
    """A Gpu from parsed YAML or JSON; raises PlannerError."""
    gpu: Gpu = validated(Gpu, body, file, ("gpus", key))
    for precision, value in gpu.flops.items():
        if not 0 < value < inf:
            hint = "Leave out a precision that the hardware lacks"
            raise PlannerError(file, f"gpus.{key}.flops.{precision}", value, "must be positive", hint)
    return gpu


def find_gpu(name: str, own: dict[str, Gpu], file: str, key: str) -> Gpu:
    """A GPU of the cluster file or of the catalog.

    Raises:
        PlannerError: unknown, with the nearest known names.
    """
    if name in own:
        return own[name]
    known = catalog()
    if name in known:
        return known[name]
    begun = [kind for kind in (*own, *known) if kind.lower().startswith(name.lower()[:32])] if name else []
    near = begun[:3] or difflib.get_close_matches(name, [*own, *known], n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    hint += f"Known: {', '.join(sorted({*own, *known}))}; describe others under 'gpus:' in the cluster file"
    raise PlannerError(file, key, name, "unknown GPU", hint)
