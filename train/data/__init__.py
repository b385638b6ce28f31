"""From conversations on disk to packed batches. NumPy only: data workers never touch a device."""
