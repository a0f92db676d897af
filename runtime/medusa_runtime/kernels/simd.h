/* Vectors of the instruction set this object is compiled for, and the ways between fp32 and the stored dtypes. */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "dtype.h"

#ifdef __AVX512F__
#define LANES 16
typedef __m512 vf;
typedef __m512i vi;
#define SHIFT_LEFT_16(v) _mm512_slli_epi32(v, 16)
#define AND(a, b) _mm512_and_si512(a, b)
#define SPLAT_INT(i) _mm512_set1_epi32(i)
#define AS_FLOAT(v) _mm512_castsi512_ps(v)
#define LOAD_INT(p) _mm512_loadu_si512((const void *)(p))
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SPLAT(f) _mm512_set1_ps(f)
#define ZERO() _mm512_setzero_ps()
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define WIDEN_HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define SUM(v) _mm512_reduce_add_ps(v)
#else
#define LANES 8
typedef __m256 vf;
typedef __m256i vi;
#define SHIFT_LEFT_16(v) _mm256_slli_epi32(v, 16)
#define AND(a, b) _mm256_and_si256(a, b)
#define SPLAT_INT(i) _mm256_set1_epi32(i)
#define AS_FLOAT(v) _mm256_castsi256_ps(v)
#define LOAD_INT(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define SPLAT(f) _mm256_set1_ps(f)
#define ZERO() _mm256_setzero_ps()
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define WIDEN_HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
static inline float sum_avx2(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#define SUM(v) sum_avx2(v)
#endif

#define STEP (2 * LANES) /* elements of two vectors */
#define INLINE static inline __attribute__((always_inline))

/* The two vectors of the STEP elements at p: of bf16 the even and the odd ones, else the low and the high half. Factors are
 * widened by the same functions, so that in a dot product the order does not matter. */
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
        return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float widened(uint16_t bits, const int dtype)
{
    if (dtype == DTYPE_FP16)
        return _cvtsh_ss(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

