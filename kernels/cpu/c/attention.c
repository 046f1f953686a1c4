/* Attention over pages: how a step is cut into tasks, and how their parts are joined (chunk.h: what is computed).
 *
 * A *tile* is some rows of one sequence, few enough that their sums stay in cache. A task is a tile, one KV head with
 * all its query heads, and a range of chunks. Where tiles and KV heads alone do not make enough tasks for the threads
 * (one token of one sequence, few KV heads), the chunks of a tile are cut as well: each piece then leaves a Partial for
 * every unit of SPAN chunks, or of one chunk where the context is short, and attention_merge joins them as the uncut
 * task would have done. Rejected: one chunk as the only unit (32 partials a head at 2,048 tokens, which one thread has
 * to fetch from the other's cache in every layer), and a division by query heads (each would stream the same keys).
 */
#include "plan.h"

void attention_write(const Attention *a, long layer, long first_write, long end_write) {
  const Plan *p = a->private_plan;
  attention_write_rows(a, layer, p->write[first_write], p->write[end_write]);
}

/* ---- tasks --------------------------------------------------------------------------------------------------------*/

static Chunk chunk_of(const Attention *a, long layer, const Tile *t, int64_t kv_head, int64_t c) {
  const Model *m = a->model;
  const Step *s = a->step;
  const int64_t dim = m->head_dim, block = s->blocks[s->first_block[t->sequence] + c];
  const int64_t head = block * m->kv_heads + kv_head;
  if (s->kv_format == KV_KIVI4 && c + 1 < t->chunks) { /* the last is the rows' own */
    const uint8_t *record = (const uint8_t *)s->sealed[layer] + head * kivi_record(dim);
    return (Chunk){.format = KV_KIVI4, .keys = record, .values = record + BLOCK * dim / 2,
                   .params = (const uint16_t *)(const void *)(record + BLOCK * dim)};
  }
  const int64_t at = block * s->block_bytes + kv_head * kv_bytes(s->kv_format, BLOCK * dim);
  Chunk found = {.format = s->kv_format == KV_KIVI4 ? KV_FP16 : s->kv_format,
                 .keys = (const char *)s->keys[layer] + at,
                 .values = (const char *)s->values[layer] + at};
  if (s->kv_format == KV_INT8 || s->kv_format == KV_INT4) {
    found.key_scales = s->key_scales[layer] + head * BLOCK;
    found.value_scales = s->value_scales[layer] + head * BLOCK;
  }
  return found;
}

void attention_fetch(const Attention *a, long layer, long task) {
  const Plan *p = a->private_plan;
  if (task >= p->tasks) return;
  const Task *t = &p->task[task];
  const Chunk chunk = chunk_of(a, layer, t->tile, t->kv_head, t->first_chunk);
  const int64_t bytes = chunk_bytes(chunk.format, BLOCK * a->model->head_dim);
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch((const char *)chunk.keys + i, 0, 2);
    __builtin_prefetch((const char *)chunk.values + i, 0, 2);
  }
}

/* The pairs from `first` on meet a chunk; `into` has what they met so far, or nothing if this `begins` it. */
static void meet(const Attention *a, const Scratch *own, const Chunk *chunk, int64_t first, int64_t pairs, Partial into,
                 int begins) {
  const int64_t dim = a->model->head_dim;
  for (int64_t at = first, n; at < pairs; at += n) {
    n = up(pairs - at, up(pairs - at, TILE));
    Partial here = partial_from(into, at, dim);
    if (begins) {
      chunk_attend(chunk, dim, n, own->query + at, own->seen + at, here);
    } else {
      chunk_attend(chunk, dim, n, own->query + at, own->seen + at, own->chunk);
      partial_join(dim, n, here, own->chunk);
    }
  }
}

/* The first pair that sees token `token`, pairs if none does. */
static int64_t first_seeing(const Attention *a, const Tile *t, int64_t token) {
  int64_t row = 0;
  while (row < t->rows && visible(a->step, t->first_row + row) <= token) row++;
  return row * group_of(a->model);
}

/* Where the pairs' queries of one KV head are, and how much of chunk c each sees, from the first that sees any on. */
static int64_t place(const Attention *a, const Tile *t, int64_t kv_head, int64_t c, const Scratch *own) {
  const int64_t group = group_of(a->model), pairs = pairs_of(t, a->model), first = first_seeing(a, t, c * BLOCK);
  for (int64_t i = first; i < pairs; i++) {
    const int64_t row = t->first_row + i / group;
    own->query[i] = a->q + (row * a->model->heads + kv_head * group + i % group) * a->model->head_dim;
    own->seen[i] = (int)smaller(visible(a->step, row) - c * BLOCK, BLOCK);
  }
  return first;
}

/* One KV head and one chunk. next: what comes after it, to be fetched meanwhile. */
static void run_chunk(const Attention *a, const Tile *t, Chunk chunk, const Chunk *next, int64_t kv_head, int64_t c,
                      const Scratch *own) {
  const Plan *p = a->private_plan;
  const int64_t dim = a->model->head_dim, pairs = pairs_of(t, a->model), first = place(a, t, kv_head, c, own);
  if (chunk.format == KV_KIVI4) chunk_scale(&chunk, dim, own->params);
  if ((pairs - first > TILE && chunk.format != KV_FP32) || !chunk_whole(chunk.format, dim)) {
    chunk_widen(&chunk, dim, own->seen[pairs - 1], own->keys, own->values);
    chunk.format = KV_FP32;
    chunk.keys = chunk.next_keys = own->keys, chunk.values = chunk.next_values = own->values;
  } else {
    chunk.next_keys = next->keys, chunk.next_values = next->values;
  }
  if (t->units) {
    const int64_t at = t->first_partial + (kv_head * t->units + c / t->unit) * pairs;
    meet(a, own, &chunk, first, pairs, partial_from(p->partial, at, dim), c % t->unit == 0);
    return;
  }
  meet(a, own, &chunk, first, pairs, c < SPAN ? own->total : own->span, c % SPAN == 0);
  if (c >= SPAN && (c % SPAN == SPAN - 1 || c + 1 == t->chunks)) {
    const int64_t from = first_seeing(a, t, c / SPAN * SPAN * BLOCK);
    partial_join(dim, pairs - from, partial_from(own->total, from, dim), partial_from(own->span, from, dim));
  }
}

static void run_task(const Attention *a, long layer, const Task *task, const Task *following, const Scratch *own) {
  const Tile *t = task->tile;
  const int64_t dim = a->model->head_dim, pairs = pairs_of(t, a->model), end_head = task->kv_head + task->heads;
  for (int64_t c = task->first_chunk; c < task->end_chunk; c++)
    for (int64_t head = task->kv_head; head < end_head; head++) {
      Chunk next;
      if (head + 1 < end_head)
        next = chunk_of(a, layer, t, head + 1, c);
      else if (c + 1 < task->end_chunk)
        next = chunk_of(a, layer, t, task->kv_head, c + 1);
      else
        next = chunk_of(a, layer, following->tile, following->kv_head, following->first_chunk);
      run_chunk(a, t, chunk_of(a, layer, t, head, c), &next, head, c, own);
    }
  if (t->units) return;
  place(a, t, task->kv_head, 0, own);
  for (int64_t i = 0; i < pairs; i++)
    partial_finish(dim, partial_from(own->total, i, dim), a->out + (own->query[i] - a->q));
}

void attention_task(const Attention *a, long layer, long first_task, long end_task) {
  const Plan *p = a->private_plan;
  long i = 0;
  while (atomic_flag_test_and_set_explicit(&p->scratch[i].busy, memory_order_acquire)) i = (i + 1) % p->threads;
  for (long t = first_task; t < end_task; t++)
    run_task(a, layer, &p->task[t], &p->task[t + 1 < end_task ? t + 1 : t], &p->scratch[i]);
  atomic_flag_clear_explicit(&p->scratch[i].busy, memory_order_release);
}

/* ---- joining what was cut -----------------------------------------------------------------------------------------*/

/* One row's heads of one KV head, whose partials of unit 0 begin at `x`; in place. */
static Partial join_units(const Tile *t, int64_t dim, int64_t group, int64_t pairs, int64_t seen, Partial x) {
  const int64_t a_span = SPAN / t->unit, units = up(seen, t->unit * BLOCK);
  Partial span = x;
  for (int64_t u = 0; u < units; u++) {
    const Partial here = partial_from(x, u * pairs, dim);
    if (u % a_span == 0)
      span = here;
    else
      partial_join(dim, group, span, here);
    if (u >= a_span && (u % a_span == a_span - 1 || u + 1 == units)) partial_join(dim, group, x, span);
  }
  return x;
}

void attention_merge(const Attention *a, long layer, long first_row, long end_row) {
  const Plan *p = a->private_plan;
  const Model *m = a->model;
  const int64_t dim = m->head_dim, group = group_of(m);
  (void)layer;
  for (long row = first_row; row < end_row; row++) {
    const Tile *t = &p->tile[p->tile_of_row[row]];
    const int64_t pairs = pairs_of(t, m);
    for (int64_t head = 0; head < m->kv_heads && t->units; head++) {
      const int64_t at = t->first_partial + head * t->units * pairs + (row - t->first_row) * group;
      const Partial x = join_units(t, dim, group, pairs, visible(a->step, row), partial_from(p->partial, at, dim));
      for (int64_t i = 0; i < group; i++)
        partial_finish(dim, partial_from(x, i, dim), a->out + ((row * m->heads) + head * group + i) * dim);
    }
  }
}
