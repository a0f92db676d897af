/* Layers that keep a state of a fixed size of each sequence, in place of keys and values. native.py explains the arguments. */
#pragma once

#include <stdint.h>

enum { MAX_TAPS = 16 };

/* The tokens of a step, sequence by sequence. */
struct steps {
    const int64_t *slots;  /* [count]: where a sequence's state is */
    const int64_t *begins; /* [count]: how many of its tokens came before; with 0 the state is taken for zeros */
    const int64_t *starts; /* [count + 1]: its first row among the step's tokens */
    long count;
};

struct convolution {
    char *out; /* [tokens][channels], contiguous */
    const char *x, *weight, *bias; /* [tokens][channels], [channels][taps], and [channels] or null */
    char *states; /* [slots][taps - 1][channels]: the last inputs, the oldest first */
    long stride;  /* bytes from token to token of x */
    long channels, taps;
    struct steps steps;
};

struct recurrence {
    float *out;            /* [tokens][heads][value_dim] */
    const float *q, *k;    /* [tokens][key_heads][key_dim] */
    const float *v;        /* [tokens][heads][value_dim] */
    const float *decay;    /* [tokens][heads] */
    const float *rate;     /* [tokens][heads], or null */
    float *states;         /* [slots][heads][key_dim][value_dim] */
    long heads, key_heads, key_dim, value_dim;
    struct steps steps;
};

void medusa_convolve(const struct convolution *c, int dtype, int threads);
void medusa_recur(const struct recurrence *r, int threads);
