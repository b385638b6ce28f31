"""The sandboxed renderer against transformers', and what it refuses."""

import pytest

from peagle_jax.text import ChatTemplateError
from peagle_jax.text.chat_template import (
    check_messages,
    check_template_kwargs,
    render_template,
)

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "<b>é & 'q'</b>"},
    {"role": "assistant", "content": "yes", "extra": {"b": [1, None], "a": "ü"}},
]
TEMPLATES = {
    "trimmed blocks": "{% for m in messages %}\n    {% if m.role != 'system' %}\n"
    "{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.role }}{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages[2].extra | tojson(indent=2) }}"
    "|{{ messages[2].extra | tojson(sort_keys=true, separators=(',', ':')) }}",
    "generation marks": "{% for m in messages %}{% generation %}{{ m.content }}{{ '!' }}"
    "{% endgeneration %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "no tools": "{% if tools is none and not documents %}bare{% endif %}"
    "{% if builtin is defined %}x{% endif %}",
    "prompt and variables": "{{ bos_token }}{{ enable_thinking }}{% if add_generation_prompt %}"
    "<start>{% endif %}",
    "macro": "{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{{ turn(messages[1]) }}",
    "date": "{{ strftime_now('%Y') }}",
    "html kept": "{{ messages[1].content }}{{ messages[0]['content'] | upper | trim }}",
}
VARIABLES = {"bos_token": "<s>", "enable_thinking": False}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_equals_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[CHAT], chat_template=source, add_generation_prompt=True, **VARIABLES
    )
    ours = render_template(source, CHAT, add_generation_prompt=True, variables=VARIABLES)
    assert ours == expected


def test_the_templates_own_message_arrives():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="refused the conversation: roles must alternate"):
        render_template(source, CHAT, add_generation_prompt=False, variables={})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(ChatTemplateError, match="refused"):
        render_template(source, CHAT, add_generation_prompt=False, variables={})


def test_a_template_that_does_not_parse():
    with pytest.raises(ChatTemplateError):
        render_template("{% for %}", CHAT, add_generation_prompt=False, variables={})


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tokenize", "continue_final_message"]
)
def test_requests_cannot_replace_the_template(name):
    with pytest.raises(ChatTemplateError, match=f"'{name}' is not allowed"):
        check_template_kwargs({name: "{% for i in range(99999) %}x{% endfor %}"})
    check_template_kwargs({"enable_thinking": False, "tools": []})


def test_messages_are_checked():
    assert check_messages([{"role": "assistant", "content": None, "name": "x"}]) == [
        {"role": "assistant", "name": "x"}
    ]
    with pytest.raises(ChatTemplateError, match="empty"):
        check_messages([])
    with pytest.raises(ChatTemplateError, match="message 1 has no role"):
        check_messages([{"role": "user", "content": "a"}, {"content": "b"}])
