/* The stored dtypes; the numbers are known to native.py. */
#pragma once

enum { DTYPE_BF16 = 0, DTYPE_FP16 = 1, DTYPE_FP32 = 2 };
