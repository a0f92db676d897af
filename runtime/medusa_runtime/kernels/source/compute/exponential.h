/* The constants of exp(x) in fp32, as in Cephes (expf): 2^n times a polynomial of the rest, x - n ln 2. */
#pragma once

#define LOG2_E 1.44269504f
#define LN_2_HIGH 0.693359375f /* ln 2 = LN_2_HIGH - LN_2_LOW; the product of n and the first is exact */
#define LN_2_LOW 2.12194440e-4f
enum { COEFFICIENTS = 6 };
static const float exp_coefficients[COEFFICIENTS] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                                     4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
