/* The steps between the products of a decoder layer. native.py explains the arguments. */
#pragma once

#include <stdint.h>

void medusa_norm(char *out, const char *x, const char *weight, long rows, long size, long heads, long stride, long head_stride,
                 float eps, float offset, int once, int dtype, int threads);
void medusa_rope(char *q, char *k, const char *cos, const char *sin, long tokens, long q_heads, long k_heads, long head_dim,
                 long size, long q_stride, long k_stride, int dtype, int threads);
void medusa_gate(char *out, const char *gate, const char *up, long rows, long size, long gate_stride, long up_stride, int dtype,
                 int threads);
void medusa_add(char *out, const char *one, const char *other, long count, int dtype, int threads);
void medusa_write_kv(char *keys, char *values, const int64_t *slots, const char *k, const char *v, long tokens, long size,
                     long k_stride, long v_stride);
