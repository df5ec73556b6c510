// Contract of a target for states in f32 that are moved several elements at a time: <target>/state_window.h supplies
//
//   fits_a_window(view)            whether the functions below can move the state of `view`; false where none is moved
//   so load_through_window<Keys>(state, from, column, K, V) store_through_window<Keys>(state, to, column, K, V)
//                                  move the elements of a lane, whose first column is `column`, and which lie within K
//                                  and V
#pragma once

#include "state_view.h"

#if defined(__NVPTX__)
#include "sm90/state_window.h"
#else
#include "gfx9/state_window.h"
#endif
