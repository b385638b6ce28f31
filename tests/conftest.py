"""What every test runs under: eight host devices, strict promotion, shape checks at run time."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time, and many tests compile the same tiny programs. The folder is
# shared by parallel workers and by later runs; programs are found by their content.
_programs = pathlib.Path(tempfile.gettempdir()) / f"peagle-jax-test-programs-{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_programs))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
if os.environ["JAX_PLATFORMS"] == "cpu" and "device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Eight devices, and half the compile time: tiny programs gain nothing from LLVM's optimiser.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_llvm_disable_expensive_passes=true"
    )

import jax
import pytest
from jaxtyping import install_import_hook

# Held for the life of the process: the packages below are imported by the tests, after this file.
_shape_checks = install_import_hook(["peagle_jax", "pallas_kernels", "train"], "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def strict_numerics():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
