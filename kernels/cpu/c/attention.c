/* Attention over pages: how a step is cut into tasks, and how their parts are joined (chunk.h: what is computed).
 *
 * A *tile* is some rows of one sequence, few enough that their sums stay in cache. A task is a tile, one KV head with
 * all its query heads, and a range of chunks. Where tiles and KV heads alone do not make enough tasks for the threads
 * (one token of one sequence, few KV heads), the chunks of a tile are cut as well: each piece then leaves a Partial for
 * every unit of SPAN chunks, or of one chunk where the context is short, and attention_merge joins them as the uncut
 * task would have done. Rejected: one chunk as the only unit (32 partials a head at 2,048 tokens, which one thread has
 * to fetch from the other's cache in every layer), and a division by query heads (each would stream the same keys).
 */
#include "chunk.h"

#include <stdatomic.h>
#include <stdlib.h>

#define TILE_PAIRS 64
#define TASKS_A_THREAD 4
#define LOAD_COST 3 /* of a chunk's keys and values, counted in pairs that are computed with them */

typedef struct {
  int64_t sequence, first_row, rows, chunks;
  int64_t step;          /* chunks a task */
  int64_t unit, units;   /* of a cut tile: chunks a unit, and how many units; else 0 units */
  int64_t first_partial; /* of the cut tile's [kv head][unit][pair] */
} Tile;

typedef struct {
  const Tile *tile;
  int64_t kv_head, heads; /* first, and how many */
  int64_t first_chunk, end_chunk;
} Task;

/* What a thread needs while it works. There are as many as threads, so one is always free. */
typedef struct {
  atomic_flag busy;
  float *keys, *values;       /* of a chunk in fp32 */
  float *params;              /* scales and minimums of a sealed one */
  Partial chunk, span, total; /* [TILE], [pairs], [pairs] */
  const float **query;        /* [pairs] */
  int *seen;                  /* [pairs] */
} Scratch;

typedef struct {
  void *memory;
  size_t bytes;
} Room;

typedef struct {
  Tile *tile;
  int64_t *tile_of_row, *write; /* write i: the rows write[i] ... write[i + 1] - 1 */
  Task *task;
  Scratch *scratch;
  Partial partial;
  long tiles, tasks, threads;
  Room tile_room, row_room, write_room, task_room, scratch_room, float_room, query_room, seen_room, sum_room, max_room;
} Plan;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t group_of(const Model *m) { return m->heads / m->kv_heads; }
INLINE int64_t pairs_of(const Tile *t, const Model *m) { return t->rows * group_of(m); }
INLINE int64_t rows_a_tile(const Model *m) { return larger(1, TILE_PAIRS / group_of(m)); }
INLINE int64_t visible(const Step *s, int64_t row) { return s->positions[row] + 1; }

/* ---- the plan -----------------------------------------------------------------------------------------------------*/

/* Room for count things of some size, 64-byte aligned, kept from step to step; NULL when memory is lacking. */
static void *reserve(Room *room, int64_t count, int64_t size) {
  if (count < 0 || count > (INT64_MAX - 64) / size || (uint64_t)(count * size) > SIZE_MAX - 64) return NULL;
  size_t bytes = (size_t)up(larger(count * size, 1), 64) * 64;
  if (bytes > room->bytes) {
    free(room->memory);
    room->memory = aligned_alloc(64, bytes);
    room->bytes = room->memory ? bytes : 0;
  }
  return room->memory;
}

/* Rows of a tile that begins at `row`. Pages are sealed or not for all its rows alike: those of KV_KIVI4 are of one. */
static int64_t rows_from(const Model *m, const Step *s, int64_t row, int64_t end) {
  const int64_t here = s->kv_format == KV_KIVI4 ? BLOCK - s->positions[row] % BLOCK : INT64_MAX;
  return smaller(smaller(rows_a_tile(m), here), end - row);
}

static int plan_tiles(Plan *p, const Model *m, const Step *s) {
  int64_t count = 0;
  for (int64_t i = 0; i < s->sequences; i++)
    for (int64_t row = s->first_row[i]; row < s->first_row[i + 1]; row += rows_from(m, s, row, s->first_row[i + 1]))
      count++;
  p->tile = reserve(&p->tile_room, count, sizeof(Tile));
  p->tile_of_row = reserve(&p->row_room, s->rows, sizeof(int64_t));
  if (!p->tile || !p->tile_of_row) return -1;
  p->tiles = 0;
  for (int64_t i = 0; i < s->sequences; i++)
    for (int64_t row = s->first_row[i], rows; row < s->first_row[i + 1]; row += rows) {
      rows = rows_from(m, s, row, s->first_row[i + 1]);
      const int64_t chunks = up(visible(s, row + rows - 1), BLOCK);
      for (int64_t r = row; r < row + rows; r++) p->tile_of_row[r] = p->tiles;
      p->tile[p->tiles++] = (Tile){.sequence = i, .first_row = row, .rows = rows, .chunks = chunks, .step = chunks};
    }
  return 0;
}

/* Tokens of a sequence that share bytes of an int4 page are written by one thread: those of a group of 16. */
static int plan_writes(Plan *p, Attention *a) {
  const Step *s = a->step;
  p->write = reserve(&p->write_room, s->rows + 1, sizeof(int64_t));
  if (!p->write) return -1;
  a->writes = 0;
  for (int64_t i = 0; i < s->sequences; i++)
    for (int64_t row = s->first_row[i]; row < s->first_row[i + 1]; row++)
      if (s->kv_format != KV_INT4 || row == s->first_row[i] || s->positions[row] % LANES == 0) p->write[a->writes++] = row;
  p->write[a->writes] = s->rows;
  return 0;
}

void attention_write(const Attention *a, long layer, long first_write, long end_write) {
  const Plan *p = a->private_plan;
  attention_write_rows(a, layer, p->write[first_write], p->write[end_write]);
}

INLINE int64_t cost_of(const Tile *t, const Model *m) { return t->chunks * (LOAD_COST + pairs_of(t, m)); }

/* Cuts the tiles that are large beside a thread's share. At most threads * TASKS_A_THREAD of them are, which bounds the
 * partials. */
static int cut_tiles(Plan *p, const Model *m) {
  int64_t total = 0, partials = 0;
  for (long i = 0; i < p->tiles; i++) total += cost_of(&p->tile[i], m) * m->kv_heads;
  const int64_t share = larger(1, total / (p->threads * TASKS_A_THREAD));
  for (long i = 0; i < p->tiles && p->threads > 1; i++) {
    Tile *t = &p->tile[i];
    const int64_t pieces = smaller(up(cost_of(t, m) * m->kv_heads, share), t->chunks);
    if (pieces < 2) continue;
    t->unit = up(t->chunks, SPAN) >= pieces ? SPAN : 1;
    t->units = up(t->chunks, t->unit);
    t->step = t->unit * larger(1, t->units / pieces);
    t->first_partial = partials;
    partials += m->kv_heads * t->units * pairs_of(t, m);
  }
  p->partial.sums = reserve(&p->sum_room, partials, partial_floats(m->head_dim) * (int64_t)sizeof(float));
  p->partial.max = reserve(&p->max_room, partials, sizeof(float));
  return p->partial.sums && p->partial.max ? 0 : -1;
}

/* Tiles are taken from both ends in turn: those of a long prompt grow, and a thread is handed neighbours. */
static int list_tasks(Plan *p, const Model *m) {
  int64_t count = 0;
  for (long i = 0; i < p->tiles; i++) count += m->kv_heads * up(p->tile[i].chunks, p->tile[i].step);
  p->task = reserve(&p->task_room, count, sizeof(Task));
  if (!p->task) return -1;
  p->tasks = 0;
  for (long i = 0; i < p->tiles; i++) {
    const Tile *t = &p->tile[i % 2 ? i / 2 : p->tiles - 1 - i / 2];
    const int64_t heads = t->units ? m->kv_heads : 1;
    for (int64_t head = 0; head < m->kv_heads; head += heads)
      for (int64_t c = 0; c < t->chunks; c += t->step)
        p->task[p->tasks++] = (Task){t, head, heads, c, smaller(c + t->step, t->chunks)};
  }
  return 0;
}

static int plan_scratch(Plan *p, const Model *m) {
  const int64_t pairs = rows_a_tile(m) * group_of(m), chunk = BLOCK * m->head_dim;
  const int64_t maxima = up(TILE + 2 * pairs, LANES) * LANES;
  const int64_t params = chunk_params(m->head_dim);
  const int64_t floats = 2 * chunk + params + (TILE + 2 * pairs) * partial_floats(m->head_dim) + maxima;
  float *at = reserve(&p->float_room, p->threads, floats * (int64_t)sizeof(float));
  const float **query = reserve(&p->query_room, p->threads, pairs * (int64_t)sizeof(float *));
  int *seen = reserve(&p->seen_room, p->threads, pairs * (int64_t)sizeof(int));
  p->scratch = reserve(&p->scratch_room, p->threads, sizeof(Scratch));
  if (!at || !query || !seen || !p->scratch) return -1;
  for (long i = 0; i < p->threads; i++, at += floats) {
    Scratch *s = &p->scratch[i];
    atomic_flag_clear(&s->busy);
    s->query = query + i * pairs, s->seen = seen + i * pairs;
    s->keys = at, s->values = at + chunk, s->params = at + 2 * chunk;
    float *sums = s->params + params, *max = at + floats - maxima;
    s->chunk = (Partial){sums, max};
    s->span = partial_from(s->chunk, TILE, m->head_dim);
    s->total = partial_from(s->span, pairs, m->head_dim);
  }
  return 0;
}

int attention_plan(Attention *a, const Model *model, const Step *step, int threads) {
  a->model = model, a->step = step, a->tasks = 0;
  if (!a->private_plan) a->private_plan = calloc(1, sizeof(Plan));
  Plan *p = a->private_plan;
  if (!p) return -1;
  p->threads = larger(threads, 1);
  if (plan_writes(p, a) || plan_tiles(p, model, step) || cut_tiles(p, model) || list_tasks(p, model) || plan_scratch(p, model)) return -1;
  a->tasks = p->tasks;
  return 0;
}

void attention_free(Attention *a) {
  Plan *p = a->private_plan;
  if (!p) return;
  Room *rooms[] = {&p->tile_room,  &p->row_room,   &p->write_room, &p->task_room, &p->scratch_room,
                   &p->float_room, &p->query_room, &p->seen_room,  &p->sum_room,  &p->max_room};
  for (size_t i = 0; i < sizeof(rooms) / sizeof(rooms[0]); i++) free(rooms[i]->memory);
  free(p);
  a->private_plan = NULL;
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
