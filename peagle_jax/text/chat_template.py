"""Render a model's Jinja chat template in a sandbox, by the rules that published templates expect.

The rules are those of transformers (its documentation, "Chat templates"): blocks trimmed and
left-stripped, loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps HTML signs,
and `{% generation %}` marks, which change nothing in the text.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from peagle_jax.text.tokenizer import ChatTemplateError, Messages

# Names the renderer itself fills. A request that could set them would replace the template, the
# conversation, or the way the result is encoded.
_RESERVED = frozenset(
    {
        "chat_template",
        "messages",
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
    }
)


class _GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMark, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Refuse extra arguments that would change more than a template's variables.

    Raises ChatTemplateError naming the argument.
    """
    refused = sorted(_RESERVED & set(template_kwargs))
    if refused:
        raise ChatTemplateError(
            f"template argument {refused[0]!r} is not allowed: only variables that the model's own "
            "chat template reads may be given (for example enable_thinking)"
        )


def check_messages(messages: Messages) -> list[dict[str, Any]]:
    """The conversation as plain dicts, without the keys whose value is None.

    A missing key and None mean the same to callers, but many templates print "None" for the
    latter. Raises ChatTemplateError for an empty conversation and for a message without a role.
    """
    if not messages:
        raise ChatTemplateError("the conversation is empty; give at least one message")
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    for index, message in enumerate(plain):
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {index} has no role (a string): {message!r}")
    return plain


def render_template(
    source: str,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Text of `messages` under the template `source`.

    `variables` are the template's further variables (special tokens by name, request arguments).
    Raises ChatTemplateError with the template's own message where it refuses the conversation.
    """
    # transformers defines tools and documents as None, and templates test them so.
    context = {"tools": None, "documents": None, **variables}
    try:
        return _compiled(source).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **context
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise ChatTemplateError(
            f"the chat template refused the conversation: {error or type(error).__name__}"
        ) from error
