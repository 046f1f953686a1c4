/* Which tokens can win a draw: argmax of logit / temperature + Gumbel noise, the noise of nanokit/engine/noise.py.
 *
 * The words of the generator are exact; their Gumbel value is computed in fp32, and is within NOISE_ERROR of the exact
 * one (fp64, then rounded to fp32). Every token that the exact noise might put first is handed out, which nearly always
 * is one; whoever asks decides among several by the exact noise. So a draw is the same to the bit as one that computes
 * the noise of the whole vocabulary in fp64.
 */
#include "vec.h"

#define LARGEST_FLOAT 0x1.fffffep127f

/* Where the bound comes from. With e = 2^-24, a rounding:
 *   u = (word + 1/2) / 2^32      conversion and sum: 2 e, relative
 *   E = -log u                   away from u = 1, |log u| > .34: those 2 e, absolute, and 3 e |log u| of the polynomial
 *                                and sums: 9 e, relative. Near 1, -log(1 - v) with v from the inverted word, not from
 *                                1 - u, which would have lost its digits: also below 9 e.
 *   g = -log E                   9 e from E, 3 e |g| from polynomial and sums
 *   the exact noise's rounding   e |g|
 * |g| < 22.9, so less than 101 e = 6.1e-6. */
#define NOISE_ERROR 7e-6f

/* ---- Philox4x32-10 ------------------------------------------------------------------------------------------------*/

/* Word w of the block whose counter is c, for 16 blocks. c is changed in place. */
INLINE void philox(vi c[4], uint64_t seed) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vi high0, low0, high2, low2;
    vi_multiply_wide(c[0], 0xd2511f53u, &high0, &low0);
    vi_multiply_wide(c[2], 0xcd9e8d57u, &high2, &low2);
    c[0] = vi_xor(vi_xor(high2, c[1]), vi_set((int32_t)k0));
    c[1] = low2;
    c[2] = vi_xor(vi_xor(high0, c[3]), vi_set((int32_t)k1));
    c[3] = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

typedef struct {
  uint64_t seed, position;
  uint32_t stream;
} Key;

/* Four words of each of 16 blocks: words[j], lane l is that of token 4 blocks[l] + j. */
INLINE void words_of(const Key *key, vi blocks, vi words[4]) {
  words[0] = blocks;
  words[1] = vi_set((int32_t)(uint32_t)key->position);
  words[2] = vi_set((int32_t)(uint32_t)(key->position >> 32));
  words[3] = vi_set((int32_t)key->stream);
  philox(words, key->seed);
}

/* ---- the noise, nearly --------------------------------------------------------------------------------------------*/

#define SQRT_HALF 0x3f3504f3 /* as bits */

/* log(1 + r) + k log 2 for r in sqrt(1/2) - 1 ... sqrt(2) - 1 (Cephes' coefficients) */
INLINE vf log_sum(vf r, vf k) {
  vf square = vf_mul(r, r);
  vf p = vf_set(7.0376836292e-2f);
  p = vf_fma(p, r, vf_set(-1.1514610310e-1f));
  p = vf_fma(p, r, vf_set(1.1676998740e-1f));
  p = vf_fma(p, r, vf_set(-1.2420140846e-1f));
  p = vf_fma(p, r, vf_set(1.4249322787e-1f));
  p = vf_fma(p, r, vf_set(-1.6668057665e-1f));
  p = vf_fma(p, r, vf_set(2.0000714765e-1f));
  p = vf_fma(p, r, vf_set(-2.4999993993e-1f));
  p = vf_fma(p, r, vf_set(3.3333331174e-1f));
  vf y = vf_mul(vf_mul(square, r), p);
  y = vf_fma(k, vf_set(-2.12194440e-4f), y);
  y = vf_fma(square, vf_set(-0.5f), y);
  return vf_fma(k, vf_set(0.693359375f), vf_add(r, y));
}

/* x = 2^k (1 + r), for normal x above zero */
INLINE vf split(vf x, vi *k) {
  vi bits = vi_sub(vf_bits(x), vi_set(SQRT_HALF));
  *k = vi_shift_right(bits, 23);
  return vf_sub(vf_of_bits(vi_add(vi_and(bits, vi_set(0x7fffff)), vi_set(SQRT_HALF))), vf_set(1.0f));
}

INLINE vf gumbel(vi words) {
  vi k;
  vf r = split(vf_add(vf_from_unsigned(words), vf_set(0.5f)), &k); /* of 2^32 u */
  k = vi_sub(k, vi_set(32));
  vf inverted = vf_from_unsigned(vi_xor(words, vi_set(-1)));
  vf v = vf_mul(vf_add(inverted, vf_set(0.5f)), vf_set(0x1p-32f)); /* 1 - u */
  r = vf_where_zero(k, vf_sub(vf_zero(), v), r);
  vf exponential = vf_sub(vf_zero(), log_sum(r, vf_from_int(k)));
  r = split(exponential, &k);
  return vf_sub(vf_zero(), log_sum(r, vf_from_int(k)));
}

/* Not less than the noise, and cheap: with v = 1 - u >= 2^-n, -log(-log(1 - v)) <= -log v <= n log 2. */
INLINE vf gumbel_at_most(vi words) {
  vi exponent = vi_shift_right(vf_bits(vf_from_unsigned(vi_xor(words, vi_set(-1)))), 23);
  return vf_mul(vf_from_int(vi_sub(vi_set(127 + 32), exponent)), vf_set(0.6931473f));
}

/* For the test of NOISE_ERROR: n (a multiple of 16) Gumbel values of given words; returns the bound. */
float nk_gumbel_near(const uint32_t *words, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i += LANES) vf_store(out + i, gumbel(vi_load(words + i)));
  return NOISE_ERROR;
}

/* ---- the candidates -----------------------------------------------------------------------------------------------*/

/* Those so far whose score is at least `least`, which rises with the best score. What by `gumbel_at_most` stays below
 * `hopeless` is not looked at more closely. */
typedef struct {
  float best, least, hopeless;
  int64_t count;
  int64_t *ids;
  float *scores;
} Found;

/* A score is logit / temperature, rounded alike here and in numpy, plus noise, rounded: it differs from the exact one
 * by NOISE_ERROR and a rounding of each sum, and so does that of the winner. */
static float least_beside(float best, float noise_error) {
  if (best == INFINITY) return best;
  return best - 2 * (noise_error + fabsf(best) * 0x1p-22f);
}

/* Sixteen more logits / temperature with the words of their noise; ids as first_id + lane, or given. */
INLINE void consider(Found *found, vf scaled, vi words, int64_t first_id, const int64_t *ids) {
  if (!vf_at_least(vf_add(scaled, gumbel_at_most(words)), vf_set(found->hopeless))) return;
  vf scores = vf_add(scaled, gumbel(words));
  uint32_t hits = vf_at_least(scores, vf_set(found->least));
  if (hits == 0) return;
  float score[LANES];
  vf_store(score, scores);
  for (; hits; hits &= hits - 1) {
    int lane = __builtin_ctz(hits);
    found->ids[found->count] = ids ? ids[lane] : first_id + lane;
    found->scores[found->count++] = score[lane];
    if (score[lane] > found->best) found->best = score[lane];
  }
  found->least = least_beside(found->best, NOISE_ERROR);
  found->hopeless = least_beside(found->best, 2 * NOISE_ERROR); /* and the rounding of 23 log 2 */
}

static int64_t prune(Found *found) {
  int64_t kept = 0;
  for (int64_t i = 0; i < found->count; i++)
    if (found->scores[i] >= found->least) found->ids[kept++] = found->ids[i];
  return kept;
}

/* Candidates among all of x [n] in ids, ascending: room for n of them, and for n scores. Returns how many; 0 when the
 * row cannot be drawn from (a NaN, +inf, nothing above -inf). */
int64_t nk_draw_candidates(const float *x, int64_t n, float temperature, uint64_t seed, uint64_t position,
                           uint32_t stream, int64_t *ids, float *scores) {
  Key key = {seed, position, stream};
  Found found = {-INFINITY, -LARGEST_FLOAT, -LARGEST_FLOAT, 0, ids, scores};
  vf t = vf_set(temperature), limit = vf_set(LARGEST_FLOAT);
  uint32_t sound = 0xffff;
  int32_t order[LANES]; /* so that after vi_transpose4 the lanes of each vector are neighbours in the vocabulary */
  for (int i = 0; i < LANES; i++) order[i] = i % 4 * 4 + i / 4;
  for (int64_t i = 0; i < n; i += 64) {
    float rest[64];
    const float *here = x + i;
    if (i + 64 > n) {
      for (int k = 0; k < 64; k++) rest[k] = i + k < n ? x[i + k] : -INFINITY;
      here = rest;
    }
    vi words[4], noise[4];
    words_of(&key, vi_add(vi_set((int32_t)(i / 4)), vi_load(order)), words);
    vi_transpose4(words, noise);
    for (int k = 0; k < 4; k++) {
      vf logits = vf_load(here + 16 * k);
      sound &= vf_at_least(limit, logits);
      consider(&found, vf_div(logits, t), noise[k], i + 16 * k, NULL);
    }
  }
  return sound == 0xffff ? prune(&found) : 0;
}

/* The same among the `count` ids `among`, ascending. */
int64_t nk_draw_candidates_of(const float *x, const int64_t *among, int64_t count, float temperature, uint64_t seed,
                              uint64_t position, uint32_t stream, int64_t *ids, float *scores) {
  Key key = {seed, position, stream};
  Found found = {-INFINITY, -LARGEST_FLOAT, -LARGEST_FLOAT, 0, ids, scores};
  uint32_t sound = 0xffff;
  for (int64_t i = 0; i < count; i += LANES) {
    float logits[LANES];
    int32_t blocks[LANES], word[4][LANES], own[LANES];
    for (int k = 0; k < LANES; k++) {
      int64_t id = i + k < count ? among[i + k] : 0;
      logits[k] = i + k < count ? x[id] : -INFINITY;
      blocks[k] = (int32_t)(id / 4);
    }
    vi words[4];
    words_of(&key, vi_load(blocks), words);
    for (int j = 0; j < 4; j++) vi_store(word[j], words[j]);
    for (int k = 0; k < LANES; k++) own[k] = word[i + k < count ? among[i + k] % 4 : 0][k];
    vf values = vf_load(logits);
    sound &= vf_at_least(vf_set(LARGEST_FLOAT), values);
    consider(&found, vf_div(values, vf_set(temperature)), vi_load(own), 0, among + i);
  }
  return sound == 0xffff ? prune(&found) : 0;
}
