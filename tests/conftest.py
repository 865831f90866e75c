"""Property tests draw the same examples in every run; ``pytest --hypothesis-profile explore`` draws new and more."""

import os
import secrets

from hypothesis import settings

import megatron_het.features  # noqa: F401  (programs of all features can be read and made)

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("fixed")

# Dry runs of every plan that a test makes would take minutes.
os.environ.setdefault("HET_PLAN_VERIFY", "0")

# Ranks of test jobs share this in place of a file in the user's home.
os.environ.setdefault("MEGATRON_HET_TOKEN", secrets.token_hex(16))
