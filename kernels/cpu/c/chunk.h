/* Attention of a few queries to one chunk: the 64 tokens of a block. Internal to attention.c.
 *
 * A *pair* is one query row and one of its heads. What is computed for a pair over a chunk is
 *
 *     s_t = q . k_t / sqrt(d),   m = max s_t,   p_t = e^(s_t - m),   sum over t of p_t v_t,   sum over t of p_t
 *
 * over the tokens that the pair sees, in one fixed sequence of operations: a dot product along d, the sum of p v along
 * t, the sum of p in 16 lanes. Pairs that are computed together share the loads of k and v and nothing else. Chunks are
 * joined in two levels (Milakov and Gimelshein 2018 give the rescaling): SPAN chunks in order to a span, the spans in
 * order to the result. Both begin at fixed tokens, so that a cut between threads changes no bit; the second level is
 * there to keep few what threads have to hand each other.
 */
#ifndef NK_CHUNK_H
#define NK_CHUNK_H

#include "nk.h"

#define TILE 8 /* most pairs at a time: with 2 vectors of sums each they fill the registers */
#define SPAN 4

typedef struct {
  long format; /* KV_... of the numbers below */
  const void *keys, *values;              /* [4][head_dim][16], [64][head_dim]; nibbles as pages.py draws them */
  const float *key_scales, *value_scales; /* [64], or NULL */
  const uint16_t *params;                 /* KV_KIVI4: as a record has them */
  const float *key_params, *value_params; /* the same in fp32, before such a chunk is attended to or widened */
  const void *next_keys, *next_values;    /* what will be read next, or any address */
} Chunk;

/* Of some pairs. sums [pairs][head_dim + 16]: the sum of p v, then 16 lanes that add up to the sum of p; max [pairs] */
typedef struct {
  float *sums, *max;
} Partial;

INLINE long partial_floats(long dim) { return dim + LANES; }
INLINE Partial partial_from(Partial p, long pair, long dim) {
  return (Partial){p.sums + pair * partial_floats(dim), p.max + pair};
}

INLINE long chunk_bytes(long format, long n) { return format == KV_KIVI4 ? n / 2 : kv_bytes(format, n); }

/* n pairs, at most TILE, of which pair j sees the first seen[j] tokens, 1 ... 64; seen ascends. Of nibbles, vectors of
 * values must not straddle the two halves of a head: chunk_whole says whether they do not. */
INLINE int chunk_whole(long format, long dim) { return format < KV_INT4 || dim % (2 * LANES) == 0; }
void chunk_attend(const Chunk *c, long dim, long n, const float *const *q, const int *seen, Partial out);
INLINE long chunk_params(long dim) { return KIVI_KEY_PARAMS * dim + kivi_value_params(dim); }
/* KV_KIVI4: the params in fp32 [chunk_params] */
void chunk_scale(Chunk *c, long dim, float *params);
/* keys and values of the first `tokens` tokens in fp32 (exact), so that many tiles need not widen them again */
void chunk_widen(const Chunk *c, long dim, int tokens, float *keys, float *values);
void partial_join(long dim, long n, Partial into, Partial from);
/* [dim] of the first pair of p */
void partial_finish(long dim, Partial p, float *out);

#endif
