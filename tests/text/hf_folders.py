"""Write small Hugging Face tokenizer folders: byte-level, and SentencePiece style."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.text.token_bytes import byte_level_token


def byte_level_backend(specials: tuple[str, ...]) -> Tokenizer:
    """256 byte tokens, two merges, and `specials`, as Llama 3, Qwen and gpt-oss have them."""
    tokens = [byte_level_token(bytes([b])) for b in range(256)] + ["th", "the"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=[("t", "h"), ("th", "e")]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return backend


def sentencepiece_backend(specials: tuple[str, ...], *, strip: bool) -> Tokenizer:
    """BPE with byte fallback, as Gemma (`strip` off) and Llama 2 (`strip` on) have it."""
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdeth", "th", "the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "a")]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if strip else []) + [normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), behavior="isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return backend


def write_folder(
    folder: Path,
    backend: Tokenizer,
    *,
    template: str | None = None,
    generation: dict | None = None,
    config: dict | None = None,
    **special_tokens: str,
) -> Path:
    """A folder with tokenizer files and, where given, the two configs. Returns `folder`."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder
