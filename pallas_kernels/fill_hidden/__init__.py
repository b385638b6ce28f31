"""`fill_hidden`: hidden states of the draft rows, copied, masked and padded in one pass."""

from pallas_kernels.fill_hidden.api import fill_hidden as fill_hidden
from pallas_kernels.fill_hidden.api import fill_hidden_tile as fill_hidden_tile
from pallas_kernels.fill_hidden.reference import fill_hidden_reference as fill_hidden_reference
