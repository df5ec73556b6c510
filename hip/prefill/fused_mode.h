// Included before all else by sources of prefill_fused: layout.h and walk.h then choose what differs from prefill_scan.
#pragma once

#define PREFILL_FUSED
