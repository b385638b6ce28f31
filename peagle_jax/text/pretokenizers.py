"""How text is cut into words before byte-pair merging, by the rule name that a GGUF file gives."""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

# Llama 3 (its published tokenizer.json): contractions in any case, words with one leading sign,
# up to three digits, signs with the line breaks after them, line breaks, blanks.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreRule:
    """A pre-tokenizer, and two habits that go with the name.

    `ignore_merges`: a word that is in the vocabulary whole is not merged up from bytes.
    `add_bos`: whether a begin token is added where the file does not say.
    """

    splitter: pre_tokenizers.PreTokenizer
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> PreRule:
    return PreRule(splitter=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))


def _smollm() -> PreRule:
    # Every Unicode numeric character first, then GPT-2's pattern on what lies between: two blanks
    # before a digit stay together, where the pattern alone would split them.
    return PreRule(
        splitter=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"), _gpt2().splitter]
        )
    )


def _llama3() -> PreRule:
    return PreRule(
        splitter=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        ignore_merges=True,
        add_bos=True,
    )


RULES = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}
"""Rule name in `tokenizer.ggml.pre` to its maker."""
