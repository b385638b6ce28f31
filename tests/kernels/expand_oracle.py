"""Brute-force expansion, request by request and row by row, from the table of the layout alone."""

import numpy as np


def expand(
    token_ids,
    positions,
    next_token_ids,
    starts,
    ends,
    *,
    shift: bool,
    sampled: int,
    mask_id: int,
    padding_id: int,
    num_rows: int,
    page_of=None,
    page_size: int = 0,
    num_slots: int = 0,
    max_length: int = 0,
):
    """Lists of rows as dicts of NumPy arrays; `page_of(request, part)` gives a page or None."""
    requests, grow = len(next_token_ids), sampled - (1 if shift else 0)
    out = {
        "token_ids": np.full(num_rows, padding_id),
        "positions": np.zeros(num_rows, int),
        "is_rejected": np.ones(num_rows, bool),
        "is_mask": np.zeros(num_rows, bool),
        "source_rows": np.full(num_rows, -1),
        "hidden_rows": np.full(len(token_ids), num_rows),
        "slots": np.full(num_rows, num_slots),
        "sample_rows": [],
        "query_start_loc": [],
    }
    row = 0
    for request in range(requests):
        out["query_start_loc"].append(row)
        first, end, past = starts[request], ends[request], starts[request + 1]
        before = row
        for old in range(first, past):
            out["hidden_rows"][old] = before + old - first
        if end < first:
            out["sample_rows"] += [min(before, num_rows - 1)] * sampled
            row += past - first + grow
            continue
        # What the request's rows hold, in order.
        ids = [int(token_ids[i]) for i in range(first + (1 if shift else 0), end + 1)]
        kinds = ["real"] * len(ids) + ["real"] + ["mask"] * (sampled - 1)
        ids += [int(next_token_ids[request])] + [mask_id] * (sampled - 1)
        out["sample_rows"] += [before + len(ids) - sampled + i for i in range(sampled)]
        for index, (token, kind) in enumerate(zip(ids, kinds, strict=True)):
            position = int(positions[first]) + index
            out["token_ids"][row] = token
            out["positions"][row] = position
            out["is_rejected"][row] = False
            out["is_mask"][row] = kind == "mask"
            out["source_rows"][row] = first + index if kind == "real" else -1
            if page_of is not None and position < max_length:
                page = page_of(request, position // page_size)
                if page is not None:
                    out["slots"][row] = page * page_size + position % page_size
            row += 1
        row = before + past - first + grow
    out["query_start_loc"].append(row)
    if not shift:
        out["source_rows"] = out["hidden_rows"] = None
    if page_of is None:
        out["slots"] = None
    return out
