/* The vectors of simd.h on aarch64: NEON, which every such CPU has, with its dot products of bf16 where the object is compiled
 * for them. */
#pragma once

#include <arm_neon.h>

#define LANES 4
typedef float32x4_t vf;
typedef uint32x4_t vi;
#define SHIFT_LEFT_16(v) vshlq_n_u32(v, 16)
#define AND(a, b) vandq_u32(a, b)
#define SPLAT_INT(i) vdupq_n_u32((uint32_t)(i))
#define HIGH_HALVES(v) AND(v, SPLAT_INT(0xffff0000u))
#define AS_FLOAT(v) vreinterpretq_f32_u32(v)
#define LOAD_INT(p) vreinterpretq_u32_u16(vld1q_u16((const uint16_t *)(p)))
#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32(p, v)
#define SPLAT(f) vdupq_n_f32(f)
#define ZERO() vdupq_n_f32(0.0f)
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define LOAD_4(p) vld1_u16((const uint16_t *)(p))
#define WIDEN_HALF(p) vcvt_f32_f16(vreinterpret_f16_u16(LOAD_4(p)))
#define SUM(v) vaddvq_f32(v)
#define STORE_SUMS(p, a, b, c, d) vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)))
#define MAX(a, b) vmaxq_f32(a, b)
#define HIGHEST(v) vmaxvq_f32(v)
#define MUL(a, b) vmulq_f32(a, b)
#define SUB(a, b) vsubq_f32(a, b)
#define OR(a, b) vorrq_u32(a, b)
#define SHIFT_LEFT(v, bits) vshlq_n_u32(v, bits)
#define TO_FLOAT(v) vcvtq_f32_s32(vreinterpretq_s32_u32(v))
static inline uint8x8_t four_bytes(const void *p)
{
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return vreinterpret_u8_u32(vdup_n_u32(word));
}
#define WIDEN_UNSIGNED(p) vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p))))
#define WIDEN_SIGNED(p) vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))))
/* LANES nibbles, with others above them. */
static inline vi nibbles(const void *p)
{
    static const int32_t shifts[] = {0, -4, -8, -12};
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return vshlq_u32(vdupq_n_u32(half), vld1q_s32(shifts));
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define DOT_BF16(sum, a, b) vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b))
#define TO_BF16(low, high) vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high))
#define STORE_INT(p, v) vst1q_u16((uint16_t *)(p), vreinterpretq_u16_u32(v))
#endif

#define WIDEN_BF16(p) AS_FLOAT(vshll_n_u16(LOAD_4(p), 16))
#define NARROW_HALF(v) vcvt_f16_f32(v)
#define STORE_HALF(p, v) vst1_u16((uint16_t *)(p), vreinterpret_u16_f16(NARROW_HALF(v)))
#define ROUND_TO_HALF(v) vcvt_f32_f16(NARROW_HALF(v))
#define CLAMP(v, low, high) vminq_f32(vmaxq_f32(v, SPLAT(low)), SPLAT(high))
#define ROUND(v) vrndnq_f32(v)
/* 2 to the power of v, whose elements must be whole numbers. */
#define POWER_OF_TWO(v) vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(v), vdupq_n_s32(127)), 23))

/* v rounded to bf16, one number in each element of 32 bits. */
INLINE vi bf16_bits(vf v)
{
    const vi bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), SPLAT_INT(1));
    const vi rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, SPLAT_INT(0x7fff))), 16);
    return vbslq_u32(vceqq_f32(v, v), rounded, SPLAT_INT(0x7fc0));
}

INLINE void store_bf16(void *p, vf v) { vst1_u16(p, vmovn_u32(bf16_bits(v))); }

/* Eight numbers of 16 bits. LOW_n and HIGH_n interleave the low or high halves of two vectors, as numbers of n bits. */
typedef uint16x8_t v8;
#define LOAD_8(p) vld1q_u16(p)
#define STORE_8(p, v) vst1q_u16(p, v)
#define AS_32(v) vreinterpretq_u32_u16(v)
#define AS_64(v) vreinterpretq_u64_u16(v)
#define LOW_16(a, b) vzip1q_u16(a, b)
#define HIGH_16(a, b) vzip2q_u16(a, b)
#define LOW_32(a, b) vreinterpretq_u16_u32(vzip1q_u32(AS_32(a), AS_32(b)))
#define HIGH_32(a, b) vreinterpretq_u16_u32(vzip2q_u32(AS_32(a), AS_32(b)))
#define LOW_64(a, b) vreinterpretq_u16_u64(vzip1q_u64(AS_64(a), AS_64(b)))
#define HIGH_64(a, b) vreinterpretq_u16_u64(vzip2q_u64(AS_64(a), AS_64(b)))

/* The rest is for integer_tile.c. */
#define AS_INT(v) vreinterpretq_u32_s32(v)
#define AS_SIGNED(v) vreinterpretq_s32_u32(v)
#define ADD_INT(a, b) vaddq_u32(a, b)
#define HOLD(v) __asm__("" : "+w"(v))

/* 16 numbers of 16 bits. */
INLINE vi SUM_PRODUCTS(shorts a, shorts b)
{
    int16x8_t one[2], other[2];
    memcpy(one, &a, sizeof one);
    memcpy(other, &b, sizeof other);
    int32x4_t sum = vmull_s16(vget_low_s16(one[0]), vget_low_s16(other[0]));
    sum = vmlal_high_s16(sum, one[0], other[0]);
    sum = vmlal_s16(sum, vget_low_s16(one[1]), vget_low_s16(other[1]));
    return AS_INT(vmlal_high_s16(sum, one[1], other[1]));
}

/* sum + some of the products of 16 bytes each. Those of x are not -128. */
INLINE int32x4_t add_products(int32x4_t sum, int8x16_t codes, int8x16_t x)
{
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, codes, x);
#else
    return vpadalq_s16(sum, vmlal_high_s8(vmull_s8(vget_low_s8(codes), vget_low_s8(x)), codes, x));
#endif
}

/* Sums of some of the products of 32 bytes each. Without AVX2's instructions, signs do not matter. */
INLINE vi dot(octets codes, const int8_t *x, const int has_sign)
{
    int8x16_t pair[2];
    memcpy(pair, &codes, sizeof pair);
    (void)has_sign;
    return AS_INT(add_products(add_products(vdupq_n_s32(0), pair[0], vld1q_s8(x)), pair[1], vld1q_s8(x + 16)));
}

/* The scales of the halves of a part, from those of all of a block's parts. */
typedef struct {
    int32_t low, high;
} part_scale;
INLINE part_scale part_scale_of(shorts scales, long part)
{
    return (part_scale){scales[2 * part], scales[2 * part + 1]};
}

/* sum + the products of 32 bytes each, times the scales of their halves. */
INLINE vi add_scaled_dot(vi sum, octets codes, const int8_t *x, part_scale scale, const int has_sign)
{
    int8x16_t pair[2];
    memcpy(pair, &codes, sizeof pair);
    (void)has_sign;
    const int32x4_t low = add_products(vdupq_n_s32(0), pair[0], vld1q_s8(x));
    const int32x4_t high = add_products(vdupq_n_s32(0), pair[1], vld1q_s8(x + 16));
    return AS_INT(vmlaq_n_s32(vmlaq_n_s32(AS_SIGNED(sum), low, scale.low), high, scale.high));
}

/* The bytes of a table of 16 at 32 places. */
#define PICK_BYTES(table, places)                                                                                              \
    ({                                                                                                                         \
        octets picked_ = (places);                                                                                             \
        for (int half_ = 0; half_ < 2; half_++)                                                                                \
            vst1q_s8((int8_t *)&picked_ + half_ * 16,                                                                          \
                     vqtbl1q_s8(vld1q_s8(table), vld1q_u8((const uint8_t *)&picked_ + half_ * 16)));                           \
        picked_;                                                                                                               \
    })

static inline uint16_t half_of(float value)
{
    const __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t bits)
{
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
}
