"""Attention of the mask rows of P-EAGLE training: prefix up to the anchor and the own rollout."""

from pallas_kernels.rollout_attention.api import rollout_attention

__all__ = ["rollout_attention"]
