// Every operator's table of implementations; OP/OP.cc defines it.
#pragma once

#include "csrc/kernels/attention/attention.h"
#include "csrc/kernels/attention_merge/attention_merge.h"
#include "csrc/kernels/linear_dense/linear_dense.h"
#include "csrc/kernels/linear_group/linear_group.h"
#include "csrc/kernels/linear_w8/linear_w8.h"
#include "csrc/kernels/quantize_rows/quantize_rows.h"
#include "csrc/kernels/rms_norm/rms_norm.h"
#include "csrc/kernels/rotary/rotary.h"
#include "csrc/kernels/sdot_gemv/sdot_gemv.h"
#include "csrc/kernels/swiglu/swiglu.h"
#include "csrc/runtime/kernel_table.h"

namespace tle {

extern KernelTable<AttentionFn> attention_table;
extern KernelTable<AttentionMergeFn> attention_merge_table;
extern KernelTable<LinearDenseFn> linear_dense_table;
extern KernelTable<LinearGroupFn> linear_group_table;
extern KernelTable<LinearW8Fn> linear_w8_table;
extern KernelTable<QuantizeRowsFn> quantize_rows_table;
extern KernelTable<RmsNormFn> rms_norm_table;
extern KernelTable<RotaryFn> rotary_table;
extern KernelTable<SdotGemvFn> sdot_gemv_table;
extern KernelTable<SwigluFn> swiglu_table;

}  // namespace tle
