// The intrinsics of x86, where there are any: a shared header (see each_level.h).
#pragma once

#include "common/level.h"

#if FASTPLM_HAS_LEVELS
#pragma GCC diagnostic push
// These warnings are false alarms, as GCC's own header leaves values undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
