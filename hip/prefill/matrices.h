// The contract of a target for prefill_prepare. <target>/matrices.h supplies
//
//   prepare_residency                         for KERNEL
//   row_place(row)                            place of a row within a factor of the record (record.h)
//   RecordWriter<T>(record).put_t .put_p      writes blocks of T and P to a record, in the order in which the walk
//   reads them ChunkRows(q, k, .., rows, columns, memory)
//                                             operands of a chunk's rows of Q and K; ChunkRows::Memory is shared
//   Products<T>.multiply(rows, K, norm)       K K^T, Q K^T and, for norms, Q Q^T
//              .normalise(factors)            scales them by 1 / |k| and 1 / |q|
//              .key_squares(factors)          |k|^2 alone
//   ChunkSolver<T>(products, memory)          ChunkSolver::Memory is shared, in the place of ChunkRows::Memory
//              .write_t_and_p(factors, writer, diagonal)
//                                             T = (I - A)^-1 and P of one value head to its record
// and <target>/gates.h
//   GateLoader                                the gates of one value head after the other (gates.h)
#pragma once

#if defined(__NVPTX__)
#include "sm90/gates.h"
#include "sm90/matrices.h"
#else
#include "gfx9/gates.h"
#include "gfx9/matrices.h"
#endif
