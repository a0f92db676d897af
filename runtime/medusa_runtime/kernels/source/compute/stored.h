/* Vectors of LANES numbers as they are stored, with AVX2 and NEON. */
#pragma once

#include "simd.h"

INLINE vf load(const void *p, const int dtype)
{
    if (dtype == DTYPE_FP32)
        return LOAD((const float *)p);
    if (dtype == DTYPE_FP16)
        return WIDEN_HALF(p);
    return WIDEN_BF16(p);
}

INLINE void store(void *p, vf v, const int dtype)
{
    if (dtype == DTYPE_FP32) {
        STORE((float *)p, v);
        return;
    }
    if (dtype == DTYPE_FP16) {
        STORE_HALF(p, v);
        return;
    }
    store_bf16(p, v);
}

/* Round v as if it had been stored and loaded again. */
INLINE vf rounded(vf v, const int dtype)
{
    if (dtype == DTYPE_FP32)
        return v;
    if (dtype == DTYPE_FP16)
        return ROUND_TO_HALF(v);
    return AS_FLOAT(SHIFT_LEFT_16(bf16_bits(v)));
}
