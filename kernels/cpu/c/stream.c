/* Reading memory and doing nothing with it: the limit that a step, which reads every weight once, is held against. */
#include "nk.h"

typedef struct {
  const uint8_t *const *spans;
  const int64_t *bytes;
  int64_t count;
  uint64_t *mixed;
} Reading;

enum { UNIT = 4096 }; /* bytes an item */

static uint64_t mix(const uint8_t *at, long bytes) {
  vi sum[4] = {vi_zero(), vi_zero(), vi_zero(), vi_zero()};
  long i = 0;
  for (; i + 256 <= bytes; i += 256)
    for (int j = 0; j < 4; j++) sum[j] = vi_xor(sum[j], vi_load(at + i + 64 * j));
  uint64_t words[8], mixed = 0;
  vi_store(words, vi_xor(vi_xor(sum[0], sum[1]), vi_xor(sum[2], sum[3])));
  for (int j = 0; j < 8; j++) mixed ^= words[j];
  for (; i < bytes; i++) mixed ^= at[i];
  return mixed;
}

static void work_read(void *context, long first, long end) {
  Reading *r = context;
  uint64_t mixed = 0;
  first *= UNIT, end *= UNIT;
  for (int64_t s = 0; s < r->count && first < end; s++) {
    long padded = (r->bytes[s] + UNIT - 1) / UNIT * UNIT, last = end < r->bytes[s] ? end : r->bytes[s];
    if (first < last) mixed ^= mix(r->spans[s] + first, last - first);
    first = first > padded ? first - padded : 0;
    end -= padded;
  }
  __atomic_xor_fetch(r->mixed, mixed, __ATOMIC_RELAXED);
}

static void read_all(Team *team, void *argument) {
  Reading *r = argument;
  Cursor cursor = {0};
  long units = 0;
  for (int64_t s = 0; s < r->count; s++) units += (r->bytes[s] + UNIT - 1) / UNIT;
  team_phase(team, &cursor, units, 1, work_read, 0, NULL, NULL, r);
}

/* Reads the spans once with all threads; the exclusive or of what it read, so that no compiler leaves it out. */
uint64_t nk_stream(Team *team, const uint8_t *const *spans, const int64_t *bytes, int64_t count) {
  uint64_t mixed = 0;
  Reading r = {spans, bytes, count, &mixed};
  team_run(team, read_all, &r);
  return mixed;
}
