"""Which drafts are kept and which token follows them: greedy, match, rejection, block.

Row i of the processed logits is the target's law of the token at position `committed + i`, given
that drafts 0..i-1 are kept. Each rule returns how many drafts are kept (a) and the a + 1 tokens
that the round emits: the kept drafts and one token of the target's. The output has the target's law
whatever the drafts are (Leviathan et al. 2211.17192, Chen et al. 2302.01318 for `rejection`, Sun et
al. 2403.10444 for `block`); a better drafter only makes a larger.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decoding import keys
from peagle_jax.decoding.keys import Purpose
from peagle_jax.decoding.requests import BLOCK, MATCH, Features, Requests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What a method proposes in a round.

    Attributes:
      tokens: target ids; places from `count` on are never read as drafts.
      count: drafts of each request, 0 to K.
      law: probabilities over target ids that each draft was drawn from; None when every draft is
        certain (one-hot), as argmax and prompt-lookup drafts are.
    """

    tokens: Int[Array, "B K"]
    count: Int[Array, "B"]
    law: Float[Array, "B K V"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """`tokens` [B, K+1]: those up to and including index `num_accepted` are the round's output."""

    tokens: Int[Array, "B R"]
    num_accepted: Int[Array, "B"]


def verify(
    logits: Float[Array, "B R V"],
    drafts: Drafts,
    requests: Requests,
    committed: Int[Array, "B"],
    features: Features,
) -> Verdict:
    """Check K = R - 1 drafts of every request by its own rule, all rules mixed in one batch.

    Args:
      logits: processed logits (`peagle_jax.decoding.logits.process_logits`), float32.
      committed: tokens committed before the round, which is the position of row 0's token.
    """
    verdict = match(own_tokens(logits, requests, committed, features), drafts)
    if not features.draft_law or drafts.tokens.shape[1] == 0:
        return verdict
    by_law = (requests.temperature > 0) & (requests.rule != MATCH)
    other = _verify_by_law(logits, drafts, requests, committed)
    return Verdict(
        jnp.where(by_law[:, None], other.tokens, verdict.tokens),
        jnp.where(by_law, other.num_accepted, verdict.num_accepted),
    )


def own_tokens(
    logits: Float[Array, "B R V"],
    requests: Requests,
    committed: Int[Array, "B"],
    features: Features,
) -> Int[Array, "B R"]:
    """The token that plain decoding draws in each row: argmax, or Gumbel-max keyed by position."""
    if not features.sampled:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    positions = committed[:, None] + jnp.arange(logits.shape[1], dtype=committed.dtype)[None, :]
    noise = keys.gumbel(
        keys.position_keys(requests.seeds, Purpose.TARGET, positions), logits.shape[-1]
    )
    noise = jnp.where((requests.temperature > 0)[:, None, None], noise, jnp.float32(0))
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def match(own: Int[Array, "B R"], drafts: Drafts) -> Verdict:
    """Keep drafts while they equal the target's own tokens; lossless token by token."""
    agree = (drafts.tokens == own[:, :-1]) & _is_draft(drafts)
    return Verdict(own, _leading(agree))


def _verify_by_law(
    logits: Float[Array, "B R V"], drafts: Drafts, requests: Requests, committed: Int[Array, "B"]
) -> Verdict:
    batch, num_rows, vocab = logits.shape
    target = jax.nn.softmax(logits, axis=-1)
    law = one_hot_law(drafts.tokens, vocab) if drafts.law is None else drafts.law
    is_draft = _is_draft(drafts)
    steps = jnp.arange(num_rows, dtype=committed.dtype)[None, :]
    positions = committed[:, None] + steps
    block = requests.rule == BLOCK

    by_position = keys.uniform(
        keys.position_keys(requests.seeds, Purpose.ACCEPT, positions[:, :-1])
    )
    by_index = keys.uniform(
        keys.block_keys(
            requests.seeds,
            Purpose.BLOCK_ACCEPT,
            committed,
            jnp.broadcast_to(steps[:, :-1], drafts.tokens.shape),
        )
    )
    ratios = acceptance_ratios(target, law, drafts.tokens)
    num_rejection = _leading((by_position < ratios) & is_draft)
    reach, thresholds = block_thresholds(target, law, ratios, drafts.count)
    num_block = last_true((by_index < thresholds) & is_draft)
    num_accepted = jnp.where(block, num_block, num_rejection)

    weights = residual(
        target, law, num_accepted, drafts.count, scale=jnp.where(block[:, None], reach, 1.0)
    )
    last_position = keys.position_keys(
        requests.seeds, Purpose.RESIDUAL, (committed + num_accepted)[:, None]
    )
    last_index = keys.block_keys(
        requests.seeds, Purpose.BLOCK_RESIDUAL, committed, num_accepted[:, None]
    )
    noise = jnp.where(
        block[:, None, None], keys.gumbel(last_index, vocab), keys.gumbel(last_position, vocab)
    )
    last = jnp.argmax(jnp.log(weights) + noise[:, 0, :], axis=-1).astype(jnp.int32)
    padded = jnp.concatenate([drafts.tokens, jnp.zeros((batch, 1), jnp.int32)], axis=1)
    tokens = jnp.where(steps == num_accepted[:, None], last[:, None], padded)
    return Verdict(tokens, num_accepted)


def one_hot_law(tokens: Int[Array, "B K"], vocab_size: int) -> Float[Array, "B K V"]:
    """The law of drafts that are certain."""
    return jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)


def acceptance_ratios(
    target: Float[Array, "B R V"], law: Float[Array, "B K V"], tokens: Int[Array, "B K"]
) -> Float[Array, "B K"]:
    """p(x) / q(x) of each draft, 0 where q gives it no chance (such a draft is never kept)."""
    p = jnp.take_along_axis(target[:, :-1], tokens[:, :, None], axis=-1)[:, :, 0]
    q = jnp.take_along_axis(law, tokens[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)


def block_thresholds(
    target: Float[Array, "B R V"],
    law: Float[Array, "B K V"],
    ratios: Float[Array, "B K"],
    count: Int[Array, "B"],
) -> tuple[Float[Array, "B R"], Float[Array, "B K"]]:
    """P_0..P_K and h_1..h_K of block verification (2403.10444, algorithm 2).

    P_i = min(P_{i-1} p(x_i)/q(x_i), 1) is how much of the drafts' law reaches x_i; h_i the chance
    to keep i drafts when no longer block is kept. Before the last draft h_i = S_i / (S_i + 1 - P_i)
    with S_i = sum of max(P_i p_{i+1} - q_{i+1}, 0); at the last, h = P.
    """

    def step(reach: Float[Array, "B"], ratio: Float[Array, "B"]):
        reach = jnp.minimum(reach * ratio, 1.0)
        return reach, reach

    start = jnp.ones(ratios.shape[0], jnp.float32)
    _, reaches = jax.lax.scan(step, start, ratios.T)
    reaches = reaches.T
    excess = jnp.maximum(reaches[:, :-1, None] * target[:, 1:-1] - law[:, 1:], 0.0).sum(axis=-1)
    denominator = excess + 1.0 - reaches[:, :-1]
    inner = jnp.where(denominator > 0, excess / jnp.where(denominator > 0, denominator, 1.0), 1.0)
    inner = jnp.concatenate([inner, reaches[:, -1:]], axis=1)
    is_last = jnp.arange(ratios.shape[1], dtype=count.dtype)[None, :] == count[:, None] - 1
    thresholds = jnp.where(is_last, reaches, inner)
    return jnp.concatenate([start[:, None], reaches], axis=1), thresholds


def residual(
    target: Float[Array, "B R V"],
    law: Float[Array, "B K V"],
    num_accepted: Int[Array, "B"],
    count: Int[Array, "B"],
    *,
    scale: Float[Array, "B R"],
) -> Float[Array, "B V"]:
    """Weights of the token after the kept drafts: max(scale p - q, 0), or p after the last draft.

    Where rounding leaves no weight (p and q equal) the target's own law is used.
    """

    def at(values: Array, index: Int[Array, "B"]) -> Array:
        return jnp.take_along_axis(values, index[:, None, None], axis=1)[:, 0, :]

    p = at(target, num_accepted)
    q = at(law, jnp.minimum(num_accepted, law.shape[1] - 1))
    factor = jnp.take_along_axis(scale, num_accepted[:, None], axis=1)
    left = jnp.maximum(factor * p - q, 0.0)
    use_target = (num_accepted >= count)[:, None] | ~jnp.any(left > 0, axis=-1, keepdims=True)
    return jnp.where(use_target, p, left)


def _is_draft(drafts: Drafts) -> Array:
    steps = jnp.arange(drafts.tokens.shape[1], dtype=drafts.count.dtype)
    return steps[None, :] < drafts.count[:, None]


def _leading(flags: Array) -> Int[Array, "B"]:
    """How many flags are true before the first false one."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def last_true(flags: Array) -> Int[Array, "B"]:
    """1 + index of the last true flag, 0 where there is none."""
    steps = jnp.arange(1, flags.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(flags, steps, 0), axis=1, initial=0)
