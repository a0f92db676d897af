/* The vectors of simd.h on x86-64: AVX-512F where the object is compiled for it, else AVX2 with FMA and F16C. */
#pragma once

#include <immintrin.h>

static inline float sum_256(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float highest_256(__m256 v)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* The sums of four vectors, with the same bits. */
static inline __m128 sums_256(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    const __m256 pairs = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high)); /* two each of a, c, b, d */
    const __m256 sums = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
    return _mm_blend_ps(_mm256_castps256_ps128(sums), _mm_moveldup_ps(_mm256_extractf128_ps(sums, 1)), 0xa);
}

#ifdef __AVX512F__
#define LANES 16
typedef __m512 vf;
typedef __m512i vi;
#define SHIFT_LEFT_16(v) _mm512_slli_epi32(v, 16)
#define AND(a, b) _mm512_and_si512(a, b)
#define SPLAT_INT(i) _mm512_set1_epi32(i)
#define AS_FLOAT(v) _mm512_castsi512_ps(v)
#define LOAD_INT(p) _mm512_loadu_si512((const void *)(p))
#define STORE_INT(p, v) _mm512_storeu_si512((void *)(p), v)
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SPLAT(f) _mm512_set1_ps(f)
#define ZERO() _mm512_setzero_ps()
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define HIGH_HALVES(v) AND(v, SPLAT_INT((int)0xffff0000u))
#define WIDEN_HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define LOW_HALF(v) _mm512_castps512_ps256(v)
#define HIGH_HALF(v) _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1))
#define HALVES(v) _mm256_add_ps(LOW_HALF(v), HIGH_HALF(v))
#define SUM(v) sum_256(HALVES(v))
#define STORE_SUMS(p, a, b, c, d) _mm_storeu_ps(p, sums_256(HALVES(a), HALVES(b), HALVES(c), HALVES(d)))
#define MAX(a, b) _mm512_max_ps(a, b)
#define HIGHEST(v) highest_256(_mm256_max_ps(LOW_HALF(v), HIGH_HALF(v)))
#define MUL(a, b) _mm512_mul_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define OR(a, b) _mm512_or_si512(a, b)
#define SHIFT_LEFT(v, bits) _mm512_slli_epi32(v, bits)
#define TO_FLOAT(v) _mm512_cvtepi32_ps(v)
#define WIDEN_SIGNED(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define WIDEN_UNSIGNED(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define WIDEN_BF16(p) AS_FLOAT(SHIFT_LEFT_16(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))))
/* LANES nibbles, with others above them. */
INLINE vi nibbles(const void *p)
{
    const vi of_each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const vi shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const vi words = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p));
    return _mm512_srlv_epi32(_mm512_permutexvar_epi32(of_each, words), shifts);
}
/* The elements of a table of LANES floats. Only the four lowest bits of each place count. */
#define PICK(table, places) _mm512_permutexvar_ps(places, table)
#define COUNTED() _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#ifdef __AVX512BF16__
#define DOT_BF16(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#define TO_BF16(low, high) ((__m512i)_mm512_cvtne2ps_pbh(high, low))
/* 32 nibbles in elements of 16 bits, with others above them. */
INLINE vi nibbles_16(const void *p)
{
    const long one = 0x0001000100010001;
    const vi of_each = _mm512_setr_epi64(0, one, 2 * one, 3 * one, 4 * one, 5 * one, 6 * one, 7 * one);
    const vi words = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    return _mm512_srlv_epi16(_mm512_permutexvar_epi16(of_each, words), _mm512_set1_epi64(0x000c000800040000));
}
/* The same as PICK, 32 elements of bf16. Five bits of each place count, so a table has its 16 elements twice. */
#define BF16_TABLE(v) TO_BF16(v, v)
#define PICK_BF16(table, places) _mm512_permutexvar_epi16(places, table)
/* A table of 128 elements of bf16: their low bytes, and their high ones. */
struct wide_table {
    vi low[2], high[2];
};
INLINE struct wide_table wide_table(const vi elements[4])
{
    const vi counted = _mm512_setr_epi64(0x0e0c0a0806040200, 0x1e1c1a1816141210, 0x2e2c2a2826242220, 0x3e3c3a3836343230,
                                         0x4e4c4a4846444240, 0x5e5c5a5856545250, 0x6e6c6a6866646260, 0x7e7c7a7876747270);
    const vi odd = _mm512_or_si512(counted, _mm512_set1_epi8(1));
    struct wide_table found;
    for (int i = 0; i < 2; i++) {
        found.low[i] = _mm512_permutex2var_epi8(elements[2 * i], counted, elements[2 * i + 1]);
        found.high[i] = _mm512_permutex2var_epi8(elements[2 * i], odd, elements[2 * i + 1]);
    }
    return found;
}
/* The elements at 32 places. The highest bit of each place negates the element. */
INLINE vi pick_signed(const struct wide_table *table, const void *places)
{
    const vi twice = _mm512_setr_epi64(0x0303020201010000, 0x0707060605050404, 0x0b0b0a0a09090808, 0x0f0f0e0e0d0d0c0c,
                                       0x1313121211111010, 0x1717161615151414, 0x1b1b1a1a19191818, 0x1f1f1e1e1d1d1c1c);
    const vi bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)places));
    const vi each = _mm512_permutexvar_epi8(twice, bytes);
    const vi high = _mm512_mask2_permutex2var_epi8(table->high[0], each, 0xaaaaaaaaaaaaaaaa, table->high[1]);
    const vi both = _mm512_mask2_permutex2var_epi8(table->low[0], high, 0x5555555555555555, table->low[1]);
    return _mm512_ternarylogic_epi32(both, each, _mm512_set1_epi16((short)0x8000), 0x78); /* both ^ (each & sign) */
}
#define PICK_SIGNED(table, places) pick_signed(table, places)
#endif
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
/* The upper halves of 32 bits, without a mask. */
#define HIGH_HALVES(v) _mm256_slli_epi32(_mm256_srli_epi32(v, 16), 16)
#define WIDEN_HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define SUM(v) sum_256(v)
#define STORE_SUMS(p, a, b, c, d) _mm_storeu_ps(p, sums_256(a, b, c, d))
#define MAX(a, b) _mm256_max_ps(a, b)
#define HIGHEST(v) highest_256(v)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define OR(a, b) _mm256_or_si256(a, b)
#define SHIFT_LEFT(v, bits) _mm256_slli_epi32(v, bits)
#define TO_FLOAT(v) _mm256_cvtepi32_ps(v)
#define WIDEN_SIGNED(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define WIDEN_UNSIGNED(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
/* LANES nibbles, with others above them. */
INLINE vi nibbles(const void *p)
{
    int word;
    memcpy(&word, p, sizeof word);
    return _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}

#define WIDEN_BF16(p) AS_FLOAT(SHIFT_LEFT_16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))))

/* The rest is for pointwise.c and dequantize.c, which are already as fast as memory with these vectors. */
#define NARROW_HALF(v) _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)
#define STORE_HALF(p, v) _mm_storeu_si128((__m128i *)(p), NARROW_HALF(v))
#define ROUND_TO_HALF(v) _mm256_cvtph_ps(NARROW_HALF(v))
#define CLAMP(v, low, high) _mm256_min_ps(_mm256_max_ps(v, SPLAT(low)), SPLAT(high))
#define ROUND(v) _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
/* 2 to the power of v, whose elements must be whole numbers. */
#define POWER_OF_TWO(v) AS_FLOAT(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v), SPLAT_INT(127)), 23))

/* v rounded to bf16, one number in each element of 32 bits. */
INLINE vi bf16_bits(vf v)
{
    const vi bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), SPLAT_INT(1));
    const vi rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, SPLAT_INT(0x7fff))), 16);
    const vi nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, SPLAT_INT(0x7fc0), nan);
}

INLINE void store_bf16(void *p, vf v)
{
    const vi bits = bf16_bits(v);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}

/* Eight numbers of 16 bits. LOW_n and HIGH_n interleave the low or high halves of two vectors, as numbers of n bits. */
typedef __m128i v8;
#define LOAD_8(p) _mm_load_si128((const __m128i *)(p))
#define STORE_8(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define LOW_16(a, b) _mm_unpacklo_epi16(a, b)
#define HIGH_16(a, b) _mm_unpackhi_epi16(a, b)
#define LOW_32(a, b) _mm_unpacklo_epi32(a, b)
#define HIGH_32(a, b) _mm_unpackhi_epi32(a, b)
#define LOW_64(a, b) _mm_unpacklo_epi64(a, b)
#define HIGH_64(a, b) _mm_unpackhi_epi64(a, b)

/* The rest of these is for integer_tile.c. */
#define ADD_INT(a, b) _mm256_add_epi32(a, b)
#define HOLD(v) __asm__("" : "+x"(v))
#define SUM_PRODUCTS(a, b) _mm256_madd_epi16((__m256i)(a), (__m256i)(b)) /* of 16 numbers of 16 bits */

/* Sums of neighbouring products of 32 bytes, in 16 bits. Codes with a sign may be -128, x not. */
INLINE vi pairs_of_products(vi codes, const int8_t *x, const int has_sign)
{
    const vi values = LOAD_INT(x);
    return has_sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(values, codes))
                    : _mm256_maddubs_epi16(codes, values);
}

/* Sums of some of the products of 32 bytes each. */
INLINE vi dot(octets codes, const int8_t *x, const int has_sign)
{
    return _mm256_madd_epi16(pairs_of_products((vi)codes, x, has_sign), _mm256_set1_epi16(1));
}

/* The scales of the halves of a part, from those of all of a block's parts. */
typedef vi part_scale;
INLINE part_scale part_scale_of(shorts scales, long part)
{
    const vi both = part < 4 ? _mm256_permute2x128_si256((vi)scales, (vi)scales, 0x00)
                             : _mm256_permute2x128_si256((vi)scales, (vi)scales, 0x11);
    const short a = (short)(0x0100 + part % 4 * 0x0404), b = (short)(a + 0x0202);
    return _mm256_shuffle_epi8(both, (vi)(shorts){a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b});
}

/* sum + the products of 32 bytes each, times the scales of their halves. */
INLINE vi add_scaled_dot(vi sum, octets codes, const int8_t *x, part_scale scale, const int has_sign)
{
    return ADD_INT(sum, _mm256_madd_epi16(pairs_of_products((vi)codes, x, has_sign), scale));
}
#endif

/* The bytes of a table of 16 at 32 places. */
#define PICK_BYTES(table, places)                                                                                              \
    ((octets)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table))), (__m256i)(places)))

static inline uint16_t half_of(float value) { return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

static inline float float_of_half(uint16_t bits) { return _cvtsh_ss(bits); }
