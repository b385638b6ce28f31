"""`make_generate_fn`: prefill and the decode loop as pure functions over explicit state.

    run = make_generate_fn(target, drafter, num_speculative_tokens=7, cache_length=512)
    state = run.init([[1, 2, 3]], [SamplingParams(max_tokens=32)])
    state = run.prefill(run.params, state, chunk=16)          # fills caches, samples one token
    state = run.generate(run.params, state)                   # the whole loop, one while_loop
    ids = run.outputs(state)[0]

`prefill`, `step` and `generate` are pure and can be put inside anyone's own jit. `run.compiled`
holds them jitted, with the state donated: one program per (chunk, batch) for prefill, one per batch
for decoding, shared by `step` and `generate`, whatever is asked or accepted.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from peagle_jax.decoding.drafting import Method
from peagle_jax.decoding.methods import make_method
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.decoding.requests import Features, Requests, make_requests
from peagle_jax.decoding.rounds import Params, decode_round, prefill_chunk
from peagle_jax.decoding.state import DecodeState, admit, init_state
from peagle_jax.models.cache import KVCache, init_cache
from peagle_jax.models.config import DrafterWarning, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import Target
from peagle_jax.sharding import batch_sharding, cache_shardings

UNTIL_DONE = np.iinfo(np.int32).max
ENOUGH_ROWS = 2048  # a prefill pass of so many rows is bound by arithmetic on every device


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GenerateFn:
    """Pure functions for one target, method, K, cache length and feature set.

    Attributes:
      params: the parameters, to pass to the functions below.
      context_length: most stored tokens of a request, prompt and output together.
      cache_length: slots of the caches and of the token buffer.
      max_prefill_chunk: most prompt rows of one pass.
      eos_token_ids: ids that end every request that does not ignore them.
      mesh: where the state lives; rows are split over its batch axes, heads over `tensor`.
    """

    params: Params
    target_graph: Any
    target_config: TargetConfig
    dtype: Any
    method: Method
    features: Features
    cache_length: int
    context_length: int
    max_prefill_chunk: int
    eos_token_ids: tuple[int, ...]
    max_stop_ids: int
    mesh: Mesh | None = None

    @property
    def num_speculative_tokens(self) -> int:
        return self.method.num_drafts

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        batch_size: int | None = None,
    ) -> tuple[Requests, np.ndarray]:
        """Checked requests, and the token buffer with their prompts (NumPy).

        Raises: ValueError that names the request and the field.
        """
        batch = len(prompts) if batch_size is None else batch_size
        requests = make_requests(
            prompts,
            params,
            batch_size=batch,
            vocab_size=self.target_config.vocab_size,
            context_length=self.context_length,
            eos_token_ids=self.eos_token_ids,
            num_speculative_tokens=self.num_speculative_tokens,
            features=self.features,
            max_stop_ids=self.max_stop_ids,
        )
        tokens = np.zeros((batch, self.cache_length), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        return requests, tokens

    def init(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        batch_size: int | None = None,
    ) -> DecodeState:
        """The state of a new batch, padded with finished rows to `batch_size`."""
        return self.compiled.empty(*self.requests(prompts, params, batch_size=batch_size))

    def admit(
        self,
        state: DecodeState,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> DecodeState:
        """New requests in these rows of a running batch; `prefill` then runs their prompts.

        The state is donated.
        """
        batch = state.tokens.shape[0]
        if len(set(rows)) != len(prompts) or not all(0 <= row < batch for row in rows):
            raise ValueError(
                f"admit: rows {list(rows)} must be {len(prompts)} different rows of a batch of "
                f"{batch}, one for each prompt"
            )
        requests, tokens = self.requests(prompts, params, batch_size=batch)
        order = np.full(batch, batch - 1 if len(prompts) < batch else 0, np.int32)
        order[list(rows)] = np.arange(len(prompts))
        chosen = np.zeros(batch, bool)
        chosen[list(rows)] = True
        return self.compiled.admit(state, requests, tokens, order, chosen)

    def admitted(
        self,
        state: DecodeState,
        requests: Requests,
        tokens: Int[Array, "B S"],
        order: Int[Array, "B"],
        rows: Bool[Array, "B"],
    ) -> DecodeState:
        """The state with request `order[row]` in each of `rows`. Pure; `order` must lie inside."""
        requests, tokens = jax.tree.map(lambda column: column[order], (requests, tokens))
        return self._placed(admit(state, requests, tokens, rows, features=self.features))

    def empty_state(
        self, requests: Requests, tokens: Int[Array | np.ndarray, "B S"]
    ) -> DecodeState:
        """The state before prefill, with fresh caches; takes what `requests` gives. Pure."""
        tokens = jnp.asarray(tokens)
        batch = tokens.shape[0]
        rows = max(self.max_prefill_chunk, self.num_speculative_tokens + 1)
        cache = init_cache(
            self.target_config.layers,
            batch_size=batch,
            num_slots=self.cache_length,
            max_new_rows=rows,
            dtype=self.dtype,
        )
        state = init_state(
            requests,
            tokens,
            cache,
            self.method.init(batch, self.cache_length, rows),
            vocab_size=self.target_config.vocab_size,
            features=self.features,
        )
        return self._placed(state)

    def _placed(self, state: DecodeState) -> DecodeState:
        """The state with its arrays where the mesh wants them."""
        if self.mesh is None:
            return state

        def place(leaf: Any) -> Any:
            if isinstance(leaf, KVCache):
                return jax.lax.with_sharding_constraint(leaf, cache_shardings(leaf, self.mesh))
            return jax.lax.with_sharding_constraint(leaf, batch_sharding(leaf.shape, self.mesh))

        return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, KVCache))

    def prefill(self, params: Params, state: DecodeState, *, chunk: int) -> DecodeState:
        """Run every pending prompt to its end, `chunk` rows of each at a time, and sample its first
        token. Rows that decode already are left alone."""
        if not 1 <= chunk <= self.max_prefill_chunk:
            raise ValueError(
                f"prefill chunk must be from 1 to max_prefill_chunk {self.max_prefill_chunk}, "
                f"got {chunk}"
            )
        body = functools.partial(
            prefill_chunk,
            params,
            chunk=chunk,
            target_graph=self.target_graph,
            method=self.method,
            features=self.features,
        )
        state = jax.lax.while_loop(lambda state: jnp.any(state.pending), body, state)
        return self._placed(state)

    def step(
        self, params: Params, state: DecodeState, num_rounds: Int[Array, ""] | int
    ) -> DecodeState:
        """At most `num_rounds` rounds; fewer when every row is done."""

        def unfinished(carry: tuple[Array, DecodeState]) -> Array:
            return (carry[0] < num_rounds) & jnp.any(carry[1].running)

        def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
            state = decode_round(
                params,
                carry[1],
                target_graph=self.target_graph,
                method=self.method,
                features=self.features,
            )
            return carry[0] + 1, state

        start = (jnp.zeros((), jnp.int32), state)
        return self._placed(jax.lax.while_loop(unfinished, body, start)[1])

    def generate(self, params: Params, state: DecodeState) -> DecodeState:
        """Rounds until every row is done: `step` without a bound."""
        return self.step(params, state, jnp.int32(UNTIL_DONE))

    @functools.cached_property
    def compiled(self) -> "Compiled":
        """The functions jitted once, the state donated: a state passed in is gone."""
        on_mesh = functools.partial(_on_mesh, self.mesh)
        return Compiled(
            empty=on_mesh(jax.jit(self.empty_state, out_shardings=self._home())),
            prefill=on_mesh(
                jax.jit(self.prefill, static_argnames="chunk", donate_argnames="state")
            ),
            step=on_mesh(jax.jit(self.step, donate_argnames="state")),
            admit=on_mesh(jax.jit(self.admitted, donate_argnums=0)),
        )

    def _home(self) -> jax.sharding.Sharding | None:
        """The one device of the parameters. A first state that is bound to it, as those that steps
        give are, needs no second program to be admitted to."""
        place = getattr(jax.tree.leaves(self.params)[0], "sharding", None)
        alone = self.mesh is None and isinstance(place, jax.sharding.SingleDeviceSharding)
        return place if alone else None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        batch_size: int | None = None,
        chunk: int | None = None,
    ) -> DecodeState:
        """Prompts to finished state with the compiled functions."""
        state = self.init(prompts, params, batch_size=batch_size)
        longest = max(len(prompt) for prompt in prompts)
        if chunk is None:
            batch = state.tokens.shape[0]
            chunk = prompt_bucket(longest, self.max_prefill_chunk, batch=batch)
        state = self.compiled.prefill(self.params, state, chunk=chunk)
        return self.compiled.step(self.params, state, np.int32(UNTIL_DONE))

    def outputs(self, state: DecodeState) -> list[list[int]]:
        """Output ids of every request, on the host; the token that ended it is included."""
        tokens, committed, prompt = jax.device_get(
            (state.tokens, state.committed, state.requests.prompt_length)
        )
        return [
            tokens[row, prompt[row] : committed[row]].tolist()
            for row in range(tokens.shape[0])
            if prompt[row] > 0
        ]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """`empty(requests, tokens)`, `prefill(params, state, chunk=)`, `step(params, state, n)`,
    `admit(state, requests, tokens, order, rows)`; with a mesh it is set while they run."""

    empty: Callable[..., DecodeState]
    prefill: Callable[..., DecodeState]
    step: Callable[..., DecodeState]
    admit: Callable[..., DecodeState]


def _on_mesh(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    if mesh is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*args, **kwargs)

    return call


def make_generate_fn(
    target: Target,
    drafter: Drafter | None = None,
    method: str | Method | None = None,
    *,
    cache_length: int,
    num_speculative_tokens: int | None = None,
    features: Features = Features(),  # noqa: B008 (frozen)
    context_length: int | None = None,
    allow_longer_context: bool = False,
    max_prefill_chunk: int = 512,
    eos_token_ids: Sequence[int] | None = None,
    max_stop_ids: int = 16,
    force: bool = False,
    method_params: Any = None,
    mesh: Mesh | None = None,
) -> GenerateFn:
    """Build the pure functions that decode with `target`.

    Args:
      drafter: needed by p-eagle and eagle3.
      method: a name, None for what suits the drafter (none without one), or an object with the
        interface of `drafting.Method`, whose parameters are then `method_params`.
      cache_length: slots of the caches; K rows beyond a request's limit are never written.
      num_speculative_tokens: K, 1 to 31; None as `resolve_num_speculative_tokens` says.
      features: what the programs can do; `Features.of(params)` is the smallest set.
      context_length: most stored tokens of a request; None is `cache_length`.
      allow_longer_context: serve beyond the target's configured positions.
      eos_token_ids: None is the target config's.
      force: draft with a method that the head was not trained for.
      mesh: the mesh that the parameters live on; None is one device.

    Raises: ValueError where the parts do not fit or the context is beyond the model's.
    """
    config = target.config
    context_length = cache_length if context_length is None else context_length
    if not 1 <= context_length <= cache_length:
        raise ValueError(
            f"context_length must be from 1 to cache_length {cache_length}, got {context_length}"
        )
    if context_length > config.max_positions and not allow_longer_context:
        raise ValueError(
            f"context_length {context_length} is above the {config.max_positions} positions that "
            "the target is configured for; lower it, or pass allow_longer_context=True"
        )
    if method is None or isinstance(method, str):
        method, method_params = make_method(
            method,
            config,
            drafter,
            num_speculative_tokens=num_speculative_tokens,
            force=force,
            mesh=mesh,
        )
    draft_config = getattr(method, "config", None)
    if draft_config is not None and context_length > draft_config.max_positions:
        warnings.warn(
            f"the drafter is configured for {draft_config.max_positions} positions and will run "
            f"to {context_length}, the target's context; its rotary embedding is computed there",
            DrafterWarning,
            stacklevel=2,
        )
    graph, target_params = nnx.split(target)
    return GenerateFn(
        params=Params(target_params, method_params),
        target_graph=graph,
        target_config=config,
        dtype=target.dtype,
        method=method,
        features=features,
        cache_length=cache_length,
        context_length=context_length,
        max_prefill_chunk=min(max_prefill_chunk, cache_length),
        eos_token_ids=tuple(config.eos_token_ids if eos_token_ids is None else eos_token_ids),
        max_stop_ids=max_stop_ids,
        mesh=mesh,
    )


def prompt_bucket(length: int, largest: int, smallest: int = 16, *, batch: int = 1) -> int:
    """The prefill chunk for prompts up to `length`: a power of two from `smallest`, at most
    `largest`; longer prompts take several chunks of the same program.

    Padding rows are computed too, so a chunk of a large batch ends where the pass has
    ENOUGH_ROWS rows.
    """
    size = smallest
    while size < length and size * batch < ENOUGH_ROWS:
        size *= 2
    return min(size, largest)
