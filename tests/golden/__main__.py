"""Recorded outputs: ``python -m tests.golden`` compares, ``--update`` records, ``--show KIND NAME`` prints one whole.

A change that is wanted is recorded in the commit that makes it, with the reason in its message.
"""

import argparse
import sys

from tests.golden.corpus import KINDS_OF_OUTPUT, RECORDS, differences, plan_json, program_rows, programs_of, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=KINDS_OF_OUTPUT, metavar="KIND",
                        help=f"kinds of output: {', '.join(KINDS_OF_OUTPUT)} (default: all)")  # fmt: skip
    parser.add_argument("--update", action="store_true", help="record what there is now")
    parser.add_argument("--show", nargs=2, metavar=("KIND", "NAME"), help="print one program or plan.json whole")
    options = parser.parse_args()
    if options.show:
        kind, name = options.show
        print(plan_json(name) if kind == "plans" else programs_of(program_rows()[name], name))
        return 0
    found = 0
    for kind in options.kinds or KINDS_OF_OUTPUT:
        corpus = KINDS_OF_OUTPUT[kind]()
        changed = differences(kind, corpus) if (RECORDS / f"{kind}.txt").exists() else []
        found += len(changed)
        print(f"{kind}: {len(corpus)} outputs, {len(changed)} changed")
        if options.update:
            write(kind, corpus)
        print(*changed, sep="\n")
    return int(found > 0 and not options.update)


if __name__ == "__main__":
    sys.exit(main())
