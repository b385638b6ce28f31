"""P-EAGLE parallel-drafting speculative decoding in JAX."""
