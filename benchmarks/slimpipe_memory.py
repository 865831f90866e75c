"""Compares SlimPipe's live activation bytes in real runs with its formula, the simulator and 1F1B.

``python -m benchmarks.slimpipe_memory --json OUT``.  Per rank: the peak of everything that is
allocated in one iteration (saved tensors, logits, buffers, workspace) plus the key-value pool.

- The formula: (1/p + 2(p-1-r)/(nvp)) M_a on stage r; for r = 0 that of SlimPipe, Table 2.  M_a, all
  layers' activations of one microbatch, comes from one-process runs with two numbers of layers; what
  does not grow with them (the logits and the loss, above all) is added on the last stage.
- The simulator gets M_a and the logits and predicts the peak of every stage.
- Stock 1F1B runs unmodified Megatron with the same attention kernel.
- What the features save: the same run with each of them, and with a vocabulary that is worth splitting.
- The longest sequence: what stock needs on its fullest rank for a sequence of ``--tokens`` is the
  limit; SlimPipe's longest sequence under it is measured in steps of a quarter of ``--tokens``.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, scratch, write_report
from benchmarks.slimpipe_runs import Model, Setting, run
from megatron_het.schedule import Costs, Memory, Shape, add_transfers, generate
from megatron_het.schedule.simulate import simulate
from testing.runner import Runner, words

MODEL = Model(layers=8, hidden=64, ffn=176, vocabulary=31)
_WIDE = replace(MODEL, vocabulary=2047)
_MICROBATCHES = 4
_FEATURES: dict[str, tuple[str, ...]] = {
    "none": (),
    "thrifty layers": ("--het-thrifty-layers",),
    "vocabulary": ("--het-vocabulary-parallel",),
    "offload 0.75": ("--het-offload-activations", "0.75"),
    "up projection recomputed": ("--recompute-granularity", "selective", "--recompute-modules", "mlp"),
    "all recomputed": words("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}
_ALL = ("thrifty layers", "vocabulary", "offload 0.75", "up projection recomputed")


class Bench:
    """Runs each setting once and caches its measurements."""

    def __init__(self, runner: Runner, folder: Path, tokens: int) -> None:
        self._runner = runner
        self._folder = folder
        self.tokens = tokens
        self.layer_bytes = self.other_bytes = 0.0

    def peaks(self, setting: Setting, model: Model = MODEL, more: tuple[str, ...] = (), what: str = "") -> list[int]:
        """Returns the activation bytes of every rank; ``what`` names the flags of ``more``."""
        folder = self._folder / f"layers-{model.layers}-{model.vocabulary}-{what.replace(' ', '-')}"
        found = run(self._runner, setting, model, folder, iterations=2, memory=True, more=more)
        peaks = [watch["activation_bytes"] for watch in found]
        print(f"{setting.name:28} {[round(b / 2**20, 2) for b in peaks]} MiB {what}", flush=True)
        return peaks

    def features(self) -> dict[str, list[int]]:
        """Returns the activation bytes of every rank with each feature, and with combinations of features."""
        setting = Setting("slimpipe", 4, self.tokens // 2, _MICROBATCHES, 16)
        found = {name: self.peaks(setting, _WIDE, flags, name) for name, flags in _FEATURES.items()}
        together = tuple(word for name in _ALL for word in _FEATURES[name])
        found[", ".join(_ALL)] = self.peaks(setting, _WIDE, together, "all together")
        return found

    def calibrate(self, slices: int) -> None:
        """Returns the bytes of one layer, and of everything else, for one microbatch."""
        alone = Setting("slimpipe", 1, self.tokens, 1, slices)
        (few,) = self.peaks(alone)
        (many,) = self.peaks(alone, replace(MODEL, layers=2 * MODEL.layers))
        self.layer_bytes = (many - few) / MODEL.layers
        self.other_bytes = few - MODEL.layers * self.layer_bytes

    def predicted(self, setting: Setting) -> list[float]:
        """Returns the bytes by the formula, per stage."""
        p, nv = setting.stages, setting.slices * setting.chunks
        total = MODEL.layers * self.layer_bytes
        stages = [(1 / p + 2 * (p - 1 - r) / (nv * p)) * total for r in range(p)]
        stages[-1] += self.other_bytes
        return stages

    def simulated(self, setting: Setting) -> list[float]:
        """Returns the simulator's peaks, per stage."""
        p, v = setting.stages, setting.chunks
        layers = MODEL.layers // (p * v)
        shape = Shape.uniform(p, _MICROBATCHES, slices=setting.slices, chunks=v, layers_per_chunk=layers)
        program = add_transfers(generate("slimpipe", shape))
        memory = Memory(
            activation_bytes=((layers * self.layer_bytes,) * v,) * p,
            logits_bytes=(0.0,) * (p - 1) + (self.other_bytes,),
        )
        costs = Costs(((1.0 * layers,) * v,) * p, ((2.0 * layers,) * v,) * p, memory=memory)
        return [use.peak_bytes for use in simulate(program, costs).memory]

    def compare(self, setting: Setting) -> dict[str, Any]:
        """Compare a real run with formula and simulator."""
        measured = self.peaks(setting)
        formula, simulated = self.predicted(setting), self.simulated(setting)
        return {
            "setting": asdict(setting),
            "measured_bytes": measured,
            "formula_bytes": formula,
            "simulated_bytes": simulated,
            "error_to_formula": max(abs(m / f - 1) for m, f in zip(measured, formula, strict=True)),
            "error_to_simulator": max(abs(m / f - 1) for m, f in zip(measured, simulated, strict=True)),
        }

    def longest(self, stages: int, slices: int, chunks: int, limit_bytes: int) -> int:
        """Returns the tokens of the longest sequence whose fullest rank stays within the limit."""
        step, fits = self.tokens // 4, 0
        tokens = 2 * self.tokens
        while True:
            peak = max(self.peaks(Setting("slimpipe", stages, tokens, _MICROBATCHES, slices, chunks)))
            if peak <= limit_bytes:
                fits = tokens
                tokens += max(step, int((limit_bytes / peak - 1) * tokens) // step * step)
            elif fits or tokens <= step:
                return fits
            else:
                tokens -= step


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.slimpipe_memory", __doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the sequences (default: 2048)")
    parser.add_argument("--quick", action="store_true", help="p=4, n=16 only, no longest sequence")
    options = parser.parse_args()
    with scratch("slimpipe-memory-") as folder, Runner() as runner:
        report = _report(Bench(runner, folder, options.tokens), options.quick)
    write_report(options.json, report | {"tokens": options.tokens})
    return 0


def _report(bench: Bench, quick: bool) -> dict[str, Any]:
    bench.calibrate(16)
    stock = bench.peaks(Setting("stock", 4, bench.tokens, _MICROBATCHES))
    settings = [Setting("slimpipe", 4, bench.tokens, _MICROBATCHES, 16)]
    if not quick:
        settings += [
            Setting("slimpipe", 2, bench.tokens, _MICROBATCHES, 8),
            Setting("slimpipe", 4, bench.tokens, _MICROBATCHES, 16, 2),
        ]
    cases = [bench.compare(setting) for setting in settings]
    report: dict[str, Any] = {
        "layer_bytes": bench.layer_bytes,
        "other_bytes": bench.other_bytes,
        "stock_1f1b_bytes": stock,
        "activation_ratio_to_1f1b": max(cases[0]["measured_bytes"]) / max(stock),
        "max_error_to_formula": max(case["error_to_formula"] for case in cases),
        "max_error_to_simulator": max(case["error_to_simulator"] for case in cases),
        "cases": cases,
    }
    if not quick:
        report["features"] = bench.features()
        longest = bench.longest(4, 32, 1, max(stock))
        report.update(limit_bytes=max(stock), longest_sequence=longest, max_sequence_ratio=longest / bench.tokens)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
