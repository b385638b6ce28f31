"""Assistant-only loss masks: which tokens, after which prompt, in which row."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.text.tokenizer import load_tokenizer
from tests.smollm2_file import smollm2_gguf
from tests.train.toy_tokenizers import TOKENIZERS
from train.data.pack import truncate
from train.data.template_mask import mask_conversation


def chat(*turns):
    roles = ("user", "assistant")
    return [
        turn if isinstance(turn, dict) else {"role": roles[i % 2], "content": turn}
        for i, turn in enumerate(turns)
    ]


def thinking(content, thoughts):
    keys = ("reasoning_content", "thinking", "reasoning")
    return {"role": "assistant", "content": content, **dict.fromkeys(keys, thoughts)}


def spans(tokenizer, row):
    """Text of each supervised run, with the text before it."""
    edges = np.flatnonzero(np.diff([0, *row.loss_mask, 0]))
    return [
        (tokenizer.decode(row.tokens[:a]), tokenizer.decode(row.tokens[a:b]))
        for a, b in edges.reshape(-1, 2)
    ]


def supervised(name, messages, **options):
    tokenizer = TOKENIZERS[name]
    result = mask_conversation(tokenizer, messages, **options)
    return [[text for _, text in spans(tokenizer, row)] for row in result.rows], result


TWO_TURNS = chat("hi", "yo", "more?", "no")

# Template, conversation, template variables: what is supervised, row by row.
CASES = {
    "chatml": ("chatml", TWO_TURNS, {}, [["yo<|im_end|>", "no<|im_end|>"]]),
    "chatml with marks": ("chatml_marked", TWO_TURNS, {}, [["yo<|im_end|>", "no<|im_end|>"]]),
    "trailing user turn": ("chatml", chat("hi", "yo", "bye"), {}, [["yo<|im_end|>"]]),
    "system and tool turns": (
        "chatml",
        [{"role": "system", "content": "s"}, *chat("hi", "a"), {"role": "tool", "content": "t"}]
        + [{"role": "assistant", "content": "b"}],
        {},
        [["a<|im_end|>", "b<|im_end|>"]],
    ),
    "two assistant turns running": (
        "chatml",
        [*chat("hi", "a"), {"role": "assistant", "content": "b"}],
        {},
        [["a<|im_end|>", "b<|im_end|>"]],
    ),
    "a token would straddle the boundary": (
        "chatml_merged",
        chat("hi", "\nyo", "x", "no"),
        {},
        [["\nyo<|im_end|>"], ["no<|im_end|>"]],
    ),
    "stop token inside the answer": (
        "chatml",
        chat("hi", "say <|im_end|> now"),
        {},
        [["say <|im_end|> now<|im_end|>"]],
    ),
    "qwen without reasoning": (
        "qwen",
        TWO_TURNS,
        {},
        [["<think>\n\n</think>\n\nyo<|im_end|>"], ["<think>\n\n</think>\n\nno<|im_end|>"]],
    ),
    "qwen strips earlier reasoning": (
        "qwen",
        chat("hi", thinking("yo", "hm"), "more?", thinking("no", "well")),
        {},
        [
            ["<think>\nhm\n</think>\n\nyo<|im_end|>"],
            ["<think>\nwell\n</think>\n\nno<|im_end|>"],
        ],
    ),
    "qwen with inline reasoning": (
        "qwen",
        chat("hi", "<think>\nhm\n</think>\n\nyo"),
        {},
        [["<think>\nhm\n</think>\n\nyo<|im_end|>"]],
    ),
    "qwen serving without thinking": (
        "qwen",
        TWO_TURNS,
        {"enable_thinking": False},
        [["yo<|im_end|>"], ["no<|im_end|>"]],
    ),
    "gemma": ("gemma", TWO_TURNS, {}, [["yo<turn|>"], ["no<turn|>"]]),
    "generation prompt opens reasoning": (
        "open_think",
        chat("hi", thinking("yo", "hm")),
        {},
        [["hm\n</think>\n\nyo<|eos|>"]],
    ),
    "generation prompt opens inline reasoning": (
        "open_think",
        chat("hi", "<think>hm</think>\n\nyo"),
        {},
        [["hm\n</think>\n\nyo<|eos|>"]],
    ),
    "harmony": (
        "harmony",
        chat("hi", thinking("yo", "hm"), "more?", "no"),
        {},
        [
            ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant"]
            + ["<|channel|>final<|message|>yo<|return|>"],
            ["<|channel|>final<|message|>no<|return|>"],
        ],
    ),
    "no stop token": ("plain", TWO_TURNS, {}, [["yo\n", "no\n"]]),
}


@pytest.mark.parametrize("case", CASES)
def test_spans_and_the_prompts_before_them(case):
    name, messages, kwargs, expected = CASES[case]
    tokenizer = TOKENIZERS[name]
    result = mask_conversation(tokenizer, messages, template_kwargs=kwargs)
    found = [[text for _, text in spans(tokenizer, row)] for row in result.rows]
    assert found == [["".join(row)] if name == "harmony" else row for row in expected]
    assert result.skipped_turns == ()
    # Serving's generation prompt, token by token, stands before each span.
    prompts = [
        tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **kwargs)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    before = [
        row.tokens[:i]
        for row in result.rows
        for i in range(1, len(row.tokens))
        if row.loss_mask[i] and not row.loss_mask[i - 1]
    ]
    assert before == prompts


def test_real_chat_model_gets_the_rows_it_was_served_with():
    """SmolLM2: recorded prompts (transformers) and what the model answered to them, id by id."""
    tokenizer = load_tokenizer(smollm2_gguf())
    golden = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text("utf-8"))
    compared = 0
    for prompt in golden["prompts"]:
        stop = prompt["first_stop_step"]
        answer = prompt["greedy_ids"][: 40 if stop is None else stop]
        text = tokenizer.decode(answer)
        if text.strip() != text or tokenizer.encode(text, add_special_tokens=False) != answer:
            continue  # cut or written so that its text has another tokenisation
        (row,) = mask_conversation(tokenizer, chat(prompt["prompt"], text)).rows
        served = prompt["token_ids"][: prompt["n_prompt_tokens"]]
        assert row.tokens == [*served, *answer, tokenizer.eos_id]
        assert row.loss_mask == [False] * len(served) + [True] * (len(answer) + 1)
        compared += 1
    assert compared >= 8


def test_E1_template_without_marks_supervises_the_answer_alone():
    texts, result = supervised("chatml", chat("hi", "yo"))
    assert texts == [["yo<|im_end|>"]]
    (row,) = result.rows
    assert 0 < sum(row.loss_mask) < len(row.loss_mask)


@pytest.mark.parametrize("name", ["chatml", "chatml_marked"])
def test_E7_truncation_keeps_ids_and_mask_of_one_length(name):
    (row,) = mask_conversation(TOKENIZERS[name], chat("hi", "yo")).rows
    tokens, mask = truncate(row.tokens, row.loss_mask, 5)
    assert len(tokens) == len(mask) == 5


def test_E10_all_bytes_of_an_emoji_are_supervised():
    texts, result = supervised("chatml", chat("hi", "ok 😀"))
    assert texts == [["ok 😀<|im_end|>"]]
    assert sum(result.rows[0].loss_mask) == len("ok 😀".encode()) + 1


def test_E10_harmony_span_begins_at_the_channel_and_includes_analysis():
    texts, _ = supervised("harmony", chat("hi", thinking("yo", "hm")))
    ((span,),) = texts
    assert span.startswith("<|channel|>analysis<|message|>hm") and span.endswith("yo<|return|>")


@pytest.mark.parametrize(
    "name, message, expected",
    [
        ("qwen", thinking("yo", "hm hm"), ["<think>\n", "\n</think>\n\nyo<|im_end|>"]),
        ("qwen", thinking("yo", "A 😀"), ["<think>\n", "\n</think>\n\nyo<|im_end|>"]),
        (
            "qwen",
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"},
            ["<think>\n", "\n</think>\n\nyo<|im_end|>"],
        ),
        (
            "harmony",
            thinking("yo", "hm"),
            ["<|channel|>analysis<|message|>"]
            + ["<|end|><|start|>assistant<|channel|>final<|message|>yo<|return|>"],
        ),
        ("open_think", thinking("yo", "hm"), ["\n</think>\n\nyo<|eos|>"]),
        ("qwen", {"role": "assistant", "content": "yo"}, ["<think>\n\n</think>\n\nyo<|im_end|>"]),
        ("chatml", thinking("yo", "hm"), ["yo<|im_end|>"]),  # the template drops it
    ],
)
def test_masked_reasoning_stays_in_the_row_and_out_of_the_loss(name, message, expected):
    messages = chat("hi", message)
    texts, masked = supervised(name, messages, reasoning="mask")
    assert texts == [expected]
    _, kept = supervised(name, messages, reasoning="keep")
    assert [r.tokens for r in masked.rows] == [r.tokens for r in kept.rows]


@pytest.mark.parametrize(
    "name, messages, reason",
    [
        ("chatml", [{"role": "assistant", "content": "hello"}], "without anything before it"),
        ("open_think", chat("hi", "yo"), "without reasoning.*opens <think>"),
        (
            "qwen",
            chat("hi", thinking("yo", "hm")),
            "does not begin with its generation prompt",
        ),
    ],
)
def test_turns_without_a_span_are_named(name, messages, reason):
    kwargs = {"enable_thinking": False} if name == "qwen" else {}
    _, result = supervised(name, messages, template_kwargs=kwargs)
    (skipped,) = result.skipped_turns
    assert not result.rows and re.search(reason, skipped)


def test_turns_without_stop_token_are_counted():
    assert supervised("plain", TWO_TURNS)[1].turns_without_stop == 2
    assert supervised("chatml", TWO_TURNS)[1].turns_without_stop == 0


def test_unknown_reasoning_option_is_refused():
    with pytest.raises(ValueError, match="'keep' or 'mask'"):
        mask_conversation(TOKENIZERS["chatml"], chat("hi", "yo"), reasoning="drop")
