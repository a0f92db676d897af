/* The blocks of ggml, each with its scales: an integer of 8 bits times a scale, in some formats less a minimum, in fp32.
 *
 * No product of scales and integers has more bits than fp32, so all ways of computing it have the same result. The structs of
 * ggml-common.h define where the parts of a block lie. A block may lie at any address. */
#pragma once

#include "codes.h"
#include "simd.h"

#define EACH_BLOCK_FORMAT(f)                                                                                                   \
    f(Q4_0) f(Q4_1) f(Q5_0) f(Q5_1) f(Q8_0) f(Q2_K) f(Q3_K) f(Q4_K) f(Q5_K) f(Q6_K) f(IQ4_NL) f(IQ4_XS) f(MXFP4)

enum { PART = 32, MOST_GROUPS = 16 }; /* values that are unpacked at a time, and groups of a block */

/* Values of a block. */
INLINE long block_values(const int packing) { return HAS_MANY(packing) ? 256 : 32; }

INLINE long block_bytes(const int packing)
{
    static const uint8_t sizes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24,   [Q8_0] = 34,   [Q2_K] = 84, [Q3_K] = 110,
                                    [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210, [IQ4_NL] = 18, [IQ4_XS] = 136, [MXFP4] = 17};
    return sizes[packing];
}

/* Values of a block that share a scale. */
INLINE long group_values(const int packing) { return packing == Q2_K || packing == Q3_K || packing == Q6_K ? 16 : 32; }

/* Whether a minimum is taken off. */
INLINE int has_minimum(const int packing)
{
    return packing == Q4_1 || packing == Q5_1 || packing == Q2_K || packing == Q4_K || packing == Q5_K;
}

INLINE float half_at(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return float_of_half(bits);
}

#define EVERY(byte) (0x0101010101010101u * (byte))
#define EVERY_OF_4(byte) (0x01010101u * (byte))

/* Write small integers times a factor. Whole vectors are read and written. */
INLINE void scaled(const int8_t *integers, long count, float factor, float *restrict to)
{
    for (long i = 0; i < count; i += LANES)
        STORE(to + i, MUL(TO_FLOAT(WIDEN_SIGNED(integers + i)), SPLAT(factor)));
}

/* Read the numbers of the groups of a block that HAS_MANY. A scale is its integer times block_factor. A minimum is its integer
 * times low_factor. There is room for MOST_GROUPS integers. */
INLINE void group_integers(const uint8_t *block, int8_t *restrict scale, int8_t *restrict low, const int packing)
{
    uint32_t words[4];
    uint64_t pair[2];
    switch (packing) {
    case Q4_K:
    case Q5_K:
        memcpy(words, block + 4, 12);
        pair[0] = (words[0] & EVERY_OF_4(63)) |
                  (uint64_t)((words[2] & EVERY_OF_4(15)) | (words[0] >> 2 & EVERY_OF_4(48))) << 32;
        pair[1] = (words[1] & EVERY_OF_4(63)) |
                  (uint64_t)((words[2] >> 4 & EVERY_OF_4(15)) | (words[1] >> 2 & EVERY_OF_4(48))) << 32;
        memcpy(scale, pair, 8);
        memcpy(low, pair + 1, 8);
        return;
    case Q2_K:
        for (int i = 0; i < 16; i += 8) {
            memcpy(pair, block + i, 8);
            pair[1] = pair[0] >> 4 & EVERY(15);
            pair[0] &= EVERY(15);
            memcpy(scale + i, pair, 8);
            memcpy(low + i, pair + 1, 8);
        }
        return;
    case Q3_K: /* four bits of each scale, then the two above them */
        memcpy(pair, block + 96, 8);
        memcpy(words, block + 104, 4);
        words[1] = words[0] >> 2;
        pair[1] = (pair[0] >> 4 & EVERY(15)) | ((words[0] >> 4 | (uint64_t)(words[1] >> 4) << 32) & EVERY(3)) << 4;
        pair[0] = (pair[0] & EVERY(15)) | ((words[0] | (uint64_t)words[1] << 32) & EVERY(3)) << 4;
        memcpy(scale, pair, 16);
        for (int i = 0; i < 16; i++)
            scale[i] -= 32;
        return;
    case IQ4_XS:
        memcpy(words, block + 4, 4);
        pair[0] = (words[0] | (uint64_t)words[0] << 16) & 0x0000ffff0000ffff;
        pair[0] = (pair[0] | pair[0] << 8) & 0x00ff00ff00ff00ff;
        pair[0] = (pair[0] | pair[0] << 4) & EVERY(15);
        pair[1] = block[2] | (uint64_t)block[3] << 32;
        pair[1] = (pair[1] | pair[1] << 12) & 0x000f000f000f000f;
        pair[1] = (pair[1] | pair[1] << 6) & EVERY(3);
        pair[0] = ((pair[0] | pair[1] << 4 | EVERY(128)) - EVERY(32)) ^ EVERY(128); /* each byte less 32 */
        memcpy(scale, pair, 8);
        return;
    default: memcpy(scale, block + 192, 16); /* Q6_K */
    }
}

/* The factor of a block's scales: where there are no others, the scale. */
INLINE float block_factor(const uint8_t *block, const int packing)
{
    uint32_t bits;
    float power;
    switch (packing) {
    case MXFP4:
        bits = block[0] < 2 ? 0x00200000u << block[0] : (uint32_t)(block[0] - 1) << 23; /* half of the power of two */
        memcpy(&power, &bits, sizeof power);
        return power;
    case Q2_K: return half_at(block + 80);
    case Q3_K: return half_at(block + 108);
    case Q6_K: return half_at(block + 208);
    default: return half_at(block);
    }
}

/* The factor of a block's minima, with its sign changed, so that products with them are added. */
INLINE float low_factor(const uint8_t *block, const int packing)
{
    return packing == Q4_1 || packing == Q5_1 ? half_at(block + 2) : -half_at(block + (packing == Q2_K ? 82 : 2));
}

/* Read the scales of a block's groups, and what is added to their products: the minimum with its sign changed. There is room for
 * MOST_GROUPS numbers. */
INLINE void block_numbers(const uint8_t *block, float *restrict scale, float *restrict low, const int packing)
{
    int8_t small[2][MOST_GROUPS] = {{0}};
    if (!HAS_MANY(packing)) {
        scale[0] = block_factor(block, packing);
        if (has_minimum(packing))
            low[0] = low_factor(block, packing);
        return;
    }
    group_integers(block, small[0], small[1], packing);
    scaled(small[0], 256 / group_values(packing), block_factor(block, packing), scale);
    if (has_minimum(packing))
        scaled(small[1], 256 / group_values(packing), low_factor(block, packing), low);
}

INLINE octets octets_at(const uint8_t *p)
{
    octets found;
    memcpy(&found, p, sizeof found);
    return found;
}

/* The low halves of 16 bytes, and behind them the high ones. */
INLINE octets halves_at(const uint8_t *p)
{
    uint64_t pair[2];
    memcpy(pair, p, sizeof pair);
    const octets twice = {pair[0], pair[1], pair[0], pair[1]};
    return twice >> (octets){0, 0, 4, 4} & EVERY(15);
}

/* The fifth bit of each value: 16 in each byte whose bit is set. 16 bytes are read. */
INLINE octets fifth_bits(const uint8_t *p)
{
    const octets spread = PICK_BYTES((const int8_t *)p, ((octets){EVERY(0), EVERY(1), EVERY(2), EVERY(3)}));
    const integers is_set = (integers)(spread & 0x8040201008040201u) != 0;
    return (octets)is_set & EVERY(16);
}

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* twice those of E2M1 */

/* What is taken off the codes of a format, so that they become its integers. */
INLINE int code_offset(const int packing)
{
    return packing == Q4_0 ? 8 : packing == Q5_0 ? 16 : packing == Q3_K ? 4 : packing == Q6_K ? 32 : 0;
}

/* The codes of one of a block's parts: bytes below 64, but signed ones where HAS_SIGNED. */
INLINE octets part_codes(const uint8_t *block, long part, const int packing)
{
    octets found;
    switch (packing) {
    case Q4_0: return halves_at(block + 2);
    case Q4_1: return halves_at(block + 4);
    case Q5_0: return halves_at(block + 6) | fifth_bits(block + 2);
    case Q5_1: return halves_at(block + 8) | fifth_bits(block + 4);
    case Q2_K: return octets_at(block + 16 + part / 4 * 32) >> part % 4 * 2 & EVERY(3);
    case Q3_K:
        found = octets_at(block + 32 + part / 4 * 32) >> part % 4 * 2 & EVERY(3);
        return found | (octets_at(block) >> part & EVERY(1)) << 2;
    case Q4_K: return octets_at(block + 16 + part / 2 * 32) >> part % 2 * 4 & EVERY(15);
    case Q5_K:
        found = octets_at(block + 48 + part / 2 * 32) >> part % 2 * 4 & EVERY(15);
        return found | (octets_at(block + 16) >> part & EVERY(1)) << 4;
    case Q6_K:
        found = octets_at(block + part / 4 * 64 + part % 2 * 32) >> part % 4 / 2 * 4 & EVERY(15);
        return found | (octets_at(block + 128 + part / 4 * 32) >> part % 4 * 2 & EVERY(3)) << 4;
    case IQ4_NL: return PICK_BYTES(iq4_values, halves_at(block + 2));
    case IQ4_XS: return PICK_BYTES(iq4_values, halves_at(block + 8 + part * 16));
    case MXFP4: return PICK_BYTES(mxfp4_values, halves_at(block + 1));
    default: return octets_at(block + 2); /* Q8_0 */
    }
}

/* Unpack one of a block's parts to integers. */
INLINE void unpack_part(const uint8_t *block, long part, int8_t *to, const int packing)
{
    const integers found = (integers)part_codes(block, part, packing) - (int8_t)code_offset(packing);
    memcpy(to, &found, sizeof found);
}

/* The floats of LANES integers. */
INLINE vf part_floats(const int8_t *integers, vf scale, vf low, const int packing)
{
    const vf value = TO_FLOAT(WIDEN_SIGNED(integers));
    return has_minimum(packing) ? FMA(value, scale, low) : MUL(value, scale);
}

/* Write the floats of whole blocks, in fp32, or in bf16 where DOT_BF16 is. */
INLINE void decode_format(const uint8_t *block, long count, void *restrict out, const int packing, const int dtype)
{
    const long parts = block_values(packing) / PART, wide = group_values(packing);
    int8_t values[PART] __attribute__((aligned(PART)));
    float scale[MOST_GROUPS], low[MOST_GROUPS];
    for (long done = 0; done < count; block += block_bytes(packing)) {
        block_numbers(block, scale, low, packing);
        for (long part = 0; part < parts; part++, done += PART) {
            unpack_part(block, part, values, packing);
#pragma GCC unroll 8
            for (int i = 0; i < PART; i += STEP) {
                vf floats[2];
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const long at = i + half * LANES, group = (part * PART + at) / wide;
                    const vf added = has_minimum(packing) ? SPLAT(low[group]) : ZERO();
                    floats[half] = part_floats(values + at, SPLAT(scale[group]), added, packing);
                }
#ifdef DOT_BF16
                if (dtype == DTYPE_BF16) {
                    STORE_INT((uint16_t *)out + done + i, TO_BF16(floats[0], floats[1]));
                    continue;
                }
#endif
                (void)dtype;
                STORE((float *)out + done + i, floats[0]);
                STORE((float *)out + done + i + LANES, floats[1]);
            }
        }
    }
}

#define DECODE_CASE(packing)                                                                                                   \
    case packing: decode_format(block, count, out, packing, dtype); break;

/* The same for a format that is known only now. */
static __attribute__((noinline)) void decode_blocks(const uint8_t *block, long count, void *restrict out, int packing,
                                                    const int dtype)
{
    switch (packing) { EACH_BLOCK_FORMAT(DECODE_CASE) }
}
