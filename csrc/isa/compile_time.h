// Types and numbers that are known when a kernel is compiled.
#pragma once

namespace pagemill {
namespace {

template <class T> struct PointeeOf;
template <class T> struct PointeeOf<T*> { using type = T; };
template <class T> using Pointee = typename PointeeOf<T>::type;
template <int... I> struct Sequence {};
template <int N, int... I> struct UptoOf : UptoOf<N - 1, N - 1, I...> {};
template <int... I> struct UptoOf<0, I...> { using type = Sequence<I...>; };
template <int N> using Upto = typename UptoOf<N>::type;  // Sequence<0, ..., N - 1>

// body(Count<n>) for n of 1 .. N, with Upto<N>.
template <int N> struct Count { static constexpr int value = N; };
template <int... I, class Body> inline __attribute__((always_inline)) void with_count(int n, Sequence<I...>,
                                                                                      Body&& body) {
    ((n == I + 1 ? body(Count<I + 1>{}) : void()), ...);
}

}  // namespace
}  // namespace pagemill
