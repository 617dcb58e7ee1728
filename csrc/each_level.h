// Compiles a file once for each level: FASTPLM_FILE includes itself again from here. What is in
// namespace fastplm::FASTPLM_LEVEL is then there for each, what is inside #if FASTPLM_ONCE a single time.
//
//   #include "tensors.h"            // all headers but those of the level's own code come first
//   #define FASTPLM_FILE "op.cpp"
//   #include "each_level.h"
//   #include "lanes.h"              // code of a level: it has no guard, and FASTPLM_WIDTH floats a vector
//
// A function takes its instructions from where it is written, so nothing that is shared may stand
// where a level's are switched on: the linker would keep the copy of one level for all.
#ifndef FASTPLM_EACH_LEVEL
#define FASTPLM_EACH_LEVEL

#include <type_traits>

#include "level.h"

#if FASTPLM_HAS_LEVELS
#define FASTPLM_ONCE 0

#define FASTPLM_LEVEL avx2
#define FASTPLM_WIDTH 8
#define FASTPLM_REGISTERS 16
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#include FASTPLM_FILE
#pragma GCC pop_options
#undef FASTPLM_LEVEL
#undef FASTPLM_WIDTH
#undef FASTPLM_REGISTERS

#define FASTPLM_LEVEL avx512
#define FASTPLM_WIDTH 16
#define FASTPLM_REGISTERS 32
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#include FASTPLM_FILE
#pragma GCC pop_options
#undef FASTPLM_LEVEL
#undef FASTPLM_WIDTH
#undef FASTPLM_REGISTERS

#undef FASTPLM_ONCE
#endif

#define FASTPLM_ONCE 1
#define FASTPLM_LEVEL baseline
#define FASTPLM_WIDTH 4
#if defined(__aarch64__)
#define FASTPLM_REGISTERS 32
#else
#define FASTPLM_REGISTERS 16
#endif

#endif
