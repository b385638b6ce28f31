"""Stop ids of each family's chat format, from files that each name only some of them."""

import json

import pytest

from peagle_jax.text import TokenizerError
from peagle_jax.text.stop_ids import config_stop_ids, stop_ids
from tests.text.hf_folders import byte_level_backend, write_folder


def each(turn):
    return "{% for m in messages %}" + turn + "{% endfor %}"


# The turn formats of the five families, cut down to what follows an answer.
LLAMA3 = each(
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}"
)
CHATML = each("{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}")
HARMONY = each(
    "{% if m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}"
)
GEMMA = "{{ bos_token }}" + each(
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ m.content | trim }}{{ '<turn|>\\n' }}"
)


@pytest.mark.parametrize(
    ("template", "specials", "eos", "listed", "expected"),
    [
        (
            LLAMA3,
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>"),
            "<|eot_id|>",
            ["<|eot|>", "<|eom_id|>", "<|eot_id|>"],
            {"<|eot|>", "<|eom_id|>", "<|eot_id|>"},
        ),
        (
            CHATML,
            ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            "<|endoftext|>",
            None,
            {"<|im_end|>", "<|endoftext|>"},
        ),
        (
            HARMONY,
            ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
            "<|return|>",
            ["<|return|>", "<|call|>"],
            {"<|return|>", "<|call|>"},  # not <|end|>: it closes a channel, the answer goes on
        ),
        (
            GEMMA,
            ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_response>"),
            "<eos>",
            ["<eos>", "<|tool_response>"],
            {"<eos>", "<turn|>", "<|tool_response>"},
        ),
    ],
    ids=["llama3", "chatml", "harmony", "gemma4"],
)
def test_families(tmp_path, template, specials, eos, listed, expected):
    backend = byte_level_backend(specials)
    ids = [backend.token_to_id(t) for t in listed] if listed else None
    write_folder(
        tmp_path,
        backend,
        template=template,
        generation={"eos_token_id": ids} if ids else None,
        eos_token=eos,
        bos_token=specials[0],
    )
    assert stop_ids(tmp_path) == {backend.token_to_id(t) for t in expected}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, set()),
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": [200002, 199999, 200012]}, {"eos_token_id": 200002}, None),
        ({"eos_token_id": [1, 106, 50]}, {"text_config": {"eos_token_id": 9}}, {1, 106, 50, 9}),
        ({"eos_token_id": None}, {"text_config": None, "eos_token_id": 3}, {3}),
    ],
    ids=["none", "int", "list", "nested", "null"],
)
def test_configs(tmp_path, generation, config, expected):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    expected = {200002, 199999, 200012} if expected is None else expected
    assert config_stop_ids(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": "2"}', "key eos_token_id: '2'; expected a token id"),
        ('{"eos_token_id": [1, -5]}', r"key eos_token_id: \[1, -5\]"),
        ('{"eos_token_id": true}', "key eos_token_id: True"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
    ],
)
def test_malformed_configs_name_file_and_key(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"generation_config\.json.*" + message):
        config_stop_ids(tmp_path)
