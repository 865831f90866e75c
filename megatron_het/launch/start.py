"""The call that switches the extension on; a training script makes it before it imports ``megatron.training``.

``install()`` takes the ``--het-*`` flags off the command line, activates the platform, and, if there is a plan,
installs it (:mod:`megatron_het.arguments.hooks`).  Automatic batches and alternating plans are packages of their
own, which are imported only if flags need them.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_het.arguments import hooks
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan.run_config import HetConfig

if TYPE_CHECKING:  # it imports torch
    from megatron_het.device import Platform
    from megatron_het.runtime.session import HetSession
    from megatron_het.runtime.training import Boundary


def install(
    argv: list[str] | None = None,
    make_session: "Callable[[HetConfig, Platform, int], HetSession] | None" = None,
    boundary: "Boundary | None" = None,
) -> HetConfig:
    """Read and remove the ``--het-*`` flags and prepare this process for Megatron.

    Args:
        argv: The command line with the program's name first; default ``sys.argv``.  Changed in
            place: Megatron's parser gets the remaining words.
        make_session: Makes the session of a run with a plan; default :class:`HetSession`.
        boundary: Hooks between the iterations of a run with a plan; default none.

    Raises:
        SystemExit: A bad flag or a bad plan.  Only rank 0 prints the error message.
    """
    if _ENTERED:  # _enter() runs the script again for one of several plans, and has installed everything
        return _ENTERED[-1]
    words = list(sys.argv if argv is None else argv)

    def choose_plan(config: HetConfig, rest: list[str]) -> tuple[HetConfig, list[str]]:
        if config.turns:
            from megatron_het.elastic.sessions import take_turns

            take_turns(words, config.turns, config.turn_files, _enter)
        return (config, rest) if config.auto_batch is None else _with_measured_plan(config, rest)

    return hooks.install(argv, make_session, boundary, choose_plan, _with_measured_shares)


_ENTERED: list[HetConfig] = []  # configurations with which :func:`_enter` has run the script in this process


def _enter(argv: list[str], boundary: "Boundary") -> None:
    """Run the script that has called :func:`install`, for one of several plans."""
    sys.argv = argv
    _ENTERED.append(install(argv, boundary=boundary))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        _ENTERED.pop()


def _with_measured_plan(config: HetConfig, words: list[str]) -> tuple[HetConfig, list[str]]:
    """Returns the configuration with a plan from measurements on all ranks (automatic batches)."""
    from megatron_het.auto_batch.coordinate import plan_for

    assert config.auto_batch is not None
    hooks.refuse_yaml(words)
    plan, file, words = plan_for(config.auto_batch, words, config.least_zero)
    check_plan_alone(plan)
    return replace(config, plan=plan, plan_path=file), words


def _with_measured_shares(config: HetConfig, device: "Platform") -> HetConfig:
    """Completes the plan's shares by measurements; imports the code for it only if flags need it."""
    from megatron_het.auto_batch.measure import measured_config

    return measured_config(config, device)
