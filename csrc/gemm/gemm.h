// All products of linear layers. Included once a level, after vectors.h and lanes.h.

#include "gemm/linear.h"
#include "gemm/linear_few_rows.h"
#include "gemm/linear_in_place.h"
#include "gemm/linear_int8.h"
#include "gemm/linear_product.h"
