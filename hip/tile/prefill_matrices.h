// How prepare makes the matrices of a chunk: as many waves as have a lane for each token share the work.
#pragma once

#if defined(__NVPTX__)
#include "prefill_matrices_sm90.h"
#else
#include "prefill_matrices_gfx9.h"
#endif
