/* Questions about one row of fp32 logits, [n]: the largest, how much they weigh, which can win a draw.
 *
 * Each function is called by one thread and gives the same answer whatever else runs. A row that holds a NaN or +inf,
 * or nothing above -inf, cannot be drawn from; the functions say so rather than pass it over.
 */
#include <stdlib.h>

#include "vec.h"

#define LARGEST_FLOAT 0x1.fffffep127f

/* 1 when all of x is finite or -inf; *top: the largest. */
static int survey(const float *x, int64_t n, float *top) {
  vf most = vf_set(-INFINITY), limit = vf_set(LARGEST_FLOAT);
  uint32_t sound = 0xffff;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf here = vf_load(x + i);
    sound &= vf_at_least(limit, here);
    most = vf_max(most, here);
  }
  float best = vf_max_lane(most);
  int fine = sound == 0xffff;
  for (; i < n; i++) {
    fine &= x[i] <= LARGEST_FLOAT;
    best = x[i] > best ? x[i] : best;
  }
  *top = best;
  return fine;
}

/* The first place of the largest; -1 when the row cannot be drawn from. */
int64_t nk_row_argmax(const float *x, int64_t n) {
  float top;
  if (!survey(x, n, &top) || top == -INFINITY) return -1;
  vf wanted = vf_set(top);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    uint32_t here = vf_at_least(vf_load(x + i), wanted);
    if (here) return i + __builtin_ctz(here);
  }
  while (x[i] < top) i++;
  return i;
}

/* ---- the largest few, in order ------------------------------------------------------------------------------------*/

typedef struct { uint32_t key, id; } Entry;

/* Ascending keys are descending numbers; the two zeros are one. */
static uint32_t key_of(float x) {
  uint32_t bits;
  x += 0.0f;
  memcpy(&bits, &x, 4);
  return bits >> 31 ? bits : bits ^ 0x7fffffff;
}

/* Stable, by radix: n entries from `from`, with `other` as scratch; returns where they end up. */
static Entry *sort_entries(Entry *from, Entry *other, int64_t n) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t start[257] = {0};
    for (int64_t i = 0; i < n; i++) start[(from[i].key >> shift & 255) + 1]++;
    for (int d = 0; d < 256; d++) start[d + 1] += start[d];
    for (int64_t i = 0; i < n; i++) other[start[from[i].key >> shift & 255]++] = from[i];
    Entry *swap = from;
    from = other;
    other = swap;
  }
  return from;
}

/* A number that at least `count` of x reach, and few more: the count-th largest of the maxima of many groups. Groups
 * are strided, since neighbours in a vocabulary tend to be likely together. memory: [2 n] entries. -inf where n is too
 * small to be worth it. */
static float reached_by(const float *x, int64_t n, int64_t count, Entry *memory) {
  int64_t groups = (8 * count + 255) / 256 * 256;
  if (2 * groups > n) return -INFINITY;
  float *maxima = (float *)(memory + n); /* overwritten by the sort only after they are read */
  memcpy(maxima, x, (size_t)groups * 4);
  for (int64_t base = groups; base < n; base += groups)
    for (int64_t g = 0; g < groups && base + g + LANES <= n; g += LANES)
      vf_store(maxima + g, vf_max(vf_load(maxima + g), vf_load(x + base + g)));
  for (int64_t g = 0; g < groups; g++) memory[g] = (Entry){key_of(maxima[g]), (uint32_t)g};
  uint32_t key = sort_entries(memory, memory + n, groups)[count - 1].key;
  uint32_t bits = key >> 31 ? key : key ^ 0x7fffffff;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Ids of the count largest (1 <= count <= n < 2^32), largest first, among equals the lowest id first. Returns how many,
 * fewer than count only if there are NaN; -1 without memory. */
int64_t nk_row_largest(const float *x, int64_t n, int64_t count, int64_t *ids) {
  Entry *memory = malloc(sizeof(Entry) * 2 * (size_t)n);
  if (memory == NULL) return -1;
  float least = reached_by(x, n, count, memory);
  vf wanted = vf_set(least);
  int64_t found = 0, i = 0;
  for (; i + LANES <= n; i += LANES)
    for (uint32_t here = vf_at_least(vf_load(x + i), wanted); here; here &= here - 1) {
      int64_t id = i + __builtin_ctz(here);
      memory[found++] = (Entry){key_of(x[id]), (uint32_t)id};
    }
  for (; i < n; i++)
    if (x[i] >= least) memory[found++] = (Entry){key_of(x[i]), (uint32_t)i};
  Entry *sorted = sort_entries(memory, memory + n, found);
  if (found > count) found = count;
  for (int64_t k = 0; k < found; k++) ids[k] = sorted[k].id;
  free(memory);
  return found;
}

/* ---- how much they weigh ------------------------------------------------------------------------------------------*/

/* e^z to 3e-10 for z <= 0; e^-700 below -700, which counts for nothing beside the 1 of the largest. e^z = 2^k e^r:
 * adding 1.5 * 2^52 rounds to a whole k, which then is the sum's lowest bits; e^r by its series, |r| <= ln 2 / 2. In
 * fp64: the fp32 rounding of (x - top) / temperature alone, alike in all tokens of one logit, would be 1e-6 of their
 * weight. */
INLINE vd exp_of(vd z) {
  const vd shift = vd_set(0x1.8p52);
  vl keep = z > -700.0;
  z = (vd)(((vl)z & keep) | ((vl)vd_set(-700.0) & ~keep));
  vd whole = vd_fma(z, vd_set(0x1.71547652b82fep0), shift);
  vd r = vd_fma(whole - shift, vd_set(-0x1.62e42fefa39efp-1), z);
  vd p = vd_fma(r, vd_set(1.0 / 40320), vd_set(1.0 / 5040));
  p = vd_fma(p, r, vd_set(1.0 / 720));
  p = vd_fma(p, r, vd_set(1.0 / 120));
  p = vd_fma(p, r, vd_set(1.0 / 24));
  p = vd_fma(p, r, vd_set(1.0 / 6));
  p = vd_fma(p, r, vd_set(0.5));
  p = vd_fma(p, r, vd_set(1.0));
  p = vd_fma(p, r, vd_set(1.0));
  return p * (vd)(((vl)whole + 1023) << 52);
}

INLINE vd weigh_eight(const float *x, double top, double inverse) { return exp_of((vd_load_float(x) - top) * inverse); }

/* Sum of exp((x - max) / temperature), in one fixed order; *top: the largest. NaN when the row cannot be drawn from. */
double nk_row_mass(const float *x, int64_t n, double temperature, float *top) {
  if (!survey(x, n, top) || *top == -INFINITY) return (double)NAN;
  double inverse = 1.0 / temperature, lanes[8], last[8];
  vd a = {0}, b = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    a += weigh_eight(x + i, *top, inverse);
    b += weigh_eight(x + i + 8, *top, inverse);
  }
  float rest[16];
  for (int k = 0; k < 16; k++) rest[k] = i + k < n ? x[i + k] : -INFINITY;
  a += weigh_eight(rest, *top, inverse);
  b += weigh_eight(rest + 8, *top, inverse);
  memcpy(lanes, &a, sizeof a);
  memcpy(last, &b, sizeof b);
  double sum = 0;
  for (int k = 0; k < 8; k++) sum += lanes[k] + last[k];
  return sum;
}

/* What a filter asks first, in one call: nk_row_largest and, at *mass, nk_row_mass; -2 when the row cannot be drawn
 * from. */
int64_t nk_row_look(const float *x, int64_t n, int64_t count, double temperature, int64_t *ids, double *mass) {
  float top;
  *mass = nk_row_mass(x, n, temperature, &top);
  return isnan(*mass) ? -2 : nk_row_largest(x, n, count, ids);
}
