// Contract of a target for prefill_prepare. <target>/prepare.h supplies
//
//   prepare_residency                         residency for KERNEL
//   Shared<T>                                 shared memory of a workgroup
//   prepare_chunk<T>(x, unit, shared)         one chunk of a key head, for a run of its value heads
//
// made of <target>/matrices.h
//
//   ChunkRows(q, k, .., rows, columns, memory)
//                                             operands of a chunk's rows of Q and K; ChunkRows::Memory is shared
//   Products<T>.multiply(rows, K, norm)       K K^T, Q K^T and, for norms, Q Q^T
//              .normalise(factors)            scales them by 1 / |k| and 1 / |q|
//              .key_squares(factors)          |k|^2 alone
//   ChunkSolver<T>(products, memory)          ChunkSolver::Memory is shared, overlaying ChunkRows::Memory
//              .write_t_and_p(factors, writer, diagonal)
//                                             T = (I - A)^-1 and P of one value head to its record
//
// and <target>/record.h
//
//   row_position(row)                         position of a row within a factor of the record (record.h)
//   RecordWriter<T>(record).put_t .put_p      writes blocks of T and P in the order in which the walk reads them
#pragma once

#if defined(__NVPTX__)
#include "sm90/prepare.h"
#else
#include "gfx9/prepare.h"
#endif
