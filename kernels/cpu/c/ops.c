/* Single operations, for tests and notebooks; a model's step does not come by here. */
#include "nk.h"

#include <stdlib.h>

typedef struct {
  const Matrix *matrix;
  const float *x;
  float *out;
  long rows, stride, mode;
  float peak;
  Act act;
} Linear;

static void work_quantize(void *context, long first, long end) {
  Linear *l = context;
  long cols = l->matrix->cols;
  for (long r = first; r < end; r++) quantize_row(l->x + r * cols, cols, l->mode, l->peak, &l->act, r);
}

static void work_product(void *context, long first, long end) {
  Linear *l = context;
  product_range(l->matrix, &l->act, l->mode, l->rows, l->out, l->stride, 0, first, end);
}

static void linear(Team *team, void *argument) {
  Linear *l = argument;
  Cursor cursor = {0};
  team_phase(team, &cursor, l->rows, 1, work_quantize, 0, NULL, NULL, l);
  team_phase(team, &cursor, panels_of(l->matrix), 1, work_product, 0, NULL, NULL, l);
}

/* out [rows][stride] = x [rows][cols] W^T + offset; peak: of MODE_TENSOR and MODE_STATIC */
int nk_linear(Team *team, const Matrix *matrix, long mode, float peak, long rows, const float *x, float *out,
              long stride) {
  Buffer act = {0};
  if (rows == 0) return NK_OK;
  if (buffer_reserve(&act, act_bytes(rows, matrix->cols))) return NK_NO_MEMORY;
  Linear l = {matrix, x, out, rows, stride, mode, peak, {0}};
  act_place(&l.act, act.memory, rows, matrix->cols);
  team_run(team, linear, &l);
  free(act.memory);
  return NK_OK;
}

/* codes int32 [rows][cols], scales [rows][cols / group], group 16 or 32 */
int nk_quantize(long rows, long cols, long mode, float peak, const float *x, int32_t *codes, float *scales,
                long group) {
  Buffer memory = {0};
  Act act;
  if (rows == 0) return NK_OK;
  if (buffer_reserve(&memory, act_bytes(rows, cols))) return NK_NO_MEMORY;
  act_place(&act, memory.memory, rows, cols);
  FloatMode old = flush_denormals();
  for (long r = 0; r < rows; r++) quantize_row(x + r * cols, cols, mode, peak, &act, r);
  restore_float_mode(old);
  for (long i = 0; i < rows * cols; i++) codes[i] = mode == MODE_A16 ? 256 * act.high[i] + act.low[i] : act.high[i];
  for (long i = 0; i < rows * cols / group; i++) scales[i] = (group == 16 ? act.scale16 : act.scale32)[i];
  free(memory.memory);
  return NK_OK;
}

void nk_unpack(const Matrix *matrix, float *out) {
  for (long r = 0; r < matrix->rows; r++) unpack_row(matrix, r, out + r * matrix->cols);
}
