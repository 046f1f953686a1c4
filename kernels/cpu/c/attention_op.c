/* Attention of one layer as an operation of its own, for tests and notebooks. */
#include "nk.h"

static void work_write(void *context, long first, long end) { attention_write(context, 0, first, end); }
static void work_seal(void *context, long first, long end) { attention_seal(context, 0, first, end); }
static void work_task(void *context, long first, long end) { attention_task(context, 0, first, end); }
static void work_merge(void *context, long first, long end) { attention_merge(context, 0, first, end); }

static void attend(Team *team, void *argument) {
  Attention *a = argument;
  Cursor cursor = {0};
  team_phase(team, &cursor, a->writes, 1, work_write, 0, NULL, NULL, a);
  if (a->step->fulls)
    team_phase(team, &cursor, a->step->fulls * a->model->kv_heads, 1, work_seal, 0, NULL, NULL, a);
  team_phase(team, &cursor, a->tasks, 1, work_task, a->step->rows, work_merge, NULL, a);
}

/* q, k, v as a layer's products give them (q and k are changed) -> out, in layer 0 of the model and the step.
 * threads: how finely to cut. */
int nk_attention(Team *team, const Model *model, const Step *step, long threads, float *q, float *k, float *v,
                 float *out) {
  Attention a = {.q = q, .k = k, .v = v, .out = out};
  if (step->rows == 0) return NK_OK;
  int failed = attention_plan(&a, model, step, (int)threads);
  if (!failed) team_run(team, attend, &a);
  attention_free(&a);
  return failed ? NK_NO_MEMORY : NK_OK;
}
