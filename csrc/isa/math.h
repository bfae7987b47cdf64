// exp and tanh on vectors, within 2 units in the last place.
#pragma once

#include "simd.h"

namespace pagemill { namespace {

struct Exponent {
    F n, scaled;  // exp(x) = 2^n * scaled
};

// x = n ln 2 + r with |r| <= ln(2) / 2, n whole, found by adding 1.5 * 2^23; exp(r) = 1 + r + r^2 Q(r), Q fitted by
// least squares (relative error below 6e-9).
INLINE Exponent reduce(F x) {
    const F magic = broadcast(12582912.0f);
    const F n = fma(x, broadcast(1.44269504f), magic) - magic;
    F r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(0.001394385239f);
    p = fma(p, r, broadcast(0.008368035778f));
    p = fma(p, r, broadcast(0.041666306555f));
    p = fma(p, r, broadcast(0.166665285826f));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return {n, p};
}

// Below -86.6 the result is 0, above 88.72 infinite; NaN stays NaN, for max and min return the second operand then.
INLINE F exp(F x) {
    const Exponent e = reduce(min(broadcast(89.0f), max(broadcast(-87.0f), x)));
    F y = e.scaled * half_power_of_two(min(e.n, broadcast(128.0f))) * broadcast(2.0f);
    y = select_less(x, broadcast(-86.6f), zero(), y);
    return select_less(broadcast(88.72284f), x, broadcast(kInf), y);
}

// The same for x <= 0, as softmax has them.
INLINE F exp_nonpositive(F x) {
    const Exponent e = reduce(max(broadcast(-86.6f), x));
    const F scale = half_power_of_two(e.n);
    return select_less(x, broadcast(-86.6f), zero(), e.scaled * (scale + scale));
}

// |x| < 0.625: x + x^3 P(x^2), P fitted at Chebyshev points (error below 1e-9); else (1 - e) / (1 + e) with e =
// exp(-2|x|).
INLINE F tanh(F x) {
    const F a = abs(x), z = x * x;
    F p = broadcast(0.0022958405f);
    p = fma(p, z, broadcast(-0.00834697951f));
    p = fma(p, z, broadcast(0.0217699613f));
    p = fma(p, z, broadcast(-0.0539594069f));
    p = fma(p, z, broadcast(0.133333042f));
    p = fma(p, z, broadcast(-0.333333343f));
    const F small = fma(x * z, p, x);
    const F e = exp(a * broadcast(-2.0f));
    const F large = with_sign_of((broadcast(1.0f) - e) / (broadcast(1.0f) + e), x);
    return select_less(a, broadcast(0.625f), small, large);
}

// silu(g) = g / (1 + exp(-g)). The tanh form of GELU is g / (1 + exp(-2u)) with u = sqrt(2/pi) (g + 0.044715 g^3),
// because 1 + tanh(u) = 2 / (1 + exp(-2u)).
template <Activation A> INLINE F activate(F g) {
    F e = zero() - g;
    if (A == Activation::gelu_tanh) {
        const F cube = g * g * g;
        e = fma(cube, broadcast(0.044715f), g) * broadcast(-1.5957691216f);
    }
    return g / (broadcast(1.0f) + exp(e));
}

}}  // namespace pagemill
