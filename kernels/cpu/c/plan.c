/* The plan of attention, made once a step; attention.c says what tiles, tasks and partials are for. */
#include "plan.h"

#include <stdlib.h>

#define TASKS_A_THREAD 4
#define LOAD_COST 3 /* of a chunk's keys and values, counted in pairs that are computed with them */

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
      if (s->kv_format != KV_INT4 || row == s->first_row[i] || s->positions[row] % LANES == 0)
        p->write[a->writes++] = row;
  p->write[a->writes] = s->rows;
  return 0;
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
  if (plan_writes(p, a) || plan_tiles(p, model, step) || cut_tiles(p, model)) return -1;
  if (list_tasks(p, model) || plan_scratch(p, model)) return -1;
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
