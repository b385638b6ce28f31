"""Reading rows: schemas, line ends, defects named by file and line."""

import json
import sys
import types

import numpy as np
import pytest

from train.data.conversations import BadRow, Conversation, TokenRow, read_rows

GOOD = {"messages": [{"role": "user", "content": "a\u2028b\u2029\x85c"}]}


def write(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(
        b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n"
    )
    return path


def read_one(tmp_path, row):
    (result,) = read_rows([write(tmp_path, row)])
    return result


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_E9_lines_end_at_line_feeds_only(tmp_path, ending, start):
    text = json.dumps(GOOD, ensure_ascii=False)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(start + (text + ending + "\t" + ending + "{bad" + ending).encode())
    row, bad = read_rows([path])
    assert isinstance(row, Conversation)
    assert row.messages[0]["content"] == "a\u2028b\u2029\x85c"
    assert isinstance(bad, BadRow) and str(bad).startswith(f"{path}:3: not JSON")


def test_E12_tool_role_and_null_content_with_tool_calls_are_kept(tmp_path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    row = read_one(
        tmp_path,
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "42", "tool_call_id": "x"},
            ],
            "tools": [{"type": "function"}],
        },
    )
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool"]
    assert row.messages[1]["content"] == "" and row.messages[1]["tool_calls"] == calls
    assert row.messages[2]["tool_call_id"] == "x" and row.tools == ({"type": "function"},)


def test_E12_sharegpt_keys_are_mapped(tmp_path):
    row = read_one(
        tmp_path,
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    )
    assert row.messages == (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    )


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": [{"content": "hi"}]}, "no role"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"role": "narrator", "content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"messages": "hi"}, "unknown form"),
        ({"messages": ["hi"]}, "unknown form"),
        ({"text": "hi"}, "unknown form"),
        ([1, 2], "not an object"),
        (b'"\xff"', "not JSON"),
        ({"input_ids": [1, 2]}, "bad loss mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad loss mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad loss mask"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "bad token ids"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "bad token ids"),
        ({"ids": [1, 2], "prompt_tokens": 3}, "bad loss mask"),
        ({"input_ids": "", "loss_mask": ""}, "bad token ids"),
        ({"input_ids": [1, 2], "loss_mask": "01"}, "bad loss mask"),
        (b'{"input_ids": [' + b"1" * 5000 + b'], "loss_mask": [1]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "not Unicode text"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"\\udc00": 1}]}',
            "not Unicode text",
        ),
        (GOOD | {"tools": {"name": "f"}}, "bad tools"),
        (GOOD | {"tools": "oops"}, "bad tools"),
        (GOOD | {"tools": '{"name": "f"}'}, "bad tools"),
        (GOOD | {"finish_reasons": ["length"]}, "bad finish reasons"),
    ],
)
def test_E12_defects_are_named_by_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path, GOOD, row)
    _, bad = read_rows([path])
    assert isinstance(bad, BadRow) and bad.reason == reason
    assert str(bad).startswith(f"{path}:2: ")


def test_text_parts_are_joined_and_reasoning_is_found_under_any_name(tmp_path):
    row = read_one(
        tmp_path,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                {"role": "assistant", "content": "yo", "thinking": "hm"},
            ]
        },
    )
    assert row.messages[0]["content"] == "ab"
    assert row.messages[1]["reasoning_content"] == "hm" == row.messages[1]["thinking"]


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [False, False, True]},
        {"ids": [5, 6, 7], "prompt_tokens": 2, "source": "x"},
    ],
)
def test_token_rows(tmp_path, row):
    result = read_one(tmp_path, row)
    assert isinstance(result, TokenRow)
    assert result.tokens.dtype == np.int32 and result.loss_mask.dtype == np.bool_
    assert result.tokens.tolist() == [5, 6, 7]
    assert result.loss_mask.tolist() == [False, False, True]


def test_tools_may_be_json_text_and_empty_ones_are_none(tmp_path):
    for tools, found in (
        ('[{"name": "f"}]', ({"name": "f"},)),
        ("", None),
        ("[]", None),
        ([], None),
    ):
        assert read_one(tmp_path, GOOD | {"tools": tools}).tools == found


def test_answers_cut_by_a_length_limit_are_known(tmp_path):
    talk = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    row = read_one(tmp_path, {"messages": talk, "finish_reasons": ["stop", "length"]})
    assert row.cut == {3}


def test_a_json_file_holds_a_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, {}]))
    row, bad = read_rows([path])
    assert isinstance(row, Conversation) and bad.place.line == 2
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list of rows"):
        list(read_rows([path]))
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="rows.json: not JSON"):
        list(read_rows([path]))


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"rows.csv: unknown kind"):
        list(read_rows([tmp_path / "rows.csv"]))
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        list(read_rows([tmp_path / "nowhere.jsonl"]))


def test_data_set_folders_are_read_through_datasets(tmp_path, monkeypatch):
    """Against a stand-in that records the calls; the package itself is optional."""
    calls = []
    stand_in = types.ModuleType("datasets")
    stand_in.load_from_disk = lambda folder: calls.append(("disk", folder)) or [GOOD]
    stand_in.load_dataset = lambda kind, data_files, split: (
        calls.append((kind, data_files, split)) or [GOOD, {"messages": []}]
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    saved, tables, empty = tmp_path / "saved", tmp_path / "tables", tmp_path / "empty"
    for folder in (saved, tables / "data", empty):
        folder.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    (tables / "data" / "x.parquet").write_bytes(b"")
    rows = list(read_rows([saved, tables]))
    assert [type(r) for r in rows] == [Conversation, Conversation, BadRow]
    assert calls == [
        ("disk", str(saved)),
        ("parquet", [str(tables / "data" / "x.parquet")], "train"),
    ]
    with pytest.raises(ValueError, match="no state.json"):
        list(read_rows([empty]))


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet"])
def test_real_data_set_folders_give_their_rows(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    assistant = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "hi", "reasoning_content": None}, assistant]
    table = datasets.Dataset.from_list([{"messages": messages}, {"messages": []}])
    folder = tmp_path / "rows"
    if kind == "parquet":
        folder.mkdir()
        table.to_parquet(folder / "part-0.parquet")
    else:
        table.save_to_disk(folder)
    row, empty = read_rows([folder])
    assert isinstance(row, Conversation) and isinstance(empty, BadRow)
    user, answer = row.messages
    # A table fills absent keys in with nulls; they are absent here.
    assert user == {"role": "user", "content": "hi"}
    assert answer["content"] == "yo" and answer["reasoning_content"] == "hm"


@pytest.mark.parametrize("damage", [slice(0), slice(60), slice(4, None)])
def test_a_damaged_table_is_named(tmp_path, damage):
    datasets = pytest.importorskip("datasets")
    for number in (0, 1):
        datasets.Dataset.from_list([GOOD]).to_parquet(tmp_path / f"part-{number}.parquet")
    path = tmp_path / "part-1.parquet"
    path.write_bytes(path.read_bytes()[damage])
    with pytest.raises(ValueError, match="part-1.parquet: cannot be read as parquet: "):
        list(read_rows([tmp_path]))


def test_data_set_folder_without_datasets_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        list(read_rows([tmp_path]))
