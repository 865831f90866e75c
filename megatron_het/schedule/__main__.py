"""``python -m megatron_het.schedule``"""

import sys

from megatron_het.schedule.view.cli import main

sys.exit(main())
