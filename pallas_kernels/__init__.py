"""Pallas kernels of P-EAGLE, one folder each, with the jnp reference that defines them."""
