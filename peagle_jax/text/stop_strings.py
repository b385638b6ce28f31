"""Stop strings: where generated text ends, in characters and in tokens.

The rule speaks of the text alone, so that neither token borders nor block sizes matter: the match
that is complete first, reading character by character, wins; of two that are complete at the same
character, the longer. Text is cut before the match. The tokens kept are all up to and including
the one whose bytes complete the match, which is where decoding one token at a time would stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle_jax.text.detokenize import Detokenizer
from peagle_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """The stop string that was found, and the characters and tokens that remain of the output."""

    stop: str
    text_length: int
    num_tokens: int


def check_stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """`stop` as a tuple without repetitions.

    Raises ValueError for an empty string (it would match everywhere) and for a bare str, whose
    letters would be taken for stop strings.
    """
    if isinstance(stop, str):
        raise ValueError(f"stop must be a list of strings; got the bare string {stop!r}")
    for index, string in enumerate(stop):
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop[{index}] is {string!r}; a stop string has at least 1 character")
    return tuple(dict.fromkeys(stop))


def first_match(text: str, stop: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """(begin, stop string) of the first match to be complete at a character at or after `start`.

    Characters before `start` may belong to a match, they just do not complete one.
    """
    best: tuple[int, int, str] | None = None
    for string in stop:
        begin = text.find(string, max(0, start - len(string) + 1))
        if begin >= 0:
            found = (begin + len(string), begin, string)
            best = found if best is None else min(best, found)
    return None if best is None else (best[1], best[2])


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without completing it."""
    longest = min(len(text), max((len(s) for s in stop), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(s) > length and s.startswith(tail) for s in stop):
            return length
    return 0


class TextStream:
    """Text of a growing list of ids, cut at the first stop string, safe to print as it comes.

    `push` returns only what no later token can take back: whole characters, and nothing that may
    be the beginning of a stop string. Once `match` is set the stream ignores further ids. All
    pieces join to `text`, which equals the text that decoding one token at a time gives.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        """With `include_stop` the match stays in the text. Matches that are complete before token
        number `min_tokens` (from 1) do not count. Raises ValueError for unusable stop strings.
        """
        self._stop = check_stop_strings(stop)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._emitted = 0
        self._pending = ""  # text not yet given out
        self._num_tokens = 0
        self._finished = False
        self.match: StopMatch | None = None

    @property
    def text(self) -> str:
        """Everything given out so far; all of it once `finish` was called or `match` is set."""
        return "".join(self._pieces)

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output so far: up to the one that completed a match."""
        return self._num_tokens

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids, return the text that is now certain."""
        given = []
        for token_id in ids:
            if self.match is not None:
                break
            self._num_tokens += 1
            given.append(self._take(self._detokenizer.push([token_id])))
        return "".join(given)

    def finish(self) -> str:
        """The text held back, once no more ids come. An unfinished character is one U+FFFD."""
        if self._finished or self.match is not None:
            return ""
        self._finished = True
        given = self._take(self._detokenizer.finish())
        if self.match is None:
            given += self._give(len(self._pending))
        return given

    def _take(self, new: str) -> str:
        if not new:
            return ""
        scanned = len(self._pending)
        self._pending += new
        if self._stop and self._num_tokens >= self._min_tokens:
            found = first_match(self._pending, self._stop, scanned)
            if found is not None:
                begin, string = found
                length = begin + (len(string) if self._include_stop else 0)
                self.match = StopMatch(
                    stop=string,
                    text_length=self._emitted + length,
                    num_tokens=self._num_tokens,
                )
                return self._give(length)
        return self._give(len(self._pending) - _held_back(self._pending, self._stop))

    def _give(self, length: int) -> str:
        given, self._pending = self._pending[:length], self._pending[length:]
        self._pieces.append(given)
        self._emitted += len(given)
        return given
