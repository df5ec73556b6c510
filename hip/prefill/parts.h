// M and S as sums of two bf16 numbers, high and low, accurate to 2^-17. prefill_summarise stores M this way;
// prefill_combine reads M and passes S from wave to wave this way. <target>/parts.h supplies
//
//   store_high_low<Keys>(m, to, column, K)
//                                  stores M to a summary, as high and low numbers
//   store_high_low(to, row, column, K, x)
//                                  stores an element of M likewise
#pragma once

#if defined(__NVPTX__)
#include "sm90/parts.h"
#else
#include "gfx9/parts.h"
#endif
