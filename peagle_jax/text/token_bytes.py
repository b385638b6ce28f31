"""The bytes that each token stands for, read from the decoder of a `tokenizers` tokenizer.

Decoders are chains of string rewrites; the chains of published language models come to "each token
has its bytes". Two exist: byte-level (GPT-2's printable stand-ins for the 256 bytes) and
SentencePiece style (`▁` for a blank, `<0xE2>` for a byte that has no token).
"""

import json
import re
from collections.abc import Callable, Sequence

import tokenizers

from peagle_jax.text.tokenizer import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Step = Callable[[str | bytes], str | bytes]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token.

    A token with a character outside the alphabet (an added token with a blank in it) is plain text.
    """
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def byte_level_token(data: bytes) -> str:
    """The stand-in characters of `data`: the inverse of `byte_level_bytes`."""
    inverse = {byte: character for character, byte in _ALPHABET.items()}
    return "".join(inverse[byte] for byte in data)


def _byte_fallback(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match.group(1), 16)]) if match else piece


def _on_text(rewrite: Callable[[str], str | bytes]) -> _Step:
    return lambda piece: rewrite(piece) if isinstance(piece, str) else piece


def _plan(decoder: dict, source: str) -> tuple[list[_Step], int]:
    """The per-token steps of a decoder's JSON, and the blanks stripped at the start of a text."""
    steps: list[_Step] = []
    strip_left = 0
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            steps.append(_on_text(byte_level_bytes))
        elif kind == "ByteFallback":
            steps.append(_byte_fallback)
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and "String" in part["pattern"]:
            old, new = part["pattern"]["String"], part["content"]
            steps.append(_on_text(lambda piece, old=old, new=new: piece.replace(old, new)))
        elif kind == "Metaspace":
            old = part["replacement"]
            steps.append(_on_text(lambda piece, old=old: piece.replace(old, " ")))
            strip_left = 0 if part.get("prepend_scheme") == "never" else 1
        elif kind == "Strip" and fused and part["content"] == " " and part["stop"] == 0:
            strip_left = part["start"]
        else:
            raise TokenizerError(
                f"{source}: decoder {kind!r} is not supported: no fixed bytes per token can be "
                "read from it (supported: ByteLevel, and Replace/ByteFallback/Fuse/Strip/Metaspace)"
            )
    return steps, strip_left


class TokenBytes:
    """Bytes per id of one `tokenizers` tokenizer, computed on first use and kept."""

    def __init__(self, backend: tokenizers.Tokenizer, *, source: str):
        """`source` is the file or folder that error messages name."""
        if backend.decoder is None:
            raise TokenizerError(f"{source}: the tokenizer has no decoder, so ids have no text")
        decoder = json.loads(backend.decoder.__getstate__())
        self._steps, self.strip_left = _plan(decoder, source)
        self._backend = backend
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of `token_id`, empty where the vocabulary has none. ValueError if negative."""
        data = self._known.get(token_id)
        if data is None:
            if token_id < 0:
                raise ValueError(f"token id {token_id} is negative")
            piece: str | bytes = self._backend.id_to_token(token_id) or ""
            for step in self._steps:
                piece = step(piece)
            data = piece.encode("utf-8") if isinstance(piece, str) else piece
            self._known[token_id] = data
        return data

    def text(self, ids: Sequence[int], *, skip: frozenset[int] = frozenset()) -> str:
        """UTF-8 reading of the ids' bytes, one U+FFFD per malformed piece; ids in `skip` add none.

        Raises ValueError for a negative id.
        """
        text = b"".join(self[int(i)] for i in ids if i not in skip).decode("utf-8", "replace")
        return strip_blanks(text, self.strip_left)


def strip_blanks(text: str, count: int) -> str:
    """`text` without up to `count` leading blanks."""
    for _ in range(count):
        text = text.removeprefix(" ")
    return text
