"""Tokenizers, chat templates, and text that streams."""

from peagle_jax.text.tokenizer import (
    ChatTemplateError,
    Messages,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

__all__ = ["ChatTemplateError", "Messages", "Tokenizer", "TokenizerError", "load_tokenizer"]
