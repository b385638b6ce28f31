"""P-EAGLE parallel-drafting speculative decoding in JAX.

    import peagle_jax
    engine = peagle_jax.load("smollm2-135m")
    [answer] = engine.generate("Why is the sky blue?")

Names are imported at first use, so that `import peagle_jax` is instant.
"""

import importlib

_HOME = {
    "load": "peagle_jax.loading",
    "Engine": "peagle_jax.engine",
    "StreamPiece": "peagle_jax.engine",
    "GenerationResult": "peagle_jax.results",
    "Stats": "peagle_jax.results",
    "SamplingParams": "peagle_jax.decoding.params",
    "Features": "peagle_jax.decoding.requests",
    "GenerateFn": "peagle_jax.decoding.generate",
    "make_generate_fn": "peagle_jax.decoding.generate",
    "DecodeState": "peagle_jax.decoding.state",
    "TargetConfig": "peagle_jax.models.config",
    "DrafterConfig": "peagle_jax.models.config",
    "Target": "peagle_jax.models.target",
    "init_target": "peagle_jax.models.target",
    "Drafter": "peagle_jax.models.drafter",
    "init_drafter": "peagle_jax.models.drafter",
    "load_target": "peagle_jax.checkpoints.load",
    "load_drafter": "peagle_jax.checkpoints.drafter_files",
    "save_drafter": "peagle_jax.checkpoints.drafter_export",
    "load_tokenizer": "peagle_jax.text.tokenizer",
    "make_mesh": "peagle_jax.sharding",
}

__all__ = sorted(_HOME)  # noqa: PLE0605
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'peagle_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
