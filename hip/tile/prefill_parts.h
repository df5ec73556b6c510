// M and S as sums of two bf16 numbers each, accurate to 2^-17: how prefill_summarise leaves M, and how prefill_combine
// reads it and passes S from wave to wave.
#pragma once

#include "prefill_step.h"

#if defined(__NVPTX__)
#include "prefill_parts_sm90.h"
#else
#include "prefill_parts_gfx9.h"
#endif
