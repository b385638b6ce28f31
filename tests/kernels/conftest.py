"""What the tests of one operation share: they run over every implementation at hand."""

import jax
import pytest


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


@pytest.fixture(
    params=[
        "reference",
        "interpret",
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def implementation(request) -> str:
    """The meaning in jnp, the interpreted kernel and, where there is a GPU, the compiled kernel."""
    if request.param == "triton" and not _on_gpu():
        pytest.skip("needs an NVIDIA GPU")
    return request.param
