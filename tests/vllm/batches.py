"""Random steps of every kind that a runner makes."""

from __future__ import annotations

import numpy as np
from engines import Sizes, Step

KINDS = ("decode", "spec", "ragged spec", "mixed", "prefill", "chunk", "padded", "capture", "single")


def random_step(rng: np.random.Generator, sizes: Sizes, kind: str | None = None) -> Step:
    """Returns a valid step: decodes first, then prefills, lengths on both sides of topk, and often right at it."""
    kind = kind or str(rng.choice(KINDS))
    widest = 1 + sizes.drafts
    if kind == "single":
        return _decodes(rng, sizes, [1], kind)
    if kind in ("mixed", "prefill", "chunk"):
        return _with_prefills(rng, sizes, kind)
    requests = int(rng.integers(1, min(sizes.max_reqs, sizes.max_rows // widest) + 1))
    if kind == "decode":
        return _decodes(rng, sizes, [1] * requests, kind)
    if kind == "ragged spec":
        return _decodes(rng, sizes, rng.integers(1, widest + 1, requests).tolist(), kind)
    step = _decodes(rng, sizes, [widest] * requests, kind)
    if kind == "padded":
        step.padded_reqs = int(rng.integers(requests, sizes.max_reqs + 1))
        while step.padded_reqs * widest > sizes.max_rows:
            step.padded_reqs -= 1
        step.padded_rows = step.padded_reqs * widest
    if kind == "capture":
        step.seq_lens = list(step.query_lens)
        step.max_seq_len = sizes.max_len
        step.capture = True
    return step


def _decodes(rng: np.random.Generator, sizes: Sizes, query_lens: list[int], kind: str) -> Step:
    return Step(
        query_lens=query_lens,
        seq_lens=[_length(rng, sizes, q) for q in query_lens],
        bound_excess=int(rng.integers(0, sizes.drafts + 1)),
        kind=kind,
    )


def _with_prefills(rng: np.random.Generator, sizes: Sizes, kind: str) -> Step:
    widest = 1 + sizes.drafts
    decodes = int(rng.integers(1, 6)) if kind == "mixed" else 0
    queries = rng.integers(1, widest + 1, decodes).tolist()
    room = sizes.max_rows - sum(queries)
    prefills = 0
    while room > widest + 1 and len(queries) < sizes.max_reqs and prefills < 4:
        length = int(rng.integers(widest + 1, min(room, sizes.max_len) + 1))
        queries.append(length)
        room -= length
        prefills += 1
        if rng.random() < 0.4:
            break
    fresh = kind != "chunk" and rng.random() < 0.5
    lengths = [_length(rng, sizes, q) for q in queries[:decodes]]
    lengths += [q if fresh else _length(rng, sizes, q) for q in queries[decodes:]]
    return Step(
        query_lens=queries,
        seq_lens=lengths,
        prefilling=[False] * decodes + [True] * (len(queries) - decodes),
        kind=kind,
    )


def _length(rng: np.random.Generator, sizes: Sizes, query_len: int) -> int:
    where = rng.random()
    if where < 0.35:
        length = int(rng.integers(1, sizes.topk + 1))
    elif where < 0.6:
        length = sizes.topk + int(rng.integers(-3, 4 + sizes.drafts))
    elif where < 0.7:
        length = sizes.max_len
    else:
        length = int(rng.integers(sizes.topk, sizes.max_len + 1))
    return max(query_len, min(length, sizes.max_len))


def next_step(rng: np.random.Generator, sizes: Sizes, step: Step) -> Step:
    """The step after a decode step: the same requests, a few tokens further, now and then one more or one less."""
    queries, lengths = list(step.query_lens), [s + q for s, q in zip(step.seq_lens, step.query_lens, strict=True)]
    keep = [index for index, length in enumerate(lengths) if length <= sizes.max_len and rng.random() > 0.05]
    if not keep:
        return random_step(rng, sizes, "decode")
    return Step(query_lens=[queries[i] for i in keep], seq_lens=[lengths[i] for i in keep], kind="next")
