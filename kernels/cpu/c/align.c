/* Reading a buffer by vector loads of one width, from any address on, again and again by the calling thread: what a
 * load that straddles two cache lines costs. Eight accumulators, one exclusive or a load, so that nothing but loads is
 * in the way; a load is written for each width that the build has as one instruction, and for no other. */
#include "nk.h"

enum { SUMS = 8 };

#define READER(width)                                                                                       \
  typedef uint64_t Load##width __attribute__((vector_size(width)));                                         \
  static uint64_t read_##width(const uint8_t *at, long bytes, long passes) {                                \
    Load##width sum[SUMS] = {0};                                                                            \
    uint64_t words[width / 8], mixed = 0;                                                                   \
    for (long pass = 0; pass < passes; pass++) {                                                            \
      for (long i = 0; i + SUMS * width <= bytes; i += SUMS * width)                                        \
        _Pragma("GCC unroll 8") for (int j = 0; j < SUMS; j++) {                                            \
          Load##width x;                                                                                    \
          memcpy(&x, at + i + j * width, width);                                                            \
          sum[j] ^= x;                                                                                      \
        }                                                                                                   \
      __asm__ volatile("" ::: "memory"); /* each pass reads anew */                                         \
    }                                                                                                       \
    for (int j = 1; j < SUMS; j++) sum[0] ^= sum[j];                                                        \
    memcpy(words, &sum[0], width);                                                                          \
    for (int j = 0; j < width / 8; j++) mixed ^= words[j];                                                  \
    return mixed;                                                                                           \
  }

#if defined(__SSE2__) || defined(__aarch64__)
#define WIDTHS_16 16
READER(16)
#else
#define WIDTHS_16 0
#endif
#if defined(__AVX2__)
#define WIDTHS_32 32
READER(32)
#else
#define WIDTHS_32 0
#endif
#if defined(__AVX512F__)
#define WIDTHS_64 64
READER(64)
#else
#define WIDTHS_64 0
#endif

/* The widths of loads that this build has, added up. */
int64_t nk_load_widths(void) { return WIDTHS_16 + WIDTHS_32 + WIDTHS_64; }

/* The exclusive or of all words that lie in whole steps of 8 loads from `at` on, `passes` times over (an even number of
 * them gives 0); 0 for a width that nk_load_widths does not name. */
uint64_t nk_read_by(const uint8_t *at, int64_t bytes, int64_t passes, int64_t width) {
#if WIDTHS_16
  if (width == 16) return read_16(at, bytes, passes);
#endif
#if WIDTHS_32
  if (width == 32) return read_32(at, bytes, passes);
#endif
#if WIDTHS_64
  if (width == 64) return read_64(at, bytes, passes);
#endif
  (void)at, (void)bytes, (void)passes, (void)width;
  return 0;
}
