/* What Python checks when it loads the library: that it describes the structures as they were compiled. */
#include "nk.h"

const char *nk_variant(void) { return NK_VARIANT; }

/* In the order of STRUCTURES in kernels/cpu/structs.py. */
int64_t nk_struct_size(int64_t which) {
  static const int64_t sizes[] = {sizeof(Matrix), sizeof(Act), sizeof(Layer), sizeof(Model), sizeof(Step)};
  const int64_t count = sizeof(sizes) / sizeof(sizes[0]);
  return which >= 0 && which < count ? sizes[which] : -1;
}
