// Descriptions of q, k, v and states (../walk.h): the host gives none on CDNA.
#pragma once

namespace prefill {

struct Maps {};

} // namespace prefill

#define MAPS_PARAMETER
#define MAPS_OF(kernel)                                                                                                \
    prefill::Maps {}
