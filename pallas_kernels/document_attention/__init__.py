"""Causal attention within documents: the depth-0 stream of P-EAGLE training."""

from pallas_kernels.document_attention.api import document_attention

__all__ = ["document_attention"]
