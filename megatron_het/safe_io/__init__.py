"""Files and text that come from outside: read within limits, shown within limits, written safely.

Plans, clusters, models, profiles and programs are read here and nowhere else, so that no file can stop
the program, exhaust memory or become part of a shell script.  Standard library only; ``yaml`` is
imported when a YAML file is read.  ``reading.py`` has the limits and what YAML may say, ``writing.py`` what may
be replaced.
"""

from megatron_het.safe_io.reading import (
    MAX_BYTES,
    MAX_DEVICES,
    MAX_PASSES,
    FileError,
    LineParser,
    add_options,
    amount,
    count,
    one_line,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
    read_yaml,
    shown,
    split_words,
)
from megatron_het.safe_io.writing import (
    check_replaces,
    check_target,
    ends_with_its_reader,
    write_bytes,
    write_json,
    write_text,
)
