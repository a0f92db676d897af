/* Vectors of the instruction set that this object is compiled for, and conversions between fp32 and the stored dtypes. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "dtype.h"

#define INLINE static inline __attribute__((always_inline))

/* 32 bytes. */
typedef uint64_t octets __attribute__((vector_size(32)));
typedef int8_t integers __attribute__((vector_size(32)));
typedef int16_t shorts __attribute__((vector_size(32)));

#ifdef __aarch64__
#include "neon.h"
#else
#include "avx.h"
#endif

#define STEP (2 * LANES) /* elements of two vectors */
#define LINE 64L         /* bytes of a line of the cache */
#define PREFETCH(p, locality) __builtin_prefetch(p, 0, locality)

/* The STEP elements at p as two vectors: for bf16 the even and the odd elements, else the low and the high half. Both factors of
 * a dot product are widened by these functions, so the order does not matter. */
INLINE vf first(const void *p, const int dtype)
{
    if (dtype == DTYPE_FP32)
        return LOAD((const float *)p);
    return dtype == DTYPE_BF16 ? AS_FLOAT(SHIFT_LEFT_16(LOAD_INT(p))) : WIDEN_HALF(p);
}

INLINE vf second(const void *p, const int dtype)
{
    if (dtype == DTYPE_FP32)
        return LOAD((const float *)p + LANES);
    return dtype == DTYPE_BF16 ? AS_FLOAT(AND(LOAD_INT(p), SPLAT_INT((int)0xffff0000u))) : WIDEN_HALF((const uint16_t *)p + LANES);
}

static inline uint16_t narrow(float value, const int dtype)
{
    if (dtype == DTYPE_FP16)
        return half_of(value);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float widened(uint16_t bits, const int dtype)
{
    if (dtype == DTYPE_FP16)
        return float_of_half(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE float element(const void *p, long at, const int dtype)
{
    return dtype == DTYPE_FP32 ? ((const float *)p)[at] : widened(((const uint16_t *)p)[at], dtype);
}
