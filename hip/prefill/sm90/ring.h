// The ring of this kernel on sm_90a: Stage, the places of a chunk's parts, and RingReader.
#pragma once

#ifdef PREFILL_FUSED
#include "fused_ring.h"
#else
#include "scan_ring.h"
#endif
