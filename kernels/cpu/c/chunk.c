/* One chunk of attention; chunk.h says what is computed and in which order. */
#include "chunk.h"

#include <float.h>

#if defined(NK_AVX512)
/* Vectors of sums a pair: n * WIDE(n) of them, and WIDE(n) of keys or values, stay in registers. There are as many as
 * an fma takes cycles times those begun in one, or more, lest each waits for the one before. */
#define WIDE(n) ((n) <= 3 ? 4 : 2)
#define MOST_WIDE 4
#else
#define WIDE(n) 1
#define MOST_WIDE 1
#endif
#define UNROLL _Pragma("GCC unroll 8")

INLINE vf load(const void *from, long i, int format) {
  return format == KV_FP32   ? vf_load((const float *)from + i)
         : format == KV_FP16 ? vf_load_half((const uint16_t *)from + i)
                             : vf_load_int8((const int8_t *)from + i);
}

/* 16 tokens of group g, dimension i */
INLINE vf key_at(int format, const Chunk *c, long dim, long g, long i) {
  const long at = (g * dim + i) * LANES;
  if (format == KV_INT4) return vf_load_pairs((const uint8_t *)c->keys + at / 2, 8.0f);
  if (format == KV_KIVI4) {
    const float *p = c->key_params + g / 2 * 2 * dim + i;
    return vf_fma(vf_load_pairs((const uint8_t *)c->keys + at / 2, 0.0f), vf_set(p[0]), vf_set(p[dim]));
  }
  return load(c->keys, at, format);
}

/* 16 dimensions from i on of token t */
INLINE vf value_at(int format, const Chunk *c, long dim, long t, long i) {
  const long half = dim / 2, upper = i >= half;
  const uint8_t *nibbles = (const uint8_t *)c->values + t * half + i - upper * half;
  if (format == KV_INT4) return vf_load_halves(nibbles, (int)upper * 4, 8.0f);
  if (format == KV_KIVI4) {
    const float *p = c->value_params + i / kivi_value_group(dim) * 2 * BLOCK + t;
    return vf_fma(vf_load_halves(nibbles, (int)upper * 4, 0.0f), vf_set(p[0]), vf_set(p[BLOCK]));
  }
  return load(c->values, t * dim + i, format);
}

/* Fetches as many bytes of what comes next as one iteration reads of what is here: into the second cache, which takes
 * more misses at a time than the first. The processor's own prefetching starts anew with each short run of a page. */
INLINE void fetch(const char *next, long iteration, long bytes) {
  if (bytes < 64 && iteration % (64 / bytes)) return;
  for (long b = 0; b < bytes; b += 64) __builtin_prefetch(next + iteration * bytes + b, 0, 2);
}

/* dots[j][t] = q[j] . k_t for the tokens of `wide` groups of 16 from `group` on */
INLINE void dot_groups(int format, int n, int wide, const Chunk *c, long dim, long group, const float *const *q,
                       float *dots) {
  const long bytes = chunk_bytes(format, wide * LANES);
  vf sum[TILE][MOST_WIDE];
  UNROLL for (int j = 0; j < n; j++) UNROLL for (int g = 0; g < wide; g++) sum[j][g] = vf_zero();
  for (long i = 0; i < dim; i++) {
    vf k[MOST_WIDE];
    UNROLL for (int g = 0; g < wide; g++) k[g] = key_at(format, c, dim, group + g, i);
    fetch(c->next_keys, group / wide * dim + i, bytes);
    UNROLL for (int j = 0; j < n; j++) {
      vf x = vf_set(q[j][i]);
      UNROLL for (int g = 0; g < wide; g++) sum[j][g] = vf_fma(x, k[g], sum[j][g]);
    }
  }
  UNROLL for (int j = 0; j < n; j++)
    UNROLL for (int g = 0; g < wide; g++) vf_store(dots + j * BLOCK + (group + g) * LANES, sum[j][g]);
}

/* sums[j][...] += p[j][t] v_t for the tokens first ... end - 1, along `wide` vectors of dimensions from `at` on */
INLINE void weigh_dims(int format, int n, int wide, const Chunk *c, long dim, long at, long first, long end,
                       const float *p, float *sums) {
  const long bytes = chunk_bytes(format, wide * LANES), stride = partial_floats(dim);
  vf sum[TILE][MOST_WIDE];
  UNROLL for (int j = 0; j < n; j++) UNROLL for (int g = 0; g < wide; g++)
    sum[j][g] = first == 0 ? vf_zero() : vf_load(sums + j * stride + at + g * LANES);
  for (long t = first; t < end; t++) {
    vf v[MOST_WIDE];
    UNROLL for (int g = 0; g < wide; g++) v[g] = value_at(format, c, dim, t, at + g * LANES);
    fetch(c->next_values, at / (wide * LANES) * BLOCK + t, bytes);
    UNROLL for (int j = 0; j < n; j++) {
      vf x = vf_set(p[j * BLOCK + t]);
      UNROLL for (int g = 0; g < wide; g++) sum[j][g] = vf_fma(x, v[g], sum[j][g]);
    }
  }
  UNROLL for (int j = 0; j < n; j++)
    UNROLL for (int g = 0; g < wide; g++) vf_store(sums + j * stride + at + g * LANES, sum[j][g]);
}

typedef void (*Dot)(const Chunk *c, long dim, long groups, const float *const *q, float *dots);
typedef void (*Weigh)(const Chunk *c, long dim, long first, long end, const float *p, float *sums);

/* The last vectors go one by one: 80 dimensions are 4 + 1 vectors. Keys of WIDE groups are read even where fewer are
 * seen; what is not seen never leaves its lane. */
#define MAKE(format, n)                                                                                               \
  static void dot_##format##_##n(const Chunk *c, long dim, long groups, const float *const *q, float *dots) {          \
    for (long g = 0; g < groups; g += WIDE(n)) dot_groups(format, n, WIDE(n), c, dim, g, q, dots);                     \
  }                                                                                                                   \
  static void weigh_##format##_##n(const Chunk *c, long dim, long first, long end, const float *p, float *sums) {      \
    long at = 0;                                                                                                      \
    for (; at + WIDE(n) * LANES <= dim; at += WIDE(n) * LANES)                                                         \
      weigh_dims(format, n, WIDE(n), c, dim, at, first, end, p, sums);                                                 \
    for (; at < dim; at += LANES) weigh_dims(format, n, 1, c, dim, at, first, end, p, sums);                           \
  }
#define MAKE_FORMAT(f) MAKE(f, 1) MAKE(f, 2) MAKE(f, 3) MAKE(f, 4) MAKE(f, 5) MAKE(f, 6) MAKE(f, 7) MAKE(f, 8)
#define NAMES(what, f)                                                                                                \
  {what##f##_1, what##f##_2, what##f##_3, what##f##_4, what##f##_5, what##f##_6, what##f##_7, what##f##_8}
MAKE_FORMAT(KV_FP32)
MAKE_FORMAT(KV_FP16)
MAKE_FORMAT(KV_INT8)
MAKE_FORMAT(KV_INT4)
MAKE_FORMAT(KV_KIVI4)
#define FORMATS(what)                                                                                                 \
  {NAMES(what, KV_FP32), NAMES(what, KV_FP16), NAMES(what, KV_INT8), NAMES(what, KV_INT4), NAMES(what, KV_KIVI4)}
static const Dot dot[][TILE] = FORMATS(dot_);
static const Weigh weigh[][TILE] = FORMATS(weigh_);

/* dots -> p in place, of one pair; what it does not see is masked before it can matter, be it NaN. */
INLINE void soften(const Chunk *c, float scale, int seen, float *p, float *lanes, float *max) {
  const int groups = (seen + LANES - 1) / LANES;
  vf s[BLOCK / LANES], most = vf_set(-FLT_MAX), sum = vf_zero();
  for (int g = 0; g < groups; g++) {
    vf by = vf_set(scale);
    if (c->key_scales) by = vf_mul(by, vf_load(c->key_scales + g * LANES));
    s[g] = vf_first(seen - g * LANES, vf_mul(vf_load(p + g * LANES), by), vf_set(-FLT_MAX));
    most = vf_max(most, s[g]);
  }
  *max = vf_max_lane(most);
  for (int g = 0; g < groups; g++) {
    vf e = vf_first(seen - g * LANES, vf_exp(vf_sub(s[g], vf_set(*max))), vf_zero());
    sum = vf_add(sum, e);
    if (c->value_scales) e = vf_mul(e, vf_load(c->value_scales + g * LANES));
    vf_store(p + g * LANES, e);
  }
  vf_store(lanes, sum);
}

void chunk_attend(const Chunk *c, long dim, long n, const float *const *q, const int *seen, Partial out) {
  float p[TILE * BLOCK];
  const float scale = 1.0f / sqrtf((float)dim);
  const long stride = partial_floats(dim);
  dot[c->format][n - 1](c, dim, (seen[n - 1] + LANES - 1) / LANES, q, p);
  for (long j = 0; j < n; j++) soften(c, scale, seen[j], p + j * BLOCK, out.sums + j * stride + dim, out.max + j);
  weigh[c->format][n - 1](c, dim, 0, seen[0], p, out.sums);
  /* on the diagonal a pair takes the rest of its own tokens, and never 0 * infinity of another's */
  for (long j = 1; j < n; j++)
    if (seen[j] > seen[0])
      weigh[c->format][0](c, dim, seen[0], seen[j], p + j * BLOCK, out.sums + j * stride);
}

INLINE void widen(int format, const Chunk *c, long dim, int tokens, float *keys, float *values) {
  for (long g = 0; g * LANES < tokens; g++)
    for (long i = 0; i < dim; i++) vf_store(keys + (g * dim + i) * LANES, key_at(format, c, dim, g, i));
  for (long t = 0; t < tokens && chunk_whole(format, dim); t++)
    for (long i = 0; i < dim; i += LANES) vf_store(values + t * dim + i, value_at(format, c, dim, t, i));
}

/* Values of heads whose halves are no whole vectors. */
static void widen_halves(const Chunk *c, long dim, int tokens, float *values) {
  const long half = dim / 2;
  for (long t = 0; t < tokens; t++)
    for (long i = 0; i < dim; i++) {
      const float code = (float)(((const uint8_t *)c->values)[t * half + i % half] >> i / half * 4 & 15);
      const float *p = c->value_params + t; /* of all dimensions */
      values[t * dim + i] = c->format == KV_INT4 ? code - 8.0f : code * p[0] + p[BLOCK];
    }
}

void chunk_scale(Chunk *c, long dim, float *params) {
  for (long i = 0; i < chunk_params(dim); i += LANES) vf_store(params + i, vf_load_half(c->params + i));
  c->key_params = params, c->value_params = params + KIVI_KEY_PARAMS * dim;
}

void chunk_widen(const Chunk *c, long dim, int tokens, float *keys, float *values) {
  if (c->format == KV_FP16) widen(KV_FP16, c, dim, tokens, keys, values);
  if (c->format == KV_INT8) widen(KV_INT8, c, dim, tokens, keys, values);
  if (c->format == KV_INT4) widen(KV_INT4, c, dim, tokens, keys, values);
  if (c->format == KV_KIVI4) widen(KV_KIVI4, c, dim, tokens, keys, values);
  if (!chunk_whole(c->format, dim)) widen_halves(c, dim, tokens, values);
}

void partial_join(long dim, long n, Partial into, Partial from) {
  const long stride = partial_floats(dim);
  for (long first = 0; first < n; first += LANES / 2) {
    const long here = n - first < LANES / 2 ? n - first : LANES / 2;
    float factor[LANES] = {0};
    for (long j = 0; j < here; j++) {
      float a = into.max[first + j], b = from.max[first + j], most = a > b ? a : b;
      factor[j] = a - most, factor[j + LANES / 2] = b - most, into.max[first + j] = most;
    }
    vf_store(factor, vf_exp(vf_load(factor)));
    for (long j = 0; j < here; j++) {
      float *x = into.sums + (first + j) * stride;
      const float *y = from.sums + (first + j) * stride;
      vf a = vf_set(factor[j]), b = vf_set(factor[j + LANES / 2]);
      for (long i = 0; i < stride; i += LANES)
        vf_store(x + i, vf_fma(vf_load(y + i), b, vf_mul(vf_load(x + i), a)));
    }
  }
}

void partial_finish(long dim, Partial p, float *out) {
  vf total = vf_set(vf_sum_lanes(vf_load(p.sums + dim)));
  for (long i = 0; i < dim; i += LANES) vf_store(out + i, vf_div(vf_load(p.sums + i), total));
}
