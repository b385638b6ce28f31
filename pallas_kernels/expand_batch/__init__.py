"""`expand_batch`: the drafter's input rows from the rows that the target just verified."""

from pallas_kernels.expand_batch.api import expand_batch as expand_batch
from pallas_kernels.expand_batch.api import expand_tile as expand_tile
from pallas_kernels.expand_batch.layout import CacheLayout as CacheLayout
from pallas_kernels.expand_batch.layout import ExpandedBatch as ExpandedBatch
from pallas_kernels.expand_batch.layout import ExpandedTile as ExpandedTile
from pallas_kernels.expand_batch.layout import Method as Method
from pallas_kernels.expand_batch.layout import drafting_method as drafting_method
from pallas_kernels.expand_batch.reference import expand_batch_reference as expand_batch_reference
