"""Pallas kernels of P-EAGLE, one folder each, with the jnp reference that defines them."""

from pallas_kernels.dispatch import Implementation as Implementation
from pallas_kernels.dispatch import KernelSharding as KernelSharding
from pallas_kernels.document_attention import document_attention as document_attention
from pallas_kernels.expand_batch import CacheLayout as CacheLayout
from pallas_kernels.expand_batch import ExpandedBatch as ExpandedBatch
from pallas_kernels.expand_batch import ExpandedTile as ExpandedTile
from pallas_kernels.expand_batch import expand_batch as expand_batch
from pallas_kernels.expand_batch import expand_tile as expand_tile
from pallas_kernels.fill_hidden import fill_hidden as fill_hidden
from pallas_kernels.fill_hidden import fill_hidden_tile as fill_hidden_tile
from pallas_kernels.rollout_attention import rollout_attention as rollout_attention
from pallas_kernels.short_query_attention import short_query_attention as short_query_attention
from pallas_kernels.vocab_loss import VocabLoss as VocabLoss
from pallas_kernels.vocab_loss import target_argmax as target_argmax
from pallas_kernels.vocab_loss import vocab_loss as vocab_loss
