"""vLLM's `--speculative-config`, understood wherever a drafter is named. Nothing is loaded here."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from peagle_jax.decoding.methods import MethodName
from peagle_jax.decoding.params import check_num_speculative_tokens

# Keys that say how fast, not what: another engine's parallelism, kernels and batching.
_WITHOUT_EFFECT = frozenset(
    {
        "attention_backend",
        "disable_eagle_block_drop",
        "disable_padded_drafter_batch",
        "draft_tensor_parallel_size",
        "enforce_eager",
        "kv_cache_dtype",
        "max_model_len",
        "moe_backend",
        "use_local_argmax_reduction",
    }
)
_KNOWN = ("method", "model", "num_speculative_tokens", "parallel_drafting", "revision")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter, drafting how, how many tokens. `method` None: what suits the drafter."""

    model: str | None = None
    method: MethodName | None = None
    num_speculative_tokens: int | None = None
    revision: str | None = None


def parse_speculative_config(config: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Read vLLM's JSON object, as text or as a mapping.

    `method` "eagle3" is P-EAGLE with `"parallel_drafting": true` and EAGLE-3 without, as vLLM
    takes it; "ngram" is prompt lookup. Our own method names are understood too.

    Raises ValueError naming the key: not JSON, an unknown key or method, a value of a wrong type.
    """
    where = "speculative config"
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error}): {config!r}") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {config!r}")
    unknown = sorted(set(config) - set(_KNOWN) - _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(
            f"{where} has unknown key {unknown[0]!r}; understood are {', '.join(_KNOWN)}"
        )
    parallel = config.get("parallel_drafting", False)
    if not isinstance(parallel, bool):
        raise ValueError(f"{where}: parallel_drafting must be true or false, got {parallel!r}")
    for key in ("model", "revision"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(f"{where}: {key} must be a string, got {config[key]!r}")
    count = config.get("num_speculative_tokens")
    if count is not None:
        check_num_speculative_tokens(count, name=f"{where}: num_speculative_tokens")
    return SpeculativeConfig(
        model=config.get("model"),
        method=_method(config.get("method"), parallel),
        num_speculative_tokens=count,
        revision=config.get("revision"),
    )


def _method(name: Any, parallel: bool) -> MethodName | None:
    known: dict[Any, MethodName | None] = {
        None: "p-eagle" if parallel else None,
        "eagle3": "p-eagle" if parallel else "eagle3",
        "p-eagle": "p-eagle",
        "peagle": "p-eagle",
        "ngram": "prompt-lookup",
        "prompt-lookup": "prompt-lookup",
        "none": "none",
    }
    if name not in known:
        names = ", ".join(sorted(str(key) for key in known if key))
        raise ValueError(f"speculative config: method {name!r} is unknown; one of {names}")
    return known[name]
