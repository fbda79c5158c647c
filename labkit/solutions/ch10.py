"""Reference solutions of chapter 10."""

from __future__ import annotations

import torch


# Neighbouring blocks of a table may be neighbours in the pool too: then one run goes on.
def copy_runs(blocks, start, stop, block_size):
    """(first slot, count) of positions start … stop − 1, neighbouring slots in one run."""
    runs: list[tuple[int, int]] = []
    while start < stop:
        offset = start % block_size
        count = min(block_size - offset, stop - start)
        slot = blocks[start // block_size] * block_size + offset
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((slot, count))
        start += count
    return runs


def audit_pool(tables, refs, free):
    """Blocks whose books are wrong."""
    wrong = []
    for block, count in enumerate(refs):
        named = sum(table.count(block) for table in tables)
        on_list = free.count(block)
        if count != named or on_list != (1 if named == 0 else 0):
            wrong.append(block)
    return wrong


# A full last block is never written again, so it may stay shared.
def append_token(blocks, length, refs, free, block_size):
    """Make room for one token; (source, target, tokens) to copy, or None."""
    offset = length % block_size
    if offset == 0:
        blocks.append(free.pop())
        refs[blocks[-1]] = 1
        return None
    old = blocks[-1]
    if refs[old] == 1:
        return None
    blocks[-1] = new = free.pop()
    refs[old] -= 1
    refs[new] = 1
    return old, new, offset


def match_prefix(tokens, cache, block_size, make_key):
    """Blocks of the longest cached prefix; the last token is always left over."""
    blocks, parent, key = [], None, None
    for start in range(0, (len(tokens) - 1) // block_size * block_size, block_size):
        part = tuple(tokens[start : start + block_size])
        key = make_key(key, part)
        entry = cache.get(key)
        if entry is None or entry.tokens != part or entry.parent != parent:
            break
        blocks.append(entry.block)
        parent = entry.block
    return blocks


def attend_tail(q, k, v, lengths):
    """q [B, D], k and v [B, S, D] → [B, D]; slots from lengths[b] on hold anything."""
    beyond = torch.arange(k.shape[1]) >= lengths[:, None]
    scores = (k @ q[:, :, None])[:, :, 0] / q.shape[1] ** 0.5
    weights = scores.masked_fill(beyond, -torch.inf).softmax(-1)
    safe = v.masked_fill(beyond[:, :, None], 0)
    return (weights[:, None] @ safe)[:, 0]
