/* Sealing: full pages of fp16 to records of four-bit codes. kernels/kivi.py says what comes out, and draws it. */
#include "nk.h"

typedef struct {
  vf low, inverse; /* the minimum, and 1 / scale */
  uint16_t scale16, low16;
} Range;

#define SCALE_NAN 0x7e00

/* Of numbers between low and high; bad: 0, or NaN where one of them is not finite. */
static Range range_of(float low, float high, float bad) {
  const uint16_t scale16 = float_to_half((high - low) / (float)KIVI_LEVELS);
  const float scale = half_to_float(scale16);
  if (bad != 0.0f) return (Range){vf_zero(), vf_zero(), SCALE_NAN, 0};
  return (Range){vf_set(low), vf_set(scale > 0.0f ? 1.0f / scale : 0.0f), scale16, float_to_half(low)};
}

INLINE void codes_of(vf x, const Range *r, int8_t *codes) {
  const vf code = vf_round(vf_mul(vf_sub(x, r->low), r->inverse));
  vi_store_int8(codes, vf_to_int(vf_min(vf_max(code, vf_zero()), vf_set((float)KIVI_LEVELS))));
}

/* What 16 n numbers span: largest, largest of the negated, and what is NaN if one is not finite; lane by lane. */
typedef struct {
  vf high, low, bad;
} Spread;

INLINE Spread spread_of(vf x) { return (Spread){x, vf_sub(vf_zero(), x), vf_sub(x, x)}; }
INLINE Spread wider(Spread a, Spread b) {
  return (Spread){vf_max(a.high, b.high), vf_max(a.low, b.low), vf_add(a.bad, b.bad)};
}
static Range range_over(Spread s) { /* 0 - x: the minimum of zeros is +0 */
  return range_of(0.0f - vf_max_lane(s.low), vf_max_lane(s.high), vf_sum_lanes(s.bad));
}

/* keys [4][dim][16]; codes [4][dim][8]; params [2][scale, minimum][dim] */
static void seal_keys(const uint16_t *keys, long dim, uint8_t *codes, uint16_t *params) {
  for (long g = 0; g < BLOCK / LANES; g += 2)
    for (long i = 0; i < dim; i++) {
      const vf x[2] = {vf_load_half(keys + (g * dim + i) * LANES), vf_load_half(keys + ((g + 1) * dim + i) * LANES)};
      const Range r = range_over(wider(spread_of(x[0]), spread_of(x[1])));
      params[g * dim + i] = r.scale16, params[(g + 1) * dim + i] = r.low16;
      for (long j = 0; j < 2; j++) {
        int8_t code[LANES];
        codes_of(x[j], &r, code);
        uint8_t *to = codes + ((g + j) * dim + i) * (LANES / 2);
        for (long b = 0; b < LANES / 2; b++) to[b] = (uint8_t)(code[b] | code[b + LANES / 2] << 4);
      }
    }
}

/* values [64][dim]; codes [64][dim / 2]; params [groups][scale, minimum][64] */
static void seal_values(const uint16_t *values, long dim, uint8_t *codes, uint16_t *params) {
  const long group = kivi_value_group(dim), half = dim / 2;
  for (long t = 0; t < BLOCK; t++)
    for (long first = 0; first < dim; first += group) {
      const uint16_t *from = values + t * dim;
      Spread all = spread_of(vf_load_half(from + first));
      for (long i = LANES; i < group; i += LANES) all = wider(all, spread_of(vf_load_half(from + first + i)));
      const Range r = range_over(all);
      params[first / group * 2 * BLOCK + t] = r.scale16, params[(first / group * 2 + 1) * BLOCK + t] = r.low16;
      for (long i = first; i < first + group; i += LANES) {
        int8_t code[LANES];
        codes_of(vf_load_half(from + i), &r, code);
        for (long j = 0, n = i; j < LANES; j++, n++) /* the lower half of a byte comes first */
          codes[t * half + n % half] = (uint8_t)(n < half ? code[j] : codes[t * half + n % half] | code[j] << 4);
      }
    }
}

void attention_seal(const Attention *a, long layer, long first, long end) {
  const Step *s = a->step;
  const int64_t heads = a->model->kv_heads, dim = a->model->head_dim, codes = BLOCK * dim / 2;
  for (int64_t i = first; i < end; i++) {
    const int64_t block = s->full[i / heads], head = i % heads;
    const int64_t page = block * s->block_bytes + head * kv_bytes(s->kv_format, BLOCK * dim);
    uint8_t *record = (uint8_t *)s->sealed[layer] + (block * heads + head) * kivi_record(dim);
    uint16_t *params = (uint16_t *)(void *)(record + 2 * codes);
    seal_keys((const uint16_t *)(const void *)((const char *)s->keys[layer] + page), dim, record, params);
    seal_values((const uint16_t *)(const void *)((const char *)s->values[layer] + page), dim, record + codes,
                params + KIVI_KEY_PARAMS * dim);
  }
}
