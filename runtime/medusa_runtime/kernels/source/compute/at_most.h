/* The smaller of two numbers, for the last piece of work that is cut into pieces. */
#pragma once

static inline long at_most(long value, long limit) { return value < limit ? value : limit; }
