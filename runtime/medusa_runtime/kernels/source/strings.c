/* Gathers the strings of a GGUF header (checkpoint/gguf/header.py), of which a vocabulary has half a million. */
#include <stdint.h>
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
