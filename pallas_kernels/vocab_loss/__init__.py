"""Drafter loss over a large vocabulary: head products, softmax and loss fused in chunks."""

from pallas_kernels.vocab_loss.api import VocabLoss, target_argmax, vocab_loss
from pallas_kernels.vocab_loss.losses import LOSSES

__all__ = ["LOSSES", "VocabLoss", "target_argmax", "vocab_loss"]
