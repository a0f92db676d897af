/* The results of products, rounded once. */
#pragma once

#include "linear.h"
#include "simd.h"
#if LANES <= 8
#include "stored.h"
#endif

INLINE void put(void *p, long at, float value, const int dtype)
{
    if (dtype == DTYPE_FP32)
        ((float *)p)[at] = value;
    else
        ((uint16_t *)p)[at] = narrow(value, dtype);
}

/* Write sums [rows][block_cols] as the output of the weight rows [col, col + cols), with the bias and the residual. */
INLINE void put_sums(const struct linear_job *job, const float *sums, long col, long cols, const int dtype)
{
    for (long r = 0; r < job->rows; r++) {
        long c = 0;
#if LANES <= 8
        for (; c + LANES <= cols; c += LANES) {
            const long at = col + c, item = size_of(dtype);
            vf value = LOAD(sums + r * job->block_cols + c);
            if (job->bias)
                value += load((const char *)job->bias + at * item, dtype);
            if (job->residual)
                value = rounded(value, dtype) +
                        load((const char *)job->residual + (r * job->residual_stride + at) * item, dtype);
            store((char *)job->out + (r * job->out_stride + at) * item, value, dtype);
        }
#endif
        for (; c < cols; c++) {
            const long at = r * job->out_stride + col + c;
            put(job->out, at, sums[r * job->block_cols + c] + (job->bias ? element(job->bias, col + c, dtype) : 0.0f), dtype);
            if (job->residual)
                put(job->out, at,
                    element(job->residual, r * job->residual_stride + col + c, dtype) + element(job->out, at, dtype), dtype);
        }
    }
}
