"""Checks that no field of Hugging Face's ``config.json`` is lost, and that Megatron then computes the same.

``python -m benchmarks.configs --json OUT`` reads the files of ``configs.yaml`` and changes every field of
each of them.  A field is lost if its change alters neither the model that is read nor the refusal.  Then a
small model of every family gets random weights, and its logits by ``transformers`` and by Megatron are compared.
``--markdown docs/models.md`` writes the tables of fields and families.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import command_line, write_between_marks, write_report
from tools.planner.errors import PlannerError
from tools.planner.inputs.model_configs import RULES, from_config
from tools.planner.inputs.model_families import FAMILIES, INSIDE, NOT_OF_THE_MODEL

Config = dict[str, Any]
_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8"))
FILES: dict[str, Config] = _DATA["published"]  # files by the usual name of the model
SEQ_LENGTH = 4096
MOST = 1e-5  # largest relative difference of logits that counts as rounding
_WITHOUT_MEANING: dict[str, str] = _DATA["without_meaning"]


def read(config: Config) -> dict[str, Any] | str:
    """Returns the model that the planner reads from a file, or its error."""
    try:
        return from_config(config, "config.json", SEQ_LENGTH)
    except PlannerError as error:
        return str(error)


def other(value: Any) -> Any:
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, str):
        return "float16" if value.startswith("bfloat") else value + "_other"
    if isinstance(value, list):
        return value[1:] + value[:1] if len(set(map(str, value))) > 1 else [*value, 1]
    if isinstance(value, dict):
        return {key: other(item) for key, item in value.items()}
    return 1


def changed(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields every field of the model, with the file in which that field is changed."""
    inner = config.get("text_config") if config.get("model_type") in INSIDE else None
    for key, value in (inner or config).items():
        if key in NOT_OF_THE_MODEL:
            continue
        new = {**(inner or config), key: other(value)}
        yield key, {**config, "text_config": new} if inner else new


def lost_fields(config: Config) -> list[str]:
    """Returns the fields whose change has no effect."""
    before = read(config)
    return [key for key, file in changed(config) if read(file) == before]


def files() -> dict[str, Any]:
    """Returns the result for every file."""
    found = {}
    for name, config in FILES.items():
        document = read(config)
        assert isinstance(document, dict), document
        unseen = lost_fields(config)
        found[name] = {
            "fields": len(config.get("text_config", config)),
            "flags": document.get("flags", {}),
            "refused": document.get("lost", {}),
            "unread": document.get("unread", []),
            "without_meaning": {key: _WITHOUT_MEANING[key] for key in unseen if key in _WITHOUT_MEANING},
            "lost": [key for key in unseen if key not in _WITHOUT_MEANING],
        }
    return found


def logits() -> dict[str, float]:
    """Returns the differences of logits of the small models."""
    from megatron_het.device import activate

    activate()  # Megatron binds on import what the platform replaces
    from benchmarks.config_models import SMALL, logit_difference, one_rank

    with one_rank():
        return {name: logit_difference(name) for name in SMALL}


def tables() -> str:
    """The tables of fields and of families, in Markdown."""
    lines = ["| fields of `config.json` | become |", "|---|---|"]
    lines += [f"| {', '.join(f'`{key}`' for key in rule.keys)} | {rule.becomes} |" for rule in RULES]
    lines += ["", "| `model_type` | models | always | not in Megatron |", "|---|---|---|---|"]
    for kind, family in sorted(FAMILIES.items()):
        always = ", ".join(f"`--{n}{'' if value is True else f' {value}'}`" for n, value in family.flags.items())
        lost = "; ".join(dict.fromkeys(family.lost.values()))
        lines.append(f"| `{kind}` | {family.title} | {always} | {lost} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; exit code 1 where a field is lost, or logits differ."""
    parser = command_line("benchmarks.configs", __doc__)
    parser.add_argument("--markdown", type=Path, help="file with the marks between which the tables go")
    options = parser.parse_args()
    by_file, by_model = files(), logits()
    lost = sum(len(entry["lost"]) + len(entry["unread"]) for entry in by_file.values())
    worst = max(by_model.values())
    report = {
        "configs": len(by_file),
        "lost_fields": lost,
        "logit_difference": worst,
        "files": by_file,
        "models": by_model,
    }
    if options.markdown is not None:
        write_between_marks(options.markdown, "benchmarks.configs", tables())
    write_report(options.json, report)
    return int(lost > 0 or worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
