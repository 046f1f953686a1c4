/* Products of packed weights with quantized activations, 1 to n rows.
 *
 * A lane is an output row, so that a product needs no sum across lanes, and every output is one fixed sequence whatever
 * the tile it is computed in:
 *
 *     for each step of 32 columns (16 if the weights' or the activations' scales are finer):
 *         whole = sum of code * a - bias * sum of a                 in int32, exact
 *         acc = fma(whole, weight scale * activation scale, acc)
 *         acc = fma(weight minimum, activation sum, acc)            formats with minimums
 *     out = acc + offset (+ what was there)
 *
 * Tiles are one panel by up to 12 rows, 8 with two planes (decode and verification: weights are read once and
 * everything else hides behind that), or two panels by 6 rows, 4 with two planes (prefill: activations are read half as
 * often). That is as much as AVX-512's registers hold. All are instances of one function.
 */
#include "nk.h"

#define MANY_ROWS 64 /* from here on activations are too many for the first cache, and tiles of two panels are faster */

#if defined(NK_AVX512)
#define DO_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) DO_PRAGMA(GCC unroll n)
#else /* few registers, and each unrolled instance would take long to compile */
#define UNROLL(n)
#endif

INLINE vi load_pair(const uint8_t *codes, long low_plane, int kind, const uint8_t *table, long column, int upper) {
  /* 64 codes: of columns `column` ... + 3 (upper: + 4 ... + 7), for 16 rows */
  if (kind == CODES8) return vi_load(codes + (column + 4 * upper) * LANES);
  vi pair = vi_load(codes + column * LANES / 2);
  if (kind == PLANES8) {
    vi low = vi_load(codes + low_plane + column * LANES / 2);
    return upper ? vi_or(vi_shift_left(nibbles_high(pair), 4), nibbles_high(low))
                 : vi_or(vi_shift_left(nibbles_low(pair), 4), nibbles_low(low));
  }
  vi codes4 = upper ? nibbles_high(pair) : nibbles_low(pair);
  return kind == TABLE4 ? table_look_up(table, codes4) : codes4;
}

INLINE vf load_scales(const uint8_t *scales, int half) {
  return half ? vf_load_half((const uint16_t *)(const void *)scales) : vf_load((const float *)(const void *)scales);
}

/* How far the next panels are fetched into the second cache while this one is computed with: memory answers after some
 * hundred nanoseconds, in which a core reads several kilobytes. Beyond the last panel lies what is multiplied next. */
INLINE long ahead(const Matrix *m) { return m->panel_bytes < 8192 ? 2 * m->panel_bytes : m->panel_bytes; }
#define FETCH(address) __builtin_prefetch(address, 0, 2)

/* NP panels by NR rows into out, which is where the first of them goes; kind, step, planes, NP and NR are constants
 * wherever this is inlined. */
INLINE void tile(const Matrix *m, const Act *act, long row, float *out, long stride, int add, long panel,
                 const int kind, const int step, const int planes, const int NP, const int NR) {
  const long cols = m->cols, steps = cols / step, per_scale = m->group / step, next = ahead(m), pitch = m->panel_bytes;
  const int32_t *start = (step == 32 ? act->start32 : act->start16)[m->bias] + row * steps;
  const float *a_scale = (step == 32 ? act->scale32 : act->scale16) + row * steps;
  const float *a_sum = (step == 32 ? act->sum32 : act->sum16) + row * steps;
  const int8_t *high = act->high + row * cols, *low = act->low + row * cols;
  const uint8_t *codes[2] = {m->codes + panel * pitch, m->codes + (panel + NP - 1) * pitch};
  const uint8_t *scales = m->scales + panel * pitch, *minimums = m->minimums ? m->minimums + panel * pitch : NULL;
  const int half = m->scale16 != 0, scale_bytes = LANES * (half ? 2 : 4);
  const vf factor = vf_set((float)m->factor);
  long left = per_scale;
  vf acc[2][12];
UNROLL(12)
  for (int r = 0; r < NR; r++)
UNROLL(2)
    for (int p = 0; p < NP; p++) acc[p][r] = vf_zero();
  for (long s = 0; s < steps; s++) {
    vi sum[2][12], upper_sum[2][12];
UNROLL(12)
    for (int r = 0; r < NR; r++)
UNROLL(2)
      for (int p = 0; p < NP; p++) {
        sum[p][r] = vi_set(start[r * steps + s]);
        upper_sum[p][r] = vi_zero();
      }
UNROLL(4)
    for (int c = 0; c < step; c += 8) {
      long column = s * step + c;
      if (NP == 1) {
        FETCH(codes[0] + column * LANES / 2 * (kind == CODES8 ? 2 : 1) + next);
        if (kind == CODES8) FETCH(codes[0] + column * LANES + next + 64);
        if (kind == PLANES8) FETCH(codes[0] + m->code_bytes / 2 + column * LANES / 2 + next);
      }
UNROLL(2)
      for (int upper = 0; upper < 2; upper++) {
        vi w[2];
UNROLL(2)
        for (int p = 0; p < NP; p++) w[p] = load_pair(codes[p], m->code_bytes / 2, kind, m->table, column, upper);
UNROLL(12)
        for (int r = 0; r < NR; r++)
UNROLL(2)
          for (int p = 0; p < NP; p++) {
            long at = r * cols + column + 4 * upper;
            if (planes == 2) upper_sum[p][r] = dot_bytes(upper_sum[p][r], w[p], high + at);
            sum[p][r] = dot_bytes(sum[p][r], w[p], (planes == 2 ? low : high) + at);
          }
      }
    }
    vf w_scale[2], w_minimum[2];
UNROLL(2)
    for (int p = 0; p < NP; p++) {
      w_scale[p] = vf_mul(load_scales(scales + p * pitch, half), factor);
      w_minimum[p] = minimums ? load_scales(minimums + p * pitch, half) : vf_zero();
    }
UNROLL(12)
    for (int r = 0; r < NR; r++)
UNROLL(2)
      for (int p = 0; p < NP; p++) {
        vi whole = planes == 2 ? vi_add(vi_shift_left(upper_sum[p][r], 8), sum[p][r]) : sum[p][r];
        acc[p][r] = vf_fma(vf_from_int(whole), vf_mul(w_scale[p], vf_set(a_scale[r * steps + s])), acc[p][r]);
      }
    if (minimums)
UNROLL(12)
      for (int r = 0; r < NR; r++)
UNROLL(2)
        for (int p = 0; p < NP; p++) acc[p][r] = vf_fma(w_minimum[p], vf_set(a_sum[r * steps + s]), acc[p][r]);
    if (--left == 0) {
      left = per_scale;
      if (NP == 1) FETCH(scales + next);
      scales += scale_bytes;
      if (minimums) {
        if (NP == 1) FETCH(minimums + next);
        minimums += scale_bytes;
      }
    }
  }
  for (int p = 0; p < NP; p++) {
    vf offset = m->offset ? vf_load(m->offset + (panel + p) * LANES) : vf_zero();
UNROLL(12)
    for (int r = 0; r < NR; r++) {
      float *to = out + r * stride + p * LANES;
      vf result = m->offset ? vf_add(acc[p][r], offset) : acc[p][r];
      vf_store(to, add ? vf_add(vf_load(to), result) : result);
    }
  }
}

typedef void (*Tile)(const Matrix *m, const Act *act, long mode, long row, float *out, long stride, int add,
                     long panel);

INLINE int step_of(const Matrix *m, long mode) { return m->group == 16 || mode == MODE_A8G16 ? 16 : 32; }
INLINE int planes_of(long mode) { return mode == MODE_A16 ? 2 : 1; }

#if defined(NK_AVX512)
#define SIZES 7
static const int tile_rows[2][SIZES] = {{1, 2, 3, 4, 6, 8, 12}, {1, 2, 3, 4, 5, 6, 8}}; /* by planes - 1 */
#define WIDE_ROWS(planes) ((planes) == 2 ? 4 : 6)

#define NAME(KIND, STEP, PLANES, NP, NR) tile_##KIND##_##STEP##_##PLANES##_##NP##_##NR
#define TILE(KIND, STEP, PLANES, NP, NR)                                                                            \
  static void NAME(KIND, STEP, PLANES, NP, NR)(const Matrix *m, const Act *act, long mode, long row, float *out,    \
                                               long stride, int add, long panel) {                                  \
    (void)mode;                                                                                                     \
    tile(m, act, row, out, stride, add, panel, KIND, STEP, PLANES, NP, NR);                                         \
  }
#define TILES(KIND, STEP, PLANES, A, B, C, WIDE)                                               \
  TILE(KIND, STEP, PLANES, 1, 1) TILE(KIND, STEP, PLANES, 1, 2) TILE(KIND, STEP, PLANES, 1, 3) \
  TILE(KIND, STEP, PLANES, 1, 4) TILE(KIND, STEP, PLANES, 1, A) TILE(KIND, STEP, PLANES, 1, B) \
  TILE(KIND, STEP, PLANES, 1, C) TILE(KIND, STEP, PLANES, 2, WIDE)
#define SET(KIND, STEP, PLANES, A, B, C, WIDE)                                                     \
  {NAME(KIND, STEP, PLANES, 1, 1), NAME(KIND, STEP, PLANES, 1, 2), NAME(KIND, STEP, PLANES, 1, 3), \
   NAME(KIND, STEP, PLANES, 1, 4), NAME(KIND, STEP, PLANES, 1, A), NAME(KIND, STEP, PLANES, 1, B), \
   NAME(KIND, STEP, PLANES, 1, C), NAME(KIND, STEP, PLANES, 2, WIDE)}
#define ONE_PLANE 1, 6, 8, 12, 6 /* PLANES, A, B, C, WIDE */
#define TWO_PLANES 2, 5, 6, 8, 4
#define EXPANDED(macro, ...) macro(__VA_ARGS__)
#define ALL_TILES(KIND)                                                           \
  EXPANDED(TILES, KIND, 32, ONE_PLANE) EXPANDED(TILES, KIND, 32, TWO_PLANES) \
  EXPANDED(TILES, KIND, 16, ONE_PLANE) EXPANDED(TILES, KIND, 16, TWO_PLANES)
#define ALL_SETS(KIND)                                                              \
  {{EXPANDED(SET, KIND, 32, ONE_PLANE), EXPANDED(SET, KIND, 32, TWO_PLANES)}, \
   {EXPANDED(SET, KIND, 16, ONE_PLANE), EXPANDED(SET, KIND, 16, TWO_PLANES)}}

ALL_TILES(CODES4)
ALL_TILES(TABLE4)
ALL_TILES(CODES8)
ALL_TILES(PLANES8)

/* by kind, whether steps are of 16 columns, planes - 1, and size; the last of a set is the two-panel tile */
static const Tile tiles[4][2][2][SIZES + 1] = {ALL_SETS(CODES4), ALL_SETS(TABLE4), ALL_SETS(CODES8), ALL_SETS(PLANES8)};
#define SET_OF(m, mode) tiles[(m)->kind][step_of(m, mode) == 16][planes_of(mode) - 1]
#else
#define SIZES 2
static const int tile_rows[2][SIZES] = {{1, 4}, {1, 4}};
#define WIDE_ROWS(planes) 4

#define NAME(KIND, NP, NR) tile_##KIND##_##NP##_##NR
#define TILE(KIND, NP, NR)                                                                                         \
  static void NAME(KIND, NP, NR)(const Matrix *m, const Act *act, long mode, long row, float *out, long stride,    \
                                 int add, long panel) {                                                            \
    tile(m, act, row, out, stride, add, panel, KIND, step_of(m, mode), planes_of(mode), NP, NR);                   \
  }
#define TILES(KIND) TILE(KIND, 1, 1) TILE(KIND, 1, 4) TILE(KIND, 2, 4)

TILES(CODES4)
TILES(TABLE4)
TILES(CODES8)
TILES(PLANES8)

#define SET(KIND) {NAME(KIND, 1, 1), NAME(KIND, 1, 4), NAME(KIND, 2, 4)}
static const Tile tiles[4][SIZES + 1] = {SET(CODES4), SET(TABLE4), SET(CODES8), SET(PLANES8)};
#define SET_OF(m, mode) tiles[(m)->kind]
#endif

void product_fetch(const Matrix *m, long panel) {
  const uint8_t *from = m->codes + panel * m->panel_bytes;
  const long bytes = m->panel_bytes < 4096 ? 2 * m->panel_bytes : m->panel_bytes < 8192 ? m->panel_bytes : 8192;
  for (long i = 0; i < bytes; i += 64) FETCH(from + i);
}

/* One panel, the rows first ... end - 1. */
static void narrow(const Matrix *m, const Act *act, long mode, long first, long end, float *out, long stride, int add,
                   long panel) {
  const int *sizes = tile_rows[planes_of(mode) - 1];
  for (long row = first; row < end;) {
    int i = SIZES - 1;
    while (sizes[i] > end - row) i--;
    SET_OF(m, mode)[i](m, act, mode, row, out + row * stride + panel * LANES, stride, add, panel);
    row += sizes[i];
  }
}

void product_range(const Matrix *m, const Act *act, long mode, long rows, float *out, long stride, int add, long first,
                   long end) {
  const long wide = WIDE_ROWS(planes_of(mode)), tiled = rows >= MANY_ROWS ? rows / wide * wide : 0;
  long panel = first;
  for (; tiled && panel + 1 < end; panel += 2) {
    for (long row = 0; row < tiled; row += wide)
      SET_OF(m, mode)[SIZES](m, act, mode, row, out + row * stride + panel * LANES, stride, add, panel);
    for (int p = 0; p < 2; p++) narrow(m, act, mode, tiled, rows, out, stride, add, panel + p);
  }
  for (; panel < end; panel++) narrow(m, act, mode, 0, rows, out, stride, add, panel);
}

void product_row(const Matrix *m, const Act *act, long mode, long row, long panel, float *out) {
  SET_OF(m, mode)[0](m, act, mode, row, out, 0, 0, panel);
}
