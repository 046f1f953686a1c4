/* A row of weights back to fp32: embedding lookup, and the check that packing lost nothing.
 * weight = scale * (code - bias) + minimum, multiplied and added as QTensor.dequantize does. */
#include "nk.h"

static int code_of(const Matrix *m, const uint8_t *panel, long lane, long column) {
  static const int bias[] = {0, 8, 128};
  long pair = column / 8 * 64 + lane * 4 + column % 4; /* byte of a nibble layout */
  int upper = column % 8 / 4 * 4;
  switch (m->kind) {
    case CODES8:
      return panel[column / 4 * 64 + lane * 4 + column % 4] - 128;
    case PLANES8:
      return ((panel[pair] >> upper & 15) << 4 | (panel[m->code_bytes / 2 + pair] >> upper & 15)) - 128;
    case TABLE4:
      return m->table[panel[pair] >> upper & 15] - 128;
    default:
      return (panel[pair] >> upper & 15) - bias[m->bias];
  }
}

static float scale_of(const Matrix *m, const uint8_t *scales, long at) {
  return m->scale16 ? half_to_float(((const uint16_t *)(const void *)scales)[at])
                    : ((const float *)(const void *)scales)[at];
}

void unpack_row(const Matrix *m, long row, float *out) {
  long panel = row / LANES, lane = row % LANES, groups = m->cols / m->group;
  const uint8_t *codes = m->codes + panel * m->panel_bytes, *scales = m->scales + panel * m->panel_bytes;
  const uint8_t *minimums = m->minimums ? m->minimums + panel * m->panel_bytes : NULL;
  for (long g = 0; g < groups; g++) {
    long at = g * LANES + lane;
    float scale = scale_of(m, scales, at) * (float)m->factor, minimum = minimums ? scale_of(m, minimums, at) : 0.0f;
    for (long c = g * m->group; c < (g + 1) * m->group; c++) {
      float value = (float)code_of(m, codes, lane, c) * scale;
      out[c] = minimums ? value + minimum : value;
    }
  }
}
