// The arch trait of the target that is being compiled for.
#pragma once

#if defined(__NVPTX__)
#include "sm90.h"
#else
#include "gfx9.h"
#endif
