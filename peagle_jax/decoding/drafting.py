"""Drafting methods behind one interface: P-EAGLE, EAGLE-3, prompt lookup, none.

A method is a frozen object that knows shapes and graphs; its arrays are explicit. The round calls
`propose` before the target's pass and `observe` after it, prefill calls `prefill`. Whatever is
proposed, verification keeps the output lossless.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import KernelSharding, fill_hidden_tile
from peagle_jax.decoding import keys
from peagle_jax.decoding.expand import draft_tile, token_at, valid_rows
from peagle_jax.decoding.keys import Purpose
from peagle_jax.decoding.requests import Features, Requests
from peagle_jax.decoding.verification import Drafts, one_hot_law
from peagle_jax.models.cache import KVCache, init_cache
from peagle_jax.models.config import DrafterConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.target import TargetOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundView:
    """What a method may look at when it proposes.

    tokens, committed: as in DecodeState. wanted: drafts of this round, within the request's own
    number and the room that is left; 0 for a row that is idle. running: rows that take part.
    num_rounds: rounds before this one.
    """

    tokens: Any  # Int[Array, "B S"]
    committed: Any  # Int[Array, "B"]
    wanted: Any  # Int[Array, "B"]
    running: Any  # Bool[Array, "B"]
    num_rounds: Any  # Int[Array, "B"]
    requests: Requests


@runtime_checkable
class Method(Protocol):
    """One way to draft. `num_drafts` is K; `taps` are the target layers it reads (convention T)."""

    num_drafts: int
    taps: tuple[int, ...]

    def init(self, batch_size: int, cache_length: int, max_new_rows: int) -> Any:
        """The method's own state for an empty batch."""

    def prefill(
        self,
        params: Any,
        state: Any,
        next_tokens: Int[Array, "B T"],
        output: TargetOutput,
        positions: Int[Array, "B T"],
        is_last: Bool[Array, "B T"],
    ) -> Any:
        """Take in prompt rows that the target just processed.

        Row p goes with `next_tokens`, the prompt token p + 1; `is_last` marks the last prompt row,
        whose next token is not known yet: it enters with the first round.
        """

    def propose(
        self, params: Any, state: Any, view: RoundView, features: Features
    ) -> tuple[Drafts, Any]:
        """At most `view.wanted` drafts for each row."""

    def observe(
        self,
        params: Any,
        state: Any,
        output: TargetOutput,
        first_position: Int[Array, "B"],
        running: Bool[Array, "B"],
    ) -> Any:
        """Take in the K + 1 rows that the target just verified, the first at `first_position`."""


@dataclasses.dataclass(frozen=True)
class NoDrafts:
    """Plain decoding: the round with K = 0."""

    num_drafts: int = 0
    taps: tuple[int, ...] = ()

    def init(self, batch_size, cache_length, max_new_rows):
        return ()

    def prefill(self, params, state, next_tokens, output, positions, is_last):
        return state

    def propose(self, params, state, view, features):
        batch = view.committed.shape[0]
        return Drafts(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), state

    def observe(self, params, state, output, first_position, running):
        return state


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts copied from the request's own text: what followed the latest earlier occurrence of its
    last 3, else 2, else 1 tokens. No network; a request without an occurrence drafts nothing."""

    num_drafts: int
    longest: int = 3
    taps: tuple[int, ...] = ()

    init = NoDrafts.init
    prefill = NoDrafts.prefill
    observe = NoDrafts.observe

    def propose(self, params, state, view, features):
        start = find_continuation(view.tokens, view.committed, longest=self.longest)
        found = start < view.committed
        count = jnp.where(found, jnp.minimum(view.committed - start, view.wanted), 0)
        steps = jnp.arange(self.num_drafts, dtype=start.dtype)[None, :]
        positions = jnp.where(steps < count[:, None], start[:, None] + steps, -1)
        return Drafts(token_at(view.tokens, positions), count), state


def find_continuation(
    tokens: Int[Array, "B S"], committed: Int[Array, "B"], *, longest: int
) -> Int[Array, "B"]:
    """Where the text after the best earlier n-gram match starts; `committed` where there is none.

    The longest n wins, then the latest match. A match must leave a token to copy.
    """
    slots = tokens.shape[1]
    starts = jnp.arange(slots, dtype=committed.dtype)[None, :]
    best = committed
    for length in range(1, longest + 1):  # longer ones come last and win
        matches = starts + length < committed[:, None]
        for offset in range(length):
            suffix = token_at(tokens, (committed - length + offset)[:, None])
            shifted = jnp.roll(tokens, -offset, axis=1)  # what wraps lies past `committed`
            matches = matches & (shifted == suffix)
        latest = jnp.max(jnp.where(matches, starts, -1), axis=1)
        best = jnp.where(latest >= 0, latest + length, best)
    return best


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NetworkParams:
    """Parameters of a drafter network; `mask` is fc(mask_hidden), computed once per load."""

    network: Any
    mask: Any  # Float[Array, "H"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NetworkState:
    """What a drafter network carries from round to round.

    Attributes:
      cache: row p holds (token p + 1, target state p) for every committed pair; entries above
        come from drafting and are overwritten before a valid row can attend to them.
      fused: fused target states of the rows just verified.
      first_position: position of the first of them. How many are valid follows from the committed
        length, since the last valid row pairs with the newest token.
    """

    cache: KVCache
    fused: Any  # Float[Array, "B R H"]
    first_position: Any  # Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class _Network:
    """What P-EAGLE and EAGLE-3 share: the module, the cache, the verified rows."""

    num_drafts: int
    graph: Any
    config: DrafterConfig
    dtype: Any
    sharding: KernelSharding | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps if self.config.use_taps else ()

    def init(self, batch_size, cache_length, max_new_rows):
        cache = init_cache(
            self.config.layers,
            batch_size=batch_size,
            num_slots=cache_length,
            max_new_rows=max(max_new_rows, 2 * self.num_drafts),
            dtype=self.dtype,
        )
        shape = (batch_size, self.num_drafts + 1, self.config.hidden_size)
        return NetworkState(cache, jnp.zeros(shape, self.dtype), jnp.zeros(batch_size, jnp.int32))

    def _module(self, params: NetworkParams) -> Drafter:
        return nnx.merge(self.graph, params.network)

    def _fuse(self, drafter: Drafter, output: TargetOutput) -> Float[Array, "B T H"]:
        return drafter.fuse(output.taps if self.config.use_taps else output.hidden)

    def prefill(self, params, state, next_tokens, output, positions, is_last):
        drafter = self._module(params)
        fused = self._fuse(drafter, output)
        rows = jnp.where(is_last, -1, positions)
        cache = drafter(next_tokens, fused, rows, state.cache).cache
        ends = jnp.any(is_last, axis=1)
        index = jnp.argmax(is_last, axis=1)
        last = jnp.take_along_axis(fused, index[:, None, None], axis=1)
        kept = jnp.where(ends[:, None, None], last, state.fused[:, :1])
        last_position = jnp.take_along_axis(positions, index[:, None], axis=1)[:, 0]
        return NetworkState(
            cache,
            state.fused.at[:, :1].set(kept),
            jnp.where(ends, last_position, state.first_position),
        )

    def observe(self, params, state, output, first_position, running):
        fused = self._fuse(self._module(params), output)
        return NetworkState(
            state.cache,
            jnp.where(running[:, None, None], fused, state.fused),
            jnp.where(running, first_position, state.first_position),
        )

    def _num_valid(self, state: NetworkState, view: RoundView) -> Int[Array, "B"]:
        valid = view.committed - 1 - state.first_position
        return jnp.where(view.running, valid, 0)


@dataclasses.dataclass(frozen=True)
class PEagle(_Network):
    """All K drafts in one pass: valid rows, then K - 1 mask rows (arXiv 2602.01469)."""

    def propose(self, params, state, view, features):
        drafter = self._module(params)
        sharding = rows_sharding(self.sharding, view.committed.shape[0])
        tile = draft_tile(
            view.tokens,
            state.first_position,
            self._num_valid(state, view),
            view.wanted,
            num_drafts=self.num_drafts,
            mask_token_id=self.config.mask_token_id,
            sharding=sharding,
        )
        fused = fill_hidden_tile(
            state.fused, params.mask, tile.source_rows, tile.is_mask, sharding=sharding
        )
        output = drafter(tile.token_ids, fused, tile.positions, state.cache)
        hidden = jnp.take_along_axis(output.hidden, tile.sample_rows[:, :, None], axis=1)
        steps = jnp.arange(self.num_drafts, dtype=view.committed.dtype)
        tokens, law = choose_drafts(drafter, drafter.logits(hidden), view, steps, features)
        return Drafts(tokens, view.wanted, law), dataclasses.replace(state, cache=output.cache)


@dataclasses.dataclass(frozen=True)
class Eagle3(_Network):
    """One pass over the valid rows, then K - 1 single rows fed with the drafter's own state."""

    def propose(self, params, state, view, features):
        drafter = self._module(params)
        num_valid = self._num_valid(state, view)
        ids, positions = valid_rows(
            view.tokens, state.first_position, num_valid, self.num_drafts + 1
        )
        output = drafter(ids, state.fused, positions, state.cache)
        last = jnp.maximum(num_valid - 1, 0)[:, None, None]

        def choose(hidden: Float[Array, "B 1 H"], step: Array):
            logits = drafter.logits(hidden)
            return choose_drafts(drafter, logits, view, step[None], features)

        first, first_law = choose(
            jnp.take_along_axis(output.hidden, last, axis=1), jnp.zeros((), view.committed.dtype)
        )
        feedback = jnp.take_along_axis(output.feedback, last, axis=1)

        def one_more(carry, step):
            token, feedback, cache = carry
            position = view.committed - 2 + step
            position = jnp.where(view.running & (step < view.wanted), position, -1)
            output = drafter(token, feedback, position[:, None], cache)
            token, law = choose(output.hidden, step)
            return (token, output.feedback, output.cache), (token[:, 0], law)

        steps = jnp.arange(1, self.num_drafts, dtype=view.committed.dtype)
        (_, _, cache), (tokens, laws) = jax.lax.scan(
            one_more, (first, feedback, output.cache), steps
        )
        tokens = jnp.concatenate([first, tokens.T], axis=1)
        law = None
        if features.draft_law:
            law = jnp.concatenate([first_law, jnp.swapaxes(laws[:, :, 0], 0, 1)], axis=1)
        return Drafts(tokens, view.wanted, law), dataclasses.replace(state, cache=cache)


def rows_sharding(sharding: KernelSharding | None, batch_size: int) -> KernelSharding | None:
    """`sharding`, without its batch axes where they do not divide the batch."""
    if sharding is None or sharding.batch is None:
        return sharding
    axes = (sharding.batch,) if isinstance(sharding.batch, str) else sharding.batch
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return sharding if batch_size % shards == 0 else dataclasses.replace(sharding, batch=None)


def choose_drafts(
    drafter: Drafter,
    logits: Float[Array, "B N Vd"],
    view: RoundView,
    steps: Int[Array, "N"],
    features: Features,
) -> tuple[Int[Array, "B N"], Float[Array, "B N V"] | None]:
    """Drafts as target ids, and the law they were drawn from.

    Argmax, unless the request's rule draws its drafts: then from softmax(logits / temperature),
    with noise keyed by (committed length, index of the draft in the block).
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not features.draft_law:
        return drafter.target_ids(best), None
    temperature = view.requests.draft_temperature[:, None, None]
    draws = temperature > 0
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(draws, temperature, 1.0)
    indices = jnp.broadcast_to(steps[None, :], best.shape)
    noise = keys.gumbel(
        keys.block_keys(view.requests.seeds, Purpose.DRAFT, view.committed, indices),
        logits.shape[-1],
    )
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    tokens = drafter.target_ids(jnp.where(draws[:, :, 0], drawn, best))
    law = jax.nn.softmax(drafter.target_logits(scaled), axis=-1)
    return tokens, jnp.where(draws, law, one_hot_law(tokens, law.shape[-1]))
