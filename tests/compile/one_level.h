// One level of csrc/'s vector code, for a program: the one whose instructions it is compiled with, or of
// vectors as wide as -DFASTPLM_WIDTH says, which the compiler makes of what it has.
#pragma once

#include <type_traits>

#define FASTPLM_LEVEL tested

#if !defined(FASTPLM_WIDTH)
#if defined(__AVX512F__)
#define FASTPLM_WIDTH 16
#elif defined(__AVX2__)
#define FASTPLM_WIDTH 8
#else
#define FASTPLM_WIDTH 4
#endif
#endif

#if FASTPLM_WIDTH == 16 || defined(__aarch64__)
#define FASTPLM_REGISTERS 32
#else
#define FASTPLM_REGISTERS 16
#endif
