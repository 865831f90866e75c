"""Property tests draw the same examples in every run; ``pytest --hypothesis-profile explore`` draws new and more."""

import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import settings

import megatron_het.features  # noqa: F401  (programs of all features can be read and made)

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("fixed")

# Dry runs of every plan that a test makes would take minutes.
os.environ.setdefault("HET_PLAN_VERIFY", "0")

# Ranks of test jobs share this in place of a file in the user's home.
os.environ.setdefault("MEGATRON_HET_TOKEN", secrets.token_hex(16))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Takes back what a test (or Megatron in it) wrote into the environment, in which later tests start processes."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]
    os.environ.update(before)
