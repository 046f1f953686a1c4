/* How a step's attention is cut: tiles, tasks, and the scratch they need. Internal to attention.c and plan.c. */
#ifndef NK_PLAN_H
#define NK_PLAN_H

#include "chunk.h"

#include <stdatomic.h>
#include <stddef.h>

#define TILE_PAIRS 64

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

#endif
