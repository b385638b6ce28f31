"""Which ids end an answer. Three sources, joined: no single one is complete.

Generation configs list what the publisher thought of (gpt-oss 3 ids, Llama 3.x 3, Gemma 4 3, but
some files have only the first), the tokenizer names one, and the chat template shows what really
closes an assistant turn.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle_jax.text.tokenizer import ChatTemplateError, TokenizerError

# Stands for an assistant's answer when a template is probed. Plain ASCII words, because templates
# strip blanks and cut at reasoning marks.
_PROBE = "peagle probe answer"


def _ids(value: Any, source: str) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(f"{source}: {value!r}; expected a token id or a list of token ids")
    return frozenset(values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def config_stop_ids(folder: str | Path) -> frozenset[int]:
    """`eos_token_id` (int or list) of generation_config.json and config.json in `folder`.

    Multimodal configs keep it under `text_config` too. Files and keys may be absent.
    Raises TokenizerError naming file and key for anything but ids.
    """
    found: frozenset[int] = frozenset()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        content = _read_json(path)
        for key, part in (("", content), ("text_config.", content.get("text_config") or {})):
            value = part.get("eos_token_id")
            if value is not None:
                found |= _ids(value, f"{path}: key {key}eos_token_id")
    return found


def template_stop_ids(
    render_chat: Callable[..., str],
    encode: Callable[..., list[int]],
    special_ids: frozenset[int],
) -> frozenset[int]:
    """The control token that the chat template writes right after an assistant's answer.

    Takes a tokenizer's two functions and its special ids. Empty without a template, and where the
    template writes no control token there or refuses the two-message conversation it is probed
    with.
    """
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = render_chat(turns, add_generation_prompt=False)
    except ChatTemplateError:
        return frozenset()
    tail = text.rpartition(_PROBE)[2].lstrip()
    return frozenset(encode(tail, add_special_tokens=False)[:1]) & special_ids


def stop_ids(folder: str | Path) -> frozenset[int]:
    """Ids that end an answer of the model in `folder`, from all three sources.

    Raises TokenizerError for malformed files, and where the folder has no tokenizer.
    """
    from peagle_jax.text.hf_tokenizer import load_hf_tokenizer

    return load_hf_tokenizer(folder).stop_ids
