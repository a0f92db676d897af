/* Gathers the strings of a GGUF header, of which a vocabulary has half a million, and splits tokens into others
 * (checkpoint/gguf/packed_strings.py). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { HAS_NUL = -1, CUT_SHORT = -2, LENGTH_BYTES = 8 };

/* Copy `count` strings from `data`, of `size` bytes, to `to`, each with a NUL behind it. They follow each other from byte `at` on,
 * each behind its length (little-endian, like the machines for which this library is built). `to` has room for size - at bytes.
 * Returns the byte behind the last string, or a negative number: one has a NUL in it, or they do not end in `data`. */
long medusa_gather_strings(const uint8_t *data, long at, long size, long count, uint8_t *to)
{
    for (; count > 0; count--) {
        uint64_t length;
        if (size - at < LENGTH_BYTES)
            return CUT_SHORT;
        memcpy(&length, data + at, LENGTH_BYTES);
        at += LENGTH_BYTES;
        if (length > (uint64_t)(size - at))
            return CUT_SHORT;
        if (memchr(data + at, 0, length))
            return HAS_NUL;
        memcpy(to, data + at, length);
        to += length;
        *to++ = 0;
        at += (long)length;
    }
    return at;
}

enum { GIVE_UP = -1, MOST_PROBES = 64, MOST_DIGITS = 24 };
#define FNV_BASIS 0xcbf29ce484222325u

typedef struct {
    const uint8_t *start;
    uint32_t size;
} Token;

static uint64_t hash_on(uint64_t hash, uint8_t byte)
{
    return (hash ^ byte) * 0x100000001b3; /* FNV-1a */
}

static uint32_t slot_of(uint64_t hash, uint32_t mask)
{
    return (uint32_t)((hash ^ hash >> 32) * 0x9e3779b1) & mask;
}

/* Returns whether a token with these bytes and this hash is in the table, which has numbers of tokens plus one. */
static int is_known(const Token *tokens, const uint32_t *table, uint32_t mask, uint64_t hash, const uint8_t *start, uint32_t size)
{
    uint32_t slot = slot_of(hash, mask);
    for (int probe = 0; probe < MOST_PROBES && table[slot]; probe++, slot = (slot + 1) & mask) {
        const Token *token = &tokens[table[slot] - 1];
        if (token->size == size && memcmp(token->start, start, size) == 0)
            return 1;
    }
    return 0;
}

/* Whoever wrote the file may have chosen tokens whose hashes are equal, so a token may be at most MOST_PROBES places off. */
static int fill(const Token *tokens, const uint32_t *numbers, long count, uint32_t *table, uint32_t mask)
{
    for (long at = 0; at < count; at++) {
        const Token *token = &tokens[numbers[at]];
        uint64_t hash = FNV_BASIS;
        for (uint32_t byte = 0; byte < token->size; byte++)
            hash = hash_on(hash, token->start[byte]);
        uint32_t slot = slot_of(hash, mask);
        for (int probe = 0; table[slot]; slot = (slot + 1) & mask)
            if (++probe == MOST_PROBES)
                return 0;
        table[slot] = numbers[at] + 1;
    }
    return 1;
}

/* Writes "left right" and a NUL for each way in which `token` is two others. Returns the end, or NULL if `end` is too near. */
static uint8_t *split(const Token *tokens, const Token *token, const uint32_t *table, uint32_t mask, uint8_t *to, const uint8_t *end)
{
    uint64_t left = FNV_BASIS;
    for (uint32_t cut = 1; cut < token->size; cut++) {
        const uint8_t *right = token->start + cut;
        left = hash_on(left, right[-1]);
        if ((*right & 0xC0) == 0x80) /* inside of a character */
            continue;
        uint64_t hash = FNV_BASIS;
        for (uint32_t byte = cut; byte < token->size; byte++)
            hash = hash_on(hash, token->start[byte]);
        if (!is_known(tokens, table, mask, hash, right, token->size - cut) || !is_known(tokens, table, mask, left, token->start, cut))
            continue;
        if (end - to < (long)token->size + 2)
            return NULL;
        memcpy(to, token->start, cut);
        to[cut] = ' ';
        memcpy(to + cut + 1, right, token->size - cut);
        to += token->size + 1;
        *to++ = 0;
    }
    return to;
}

/* Splits tokens as packed_strings.py says: those with these `numbers` of `packed`, which has `size` bytes in UTF-8 and a NUL
 * behind each token. Returns how many of the `capacity` bytes at `to` it has written, or GIVE_UP. */
long medusa_split_tokens(const uint8_t *packed, long size, const uint32_t *numbers, long count, uint8_t *to, long capacity)
{
    long all = 0, result = GIVE_UP;
    for (const uint8_t *at = packed; at < packed + size; at = (const uint8_t *)memchr(at, 0, packed + size - at) + 1)
        all++;
    uint32_t slots = 64;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    Token *tokens = malloc((all + 1) * sizeof *tokens);
    uint32_t *table = calloc(slots, sizeof *table);
    if (tokens && table) {
        const uint8_t *at = packed;
        for (long number = 0; number < all; number++) {
            const uint8_t *stop = memchr(at, 0, packed + size - at);
            tokens[number] = (Token){at, (uint32_t)(stop - at)};
            at = stop + 1;
        }
        uint8_t *written = fill(tokens, numbers, count, table, slots - 1) ? to : NULL;
        for (long each = 0; each < count && written; each++)
            written = split(tokens, &tokens[numbers[each]], table, slots - 1, written, to + capacity);
        result = written ? written - to : GIVE_UP;
    }
    free(tokens);
    free(table);
    return result;
}

static uint8_t *write_number(uint8_t *to, long number)
{
    uint8_t digits[20];
    int count = 0;
    do
        digits[count++] = (uint8_t)('0' + number % 10);
    while ((number /= 10));
    while (count)
        *to++ = digits[--count];
    return to;
}

/* Writes the strings of `packed`, as above, as an object of JSON whose values are their numbers, without those for which `left_out`
 * has another value than 0. Returns how many of the `capacity` bytes at `to` it has written, or GIVE_UP. */
long medusa_numbered_as_json(const uint8_t *packed, long size, const uint8_t *left_out, uint8_t *to, long capacity)
{
    static const char hex[] = "0123456789abcdef";
    const uint8_t *stop = packed + size, *begin = to;
    *to++ = '{';
    for (long number = 0; packed < stop; number++) {
        if (capacity - (to - begin) < 6 * (long)strlen((const char *)packed) + MOST_DIGITS)
            return GIVE_UP;
        if (left_out[number]) {
            packed = (const uint8_t *)memchr(packed, 0, stop - packed) + 1;
            continue;
        }
        if (to - begin > 1)
            *to++ = ',';
        *to++ = '"';
        for (; *packed; packed++) {
            if (*packed < 0x20) {
                memcpy(to, "\\u00", 4);
                to[4] = (uint8_t)hex[*packed >> 4];
                to[5] = (uint8_t)hex[*packed & 15];
                to += 6;
                continue;
            }
            if (*packed == '"' || *packed == '\\')
                *to++ = '\\';
            *to++ = *packed;
        }
        packed++;
        *to++ = '"';
        *to++ = ':';
        to = write_number(to, number);
    }
    *to++ = '}';
    return to - begin;
}
