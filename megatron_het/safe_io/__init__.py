"""Reading and printing untrusted files and text within limits, and writing files safely.

Plans, clusters, models, profiles and programs are read only here, so that no file can make
the program hang, exhaust memory or become part of a shell script.  Standard library only; ``yaml`` is
imported when a YAML file is read.  ``reading.py`` has the limits and the accepted YAML, ``writing.py`` decides which
files may be replaced.
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
