// One level of csrc/'s vector code, for a program: the level whose instructions the program is
// compiled with, or one with vectors of -DFASTPLM_WIDTH floats, which the compiler splits if it
// must.
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

#if defined(__F16C__) && !defined(__clang__)
#define FASTPLM_F16C 1
#endif
