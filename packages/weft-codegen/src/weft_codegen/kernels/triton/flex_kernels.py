"""Source of the kernels of flex_attention, without the functions `modify` and `slope` of scores.

A program of `attend` and of `attend_queries` takes a block of queries of one head, and goes through
the blocks of keys that its mask names; one of `attend_keys` takes a block of keys of one head, and
goes through the blocks of queries of all heads that read it. Of full blocks `modify` decides
nothing but the scores. Softmax is carried from block to block, to base 2 (Milakov and Gimelshein,
2018; Dao et al., 2022, "FlashAttention"); the backward computes the weights again from the
log-sum-exp of each row.
"""

CAPTURED = "*captured"
"""Stands for the names of the tensors that the functions read."""

_BLOCKS = """
    num, index, full_num, full_index, batch_step, head_step, row_step, *captured, scale,
    heads, q_length, k_length, parts,
"""
_STRIDES = "{0}_batch, {0}_head, {0}_row, {0}_lane"
_CONSTANTS = """
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    MASK_QUERIES: tl.constexpr, MASK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
"""


def _strides(*names: str) -> str:
    return ", ".join(_STRIDES.format(name) for name in names) + ","


KERNELS = f"""\
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(start, row, row_step, length, lane_step, WIDTH: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    place = start + row[:, None] * row_step + lane[None, :] * lane_step
    return tl.load(place, mask=(row[:, None] < length) & (lane[None, :] < WIDTH), other=0)


@triton.jit
def store_rows(
    start, value, row, row_step, length, lane_step, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    lane = tl.arange(0, LANES)
    place = start + row[:, None] * row_step + lane[None, :] * lane_step
    value = value.to(start.dtype.element_ty)
    tl.store(place, value, mask=(row[:, None] < length) & (lane[None, :] < WIDTH))


@triton.jit
def scores_of(
    q, k, batch, head, row, column, *captured, scale, q_length, k_length,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr
):
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    at, other = tl.minimum(row, q_length - 1)[:, None], tl.minimum(column, k_length - 1)[None, :]
    score, kept = modify(raw, batch, head, at, other, *captured)
    inside = (row < q_length)[:, None] & (column < k_length)[None, :]
    kept = (kept & inside) if PARTIAL else inside
    score = tl.where(kept, tl.broadcast_to(score, raw.shape).to(tl.float32) * LOG2E, float("-inf"))
    return raw, score, kept, at, other


@triton.jit
def attend_blocks(
    acc, total, top, q, key, value, index, count, batch, head, row, *captured, scale,
    q_length, k_length, parts, key_row, key_lane, value_row, value_lane,
    PARTIAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, KEYS: tl.constexpr, MASK_KEYS: tl.constexpr, PRECISION: tl.constexpr
):
    for step in tl.range(0, count * parts):
        block = tl.load(index + step // parts)
        column = block * MASK_KEYS + step % parts * KEYS + tl.arange(0, KEYS)
        k = load_rows(key, column, key_row, k_length, key_lane, WIDTH, LANES)
        raw, score, kept, at, other = scores_of(
            q, k, batch, head, row, column, *captured, scale, q_length, k_length, PARTIAL, PRECISION
        )
        highest = tl.maximum(top, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, less = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        total = total * less + tl.sum(weights, 1)
        v = load_rows(value, column, value_row, k_length, value_lane, VALUE_WIDTH, VALUE_LANES)
        acc = tl.dot(weights.to(v.dtype), v, acc * less[:, None], input_precision=PRECISION)
        top = highest
    return acc, total, top


@triton.jit
def attend(
    query, key, value, out, lse, largest, {_BLOCKS}
    {_strides("query", "key", "value", "out")}
    {_CONSTANTS}
):
    block, both = tl.program_id(0), tl.program_id(1)
    batch, head = both // heads, both % heads
    row = block * QUERIES + tl.arange(0, QUERIES)
    b, h = batch.to(tl.int64), head.to(tl.int64)
    q = load_rows(
        query + b * query_batch + h * query_head, row, query_row, q_length, query_lane, WIDTH, LANES
    )
    key += b * key_batch + h // GROUP * key_head
    value += b * value_batch + h // GROUP * value_head
    mask = batch * batch_step + head * head_step + block * QUERIES // MASK_QUERIES
    acc = tl.zeros([QUERIES, VALUE_LANES], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    acc, total, top = attend_blocks(
        acc, total, top, q, key, value, index + mask * row_step, tl.load(num + mask), batch, head,
        row, *captured, scale, q_length, k_length, parts, key_row, key_lane, value_row, value_lane,
        True, WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, KEYS, MASK_KEYS, PRECISION,
    )
    acc, total, top = attend_blocks(
        acc, total, top, q, key, value, full_index + mask * row_step, tl.load(full_num + mask),
        batch, head, row, *captured, scale, q_length, k_length, parts, key_row, key_lane, value_row,
        value_lane, False,
        WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, KEYS, MASK_KEYS, PRECISION,
    )
    some = total != 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    store_rows(
        out + b * out_batch + h * out_head, acc, row, out_row, q_length, out_lane, VALUE_WIDTH,
        VALUE_LANES,
    )
    place = both.to(tl.int64) * q_length + row
    sums = tl.where(some, top + tl.log2(total), float("-inf"))
    tl.store(lse + place, sums, mask=row < q_length)
    tl.store(largest + place, top, mask=row < q_length)


# ---- backward
@triton.jit
def weights_and_slopes(
    q, k, v, do, sums, delta, batch, head, row, column, *captured, scale, q_length, k_length,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr
):
    raw, score, kept, at, other = scores_of(
        q, k, batch, head, row, column, *captured, scale, q_length, k_length, PARTIAL, PRECISION
    )
    weights = tl.exp2(score - sums[:, None])
    change = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    slopes = slope(raw, batch, head, at, other, *captured, change)
    slopes = tl.where(kept, tl.broadcast_to(slopes, raw.shape).to(tl.float32), 0.0)
    return weights, slopes


@triton.jit
def load_sums(lse, delta, start, row, length):
    sums = tl.load(lse + start + row, mask=row < length, other=0.0)
    sums = tl.where(sums == float("-inf"), 0.0, sums)
    return sums, tl.load(delta + start + row, mask=row < length, other=0.0)


@triton.jit
def query_slopes(
    acc, q, do, sums, delta, key, value, index, count, batch, head, row, *captured, scale,
    q_length, k_length, parts, key_row, key_lane, value_row, value_lane,
    PARTIAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, KEYS: tl.constexpr, MASK_KEYS: tl.constexpr, PRECISION: tl.constexpr
):
    for step in tl.range(0, count * parts):
        block = tl.load(index + step // parts)
        column = block * MASK_KEYS + step % parts * KEYS + tl.arange(0, KEYS)
        k = load_rows(key, column, key_row, k_length, key_lane, WIDTH, LANES)
        v = load_rows(value, column, value_row, k_length, value_lane, VALUE_WIDTH, VALUE_LANES)
        weights, slopes = weights_and_slopes(
            q, k, v, do, sums, delta, batch, head, row, column, *captured, scale, q_length,
            k_length, PARTIAL, PRECISION,
        )
        acc = tl.dot(slopes.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def attend_queries(
    query, key, value, grad, lse, delta, query_grad, {_BLOCKS}
    {_strides("query", "key", "value", "grad", "query_grad")}
    {_CONSTANTS}
):
    block, both = tl.program_id(0), tl.program_id(1)
    batch, head = both // heads, both % heads
    row = block * QUERIES + tl.arange(0, QUERIES)
    b, h = batch.to(tl.int64), head.to(tl.int64)
    q = load_rows(
        query + b * query_batch + h * query_head, row, query_row, q_length, query_lane, WIDTH, LANES
    )
    do = load_rows(
        grad + b * grad_batch + h * grad_head, row, grad_row, q_length, grad_lane, VALUE_WIDTH,
        VALUE_LANES,
    )
    key += b * key_batch + h // GROUP * key_head
    value += b * value_batch + h // GROUP * value_head
    mask = batch * batch_step + head * head_step + block * QUERIES // MASK_QUERIES
    sums, difference = load_sums(lse, delta, both.to(tl.int64) * q_length, row, q_length)
    acc = tl.zeros([QUERIES, LANES], tl.float32)
    acc = query_slopes(
        acc, q, do, sums, difference, key, value, index + mask * row_step, tl.load(num + mask),
        batch, head, row, *captured, scale, q_length, k_length, parts, key_row, key_lane, value_row,
        value_lane, True,
        WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, KEYS, MASK_KEYS, PRECISION,
    )
    acc = query_slopes(
        acc, q, do, sums, difference, key, value, full_index + mask * row_step,
        tl.load(full_num + mask), batch, head, row, *captured, scale, q_length, k_length, parts,
        key_row, key_lane, value_row, value_lane, False,
        WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, KEYS, MASK_KEYS, PRECISION,
    )
    store_rows(
        query_grad + b * query_grad_batch + h * query_grad_head, acc * scale, row, query_grad_row,
        q_length, query_grad_lane, WIDTH, LANES,
    )


@triton.jit
def key_slopes(
    acc, value_acc, k, v, query, grad, lse, delta, start, index, count, batch, head, column,
    *captured, scale, q_length, k_length, parts, query_row, query_lane, grad_row, grad_lane,
    PARTIAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, QUERIES: tl.constexpr, MASK_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr
):
    for step in tl.range(0, count * parts):
        block = tl.load(index + step // parts)
        row = block * MASK_QUERIES + step % parts * QUERIES + tl.arange(0, QUERIES)
        q = load_rows(query, row, query_row, q_length, query_lane, WIDTH, LANES)
        do = load_rows(grad, row, grad_row, q_length, grad_lane, VALUE_WIDTH, VALUE_LANES)
        sums, difference = load_sums(lse, delta, start, row, q_length)
        weights, slopes = weights_and_slopes(
            q, k, v, do, sums, difference, batch, head, row, column, *captured, scale, q_length,
            k_length, PARTIAL, PRECISION,
        )
        value_acc = tl.dot(
            tl.trans(weights).to(do.dtype), do, value_acc, input_precision=PRECISION
        )
        acc = tl.dot(tl.trans(slopes).to(q.dtype), q, acc, input_precision=PRECISION)
    return acc, value_acc


@triton.jit
def attend_keys(
    query, key, value, grad, lse, delta, key_grad, value_grad, {_BLOCKS}
    {_strides("query", "key", "value", "grad", "key_grad", "value_grad")}
    {_CONSTANTS}
):
    block, both = tl.program_id(0), tl.program_id(1)
    key_heads = heads // GROUP
    batch, key_head_at = both // key_heads, both % key_heads
    column = block * KEYS + tl.arange(0, KEYS)
    b, h = batch.to(tl.int64), key_head_at.to(tl.int64)
    k = load_rows(
        key + b * key_batch + h * key_head, column, key_row, k_length, key_lane, WIDTH, LANES
    )
    v = load_rows(
        value + b * value_batch + h * value_head, column, value_row, k_length, value_lane,
        VALUE_WIDTH, VALUE_LANES,
    )
    acc = tl.zeros([KEYS, LANES], tl.float32)
    value_acc = tl.zeros([KEYS, VALUE_LANES], tl.float32)
    for member in tl.range(0, GROUP):
        head = key_head_at * GROUP + member
        own_query = query + b * query_batch + head.to(tl.int64) * query_head
        own_grad = grad + b * grad_batch + head.to(tl.int64) * grad_head
        start = (b * heads + head) * q_length
        mask = batch * batch_step + head * head_step + block * KEYS // MASK_KEYS
        acc, value_acc = key_slopes(
            acc, value_acc, k, v, own_query, own_grad, lse, delta, start, index + mask * row_step,
            tl.load(num + mask), batch, head, column, *captured, scale, q_length, k_length, parts,
            query_row, query_lane, grad_row, grad_lane, True,
            WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, QUERIES, MASK_QUERIES, PRECISION,
        )
        acc, value_acc = key_slopes(
            acc, value_acc, k, v, own_query, own_grad, lse, delta, start,
            full_index + mask * row_step, tl.load(full_num + mask), batch, head, column,
            *captured, scale, q_length, k_length, parts, query_row, query_lane, grad_row, grad_lane,
            False, WIDTH, VALUE_WIDTH, LANES, VALUE_LANES, QUERIES, MASK_QUERIES, PRECISION,
        )
    store_rows(
        key_grad + b * key_grad_batch + h * key_grad_head, acc * scale, column, key_grad_row,
        k_length, key_grad_lane, WIDTH, LANES,
    )
    store_rows(
        value_grad + b * value_grad_batch + h * value_grad_head, value_acc, column, value_grad_row,
        k_length, value_grad_lane, VALUE_WIDTH, VALUE_LANES,
    )
"""
