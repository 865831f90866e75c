"""Compares SlimPipe with stock 1F1B and interleaved 1F1B: long sequences, few microbatches, two stages.

Interleaved 1F1B and SlimPipe are each a small sweep, of which the best setting counts.

``python -m benchmarks.slimpipe_speed --json OUT``.  The same model and attention kernel on all
sides, runs alternate, and each side counts by the median of its iterations over all runs.  The cost of
slicing is that of one process with n slices against one slice.  The bubbles of one more run of the plain
SlimPipe and of the best one are compared with the simulator's; ``bubble_error`` is the larger difference.

``--mixed`` compares the context exchange on and off in a pipeline of unequal devices instead.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.machine import alternate, command_line, scratch, write_report
from benchmarks.slimpipe_runs import Model, Setting, bubble, exchanged, run
from testing.runner import Runner

MODEL = Model(layers=8, hidden=128, ffn=352, heads=4, groups=1)
_STAGES, _MICROBATCHES, _SLICES = 2, 2, 8
_EXCHANGE = ("--het-context-exchange", "--het-exchange-idle")
_SWEEP = ((8, 1), (16, 4))  # SlimPipe's slices and chunks
_WARMUP = 1  # iterations that do not count


def median_s(runner: Runner, setting: Setting, folder: Path, iterations: int) -> float:
    """Returns the median of the slowest rank's iterations, in seconds."""
    found = run(runner, setting, MODEL, folder, iterations=iterations + _WARMUP, memory=False)
    by_rank = [watch["iterations_s"][_WARMUP:] for watch in found]
    return statistics.median(max(times) for times in zip(*by_rank, strict=True))


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.slimpipe_speed", __doc__)
    parser.add_argument(
        "--tokens", type=int, default=12288, help="per sequence; 6144 takes a quarter of the 15 minutes"
    )
    parser.add_argument("--iterations", type=int, default=1, help="that count, of each run")
    parser.add_argument(
        "--sweep",
        type=lambda text: tuple(map(int, text.split(","))),
        nargs="+",
        metavar="N,V",
        help="SlimPipe's slices and chunks to try (default: 8,1 16,4)",
    )
    parser.add_argument("--exchange", action="store_true", help="with the attention context exchange")
    parser.add_argument("--mixed", action="store_true", help="one fast and one slow process, the exchange on and off")
    parser.add_argument("--rounds", type=int, default=2, help="how often each side runs")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> dict[str, Setting]:
    """Returns both pipelines of stock Megatron, SlimPipe's sweep, and one process with and without slices."""
    flags = _EXCHANGE if options.exchange else ()
    return {
        "1f1b": Setting("stock", _STAGES, options.tokens, _MICROBATCHES),
        "interleaved-2": Setting("stock", _STAGES, options.tokens, _MICROBATCHES, chunks=2),
        "interleaved-4": Setting("stock", _STAGES, options.tokens, _MICROBATCHES, chunks=4),
        **{
            f"slimpipe-{n}-{v}": Setting("slimpipe", _STAGES, options.tokens, _MICROBATCHES, n, v, flags)
            for n, v in (options.sweep or _SWEEP)
        },
        "whole": Setting("slimpipe", 1, options.tokens, _MICROBATCHES, 1),
        "sliced": Setting("slimpipe", 1, options.tokens, _MICROBATCHES, _SLICES),
    }


def _mixed(options: argparse.Namespace) -> int:
    with scratch("slimpipe-mixed-") as folder, Runner() as runner:
        found = exchanged(runner, MODEL, options.tokens, options.rounds, options.iterations, folder)
    write_report(options.json, found)
    return 1 if found["met"] is False else 0


def main() -> int:
    """Command line."""
    options = _options()
    if options.mixed:
        return _mixed(options)
    settings = _settings(options)
    slim = [name for name in settings if name.startswith("slimpipe")]
    with scratch("slimpipe-speed-") as folder, Runner() as runner:

        def train(name: str, index: int) -> float:
            return median_s(runner, settings[name], folder / str(index), options.iterations)

        times = alternate(settings, options.rounds, train)
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(slim, key=medians.__getitem__)
        plain = min(slim, key=lambda name: settings[name].chunks)
        bubbles = {
            name: bubble(runner, settings[name], MODEL, folder / "bubble" / name, options.iterations + 1)
            for name in dict.fromkeys((plain, best))
        }
    n, v = settings[best].slices, settings[best].chunks
    interleaved = min(medians["interleaved-2"], medians["interleaved-4"])
    report = {
        "speedup_over_1f1b": medians["1f1b"] / medians[best],
        "speedup_over_best_interleaved": interleaved / medians[best],
        "best_slimpipe": best,
        "context_exchange": options.exchange,
        "slicing_overhead": medians["sliced"] / medians["whole"] - 1,
        "ideal_speedup_over_1f1b": (1 + (_STAGES - 1) / _MICROBATCHES) / (1 + (_STAGES - 1) / (_MICROBATCHES * n * v)),
        "bubble_error": max(found["bubble_error"] for found in bubbles.values()),
        "bubbles": bubbles,
        "medians_s": medians,
        "runs_s": times,
        "tokens": options.tokens,
    }
    write_report(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
