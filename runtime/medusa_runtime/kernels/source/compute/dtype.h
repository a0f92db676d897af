/* The stored dtypes. native.py uses the same numbers. */
#pragma once

enum { DTYPE_BF16 = 0, DTYPE_FP16 = 1, DTYPE_FP32 = 2 };

/* Bytes of an element in memory. */
static inline long size_of(const int dtype) { return dtype == DTYPE_FP32 ? 4 : 2; }
