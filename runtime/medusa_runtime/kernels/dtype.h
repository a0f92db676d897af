/* The stored dtypes; the numbers are known to native.py. */
#pragma once

enum { DTYPE_BF16 = 0, DTYPE_FP16 = 1, DTYPE_FP32 = 2 };

/* Bytes of an element in memory. */
static inline long size_of(const int dtype) { return dtype == DTYPE_FP32 ? 4 : 2; }
