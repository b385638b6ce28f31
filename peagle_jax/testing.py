"""Small stand-ins for a model and a tokenizer, for tests of code that uses this package."""

from peagle_jax.text.byte_tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer"]
