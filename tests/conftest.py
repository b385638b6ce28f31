"""What every test runs under: eight host devices, strict promotion, shape checks at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu" and "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import pytest
from jaxtyping import install_import_hook

# Held for the life of the process: the packages below are imported by the tests, after this file.
_shape_checks = install_import_hook(
    ["peagle_jax", "pallas_kernels", "train"], "beartype.beartype"
)


@pytest.fixture(autouse=True, scope="session")
def strict_numerics():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
