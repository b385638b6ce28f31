"""`short_query_attention`: verify and draft attention over a contiguous, ring or paged cache."""

from pallas_kernels.short_query_attention.api import short_query_attention as short_query_attention
from pallas_kernels.short_query_attention.reference import (
    short_query_attention_reference as short_query_attention_reference,
)
