"""Ids to text as they come, one or many at a time, never half a character."""

import codecs
from collections.abc import Sequence

from peagle_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Streams the text of a growing list of ids.

    Whatever the block sizes, the pieces returned by `push` and the last one by `finish` join to
    `tokenizer.decode` of all the ids. Bytes that may still become a character are kept back; bytes
    that cannot are given as U+FFFD; a tail that never became a character is one U+FFFD at the end.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._blanks_to_strip = tokenizer.strip_left

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete (may be empty). Raises ValueError for a negative id."""
        data = b"".join(self._tokenizer.token_bytes(int(i)) for i in ids if i not in self._skip)
        return self._strip(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest, once no more ids come: empty, or one U+FFFD for an unfinished character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._blanks_to_strip:
            if not text.startswith(" "):
                self._blanks_to_strip = 0
                break
            text = text[1:]
            self._blanks_to_strip -= 1
        return text
