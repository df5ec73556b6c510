// Contract of a target for states in f32 that are moved several elements at a time: <target>/state_window.h supplies
//
//   fits_a_window(view)            whether the functions below can move a state; false on a target that has none
//   load_through_window<Keys>(state, from, column, K, V)
//                                  loads the elements of a lane that lie within K and V; its first column is `column`
//   store_through_window<Keys>(state, to, column, K, V)
//                                  stores them
#pragma once

#include "state_view.h"

#if defined(__NVPTX__)
#include "sm90/state_window.h"
#else
#include "gfx9/state_window.h"
#endif
