"""Which drafting method a target and a drafter get, and how many drafts; refuses a misfit."""

import warnings
from typing import Any, Literal, get_args

import jax
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels import KernelSharding
from peagle_jax.decoding.drafting import (
    Eagle3,
    Method,
    NetworkParams,
    NoDrafts,
    PEagle,
    PromptLookup,
)
from peagle_jax.decoding.params import check_num_speculative_tokens
from peagle_jax.models.config import DrafterConfig, DrafterWarning, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.drafter import check_num_speculative_tokens as check_window
from peagle_jax.sharding import RULES

MethodName = Literal["p-eagle", "eagle3", "prompt-lookup", "none"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

DEFAULT_NUM_SPECULATIVE_TOKENS = 5


def resolve_num_speculative_tokens(config: DrafterConfig | None, value: int | None) -> int:
    """K: what was asked, else the head's own, else min(trained depth, 5); 1 to 31.

    Warns once where it is above the depth that a parallel head was trained for.
    """
    depths = None if config is None else config.num_depths
    if value is None:
        value = None if config is None else config.num_speculative_tokens
    if value is None:
        value = min(depths or DEFAULT_NUM_SPECULATIVE_TOKENS, DEFAULT_NUM_SPECULATIVE_TOKENS)
    check_num_speculative_tokens(value)
    if depths is not None and config.parallel_drafting and value > depths:
        warnings.warn(
            f"num_speculative_tokens {value} is above the {depths} depths that this drafter was "
            "trained for; drafts beyond them will rarely be accepted",
            DrafterWarning,
            stacklevel=3,
        )
    return value


def default_method(drafter: Drafter | None) -> MethodName:
    """P-EAGLE for a head trained for parallel drafting, EAGLE-3 for another, none without one."""
    if drafter is None:
        return "none"
    return "p-eagle" if drafter.config.parallel_drafting else "eagle3"


def make_method(
    name: str | None,
    target_config: TargetConfig,
    drafter: Drafter | None,
    *,
    num_speculative_tokens: int | None = None,
    force: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Method, Any]:
    """The method and its parameters (None without a network).

    Raises: ValueError for an unknown method, a missing drafter, a drafter that does not fit the
      target, or one trained for the other way of drafting (unless `force`; a head without
      `mask_hidden` cannot draft in parallel at all).
    """
    name = default_method(drafter) if name is None else name
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    if name == "none":
        return NoDrafts(), None
    if name == "prompt-lookup":
        return PromptLookup(resolve_num_speculative_tokens(None, num_speculative_tokens)), None
    if drafter is None:
        raise ValueError(f"method {name} needs a drafter; load one, or use prompt-lookup or none")
    config = drafter.config
    _check_fit(target_config, config)
    if name == "p-eagle" and not config.parallel_drafting:
        raise ValueError(
            "method p-eagle needs a head trained for parallel drafting, and this one has no "
            "mask_hidden; use method eagle3"
        )
    if name == "eagle3" and config.parallel_drafting and not force:
        raise ValueError(
            "this head was trained for parallel drafting (p-eagle); drafting token by token with "
            "it accepts little. Use method p-eagle, or force eagle3"
        )
    count = resolve_num_speculative_tokens(config, num_speculative_tokens)
    graph, network = nnx.split(drafter)
    if name == "eagle3":
        method = Eagle3(num_drafts=count, graph=graph, config=config, dtype=drafter.dtype)
        return method, NetworkParams(network, None)
    check_window(config, count)
    method = PEagle(
        num_drafts=count,
        graph=graph,
        config=config,
        dtype=drafter.dtype,
        sharding=None if mesh is None else KernelSharding(mesh, batch=RULES["batch"]),
    )
    leaves = jax.tree.leaves(network)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        mask = jax.eval_shape(lambda values: nnx.merge(graph, values).fused_mask(), network)
    else:
        mask = drafter.fused_mask()
    return method, NetworkParams(network, mask)


def _check_fit(target: TargetConfig, draft: DrafterConfig) -> None:
    if draft.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the drafter was made for a target of hidden size {draft.target_hidden_size}, this "
            f"target has {target.hidden_size}"
        )
    size = draft.target_vocab_size or draft.vocab_size
    if size != target.vocab_size:
        raise ValueError(
            f"the drafter was made for a vocabulary of {size}, this target has {target.vocab_size}"
        )
    bad = [tap for tap in draft.taps if not 0 <= tap <= target.num_layers]
    if draft.use_taps and bad:
        raise ValueError(
            f"the drafter taps layers {list(draft.taps)} (convention T), this target has "
            f"{target.num_layers} layers"
        )
