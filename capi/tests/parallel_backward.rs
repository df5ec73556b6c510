//! The backward of a prefill that ranks share, through the C interface: the stages with a copy between them, one call with a
//! communicator, sizes, and refusals. Gradients have one rank's bits.

#[path = "../../tests/fake_collectives/mod.rs"]
mod fake_collectives;

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::thread;

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_OK, dw_communicator, dw_context, dw_lengths, dw_parallel_prefill,
    dw_parallel_prefill_backward, dw_parallel_prefill_backward_sizes, dw_parallel_prefill_sizes,
    dw_prefill_backward_tensors, dw_prefill_spec, dw_rank_layout, dw_tensor,
};
use deltawave_c::*;

const HK: usize = 1;
const HV: usize = 2;
const K: usize = 16;
const V: usize = 32;
/// Tokens of the sequences, in blocks of 64: the first is shared, the second is not.
const LENGTHS: [i64; 2] = [330, 50];
const TOKENS: usize = 380;
const STATE: usize = HV * K * V;

fn last_error() -> String {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    text.to_str().expect("UTF-8").to_owned()
}

#[track_caller]
fn fine(status: c_int) {
    assert_eq!(status, DW_OK as c_int, "{}", last_error());
}

#[track_caller]
fn refused(status: c_int, wanted: &str) {
    let text = last_error();
    assert_eq!(status, DW_ERROR_ARGUMENT as c_int, "{text}");
    assert!(text.starts_with(wanted), "wanted `{wanted}`, was `{text}`");
}

fn simulator() -> *mut dw_context {
    let mut context = null_mut();
    // SAFETY: the pointer is valid.
    fine(unsafe { dw_context_create(abi::DW_BACKEND_SIMULATOR as c_int, 0, &mut context) });
    context
}

/// Numbers between -1 and 1: `n` of them, those of `seed`.
fn numbers(seed: u32, n: usize) -> impl Iterator<Item = f32> {
    let mut state = seed;
    (0..n).map(move |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    })
}

fn bf16(x: f32) -> [u8; 2] {
    (((x.to_bits() + 0x8000) >> 16) as u16).to_le_bytes()
}

/// Bytes of the rows of all sequences: q, k, v, dO in bf16, g and beta in f32; then states and gradients of states in f32.
fn inputs() -> [Vec<u8>; 8] {
    let rows = |seed, width| {
        let each = numbers(seed, TOKENS * width).map(|x| bf16(0.3 * x));
        each.flatten().collect()
    };
    let f32s = |seed, n, scale: f32, offset: f32| {
        let each = numbers(seed, n).map(move |x| (scale * x + offset).to_le_bytes());
        each.flatten().collect()
    };
    [
        rows(1, HK * K),
        rows(2, HK * K),
        rows(3, HV * V),
        rows(4, HV * V),
        f32s(5, TOKENS * HV, 0.05, -0.05),
        f32s(6, TOKENS * HV, 0.5, 0.5),
        f32s(7, 2 * STATE, 1.0, 0.0),
        f32s(8, 2 * STATE, 1.0, 0.0),
    ]
}

fn spec() -> dw_prefill_spec {
    dw_prefill_spec {
        size: size_of::<dw_prefill_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: HK as i32,
        value_heads: HV as i32,
        key_dim: K as i32,
        value_dim: V as i32,
        ..Default::default()
    }
}

fn tensor(data: *mut c_void, dtype: u32, shape: &[usize]) -> dw_tensor {
    let mut t = dw_tensor {
        size: size_of::<dw_tensor>(),
        data,
        dtype: dtype as i32,
        rank: shape.len() as i32,
        ..Default::default()
    };
    let mut stride = 1;
    for (i, n) in shape.iter().enumerate().rev() {
        (t.shape[i], t.strides[i]) = (*n as i64, stride);
        stride *= *n as i64;
    }
    t
}

/// A rank: its plans, fragments, memory and tensors.
struct Rank {
    context: *mut dw_context,
    forward: *mut dw_parallel_prefill,
    backward: *mut dw_parallel_prefill_backward,
    sizes: dw_parallel_prefill_backward_sizes,
    /// Sequence, first row of the whole, rows.
    fragments: Vec<[usize; 3]>,
    rows: usize,
    /// q, k, v, dO, g, beta, states, dS_T; then dq, dk, dv, dg, dbeta, dS0.
    tensors: Vec<dw_tensor>,
    summary: *mut c_void,
    gathered: *mut c_void,
    workspace: *mut c_void,
}

impl Rank {
    fn new(rank: usize, ranks: usize, block: i64) -> Self {
        let (context, spec) = (simulator(), spec());
        let layout = dw_rank_layout {
            size: size_of::<dw_rank_layout>(),
            lengths: LENGTHS.as_ptr(),
            sequences: 2,
            block,
            ranks: ranks as i32,
            kind: abi::DW_RANKS_ZIGZAG as i32,
            ..Default::default()
        };
        let (mut forward, mut backward) = (null_mut(), null_mut());
        let mut of_forward = dw_parallel_prefill_sizes {
            size: size_of::<dw_parallel_prefill_sizes>(),
            ..Default::default()
        };
        let mut sizes = dw_parallel_prefill_backward_sizes {
            size: size_of::<dw_parallel_prefill_backward_sizes>(),
            ..Default::default()
        };
        let mut found = vec![Default::default(); 16];
        // SAFETY: the pointers are valid.
        unsafe {
            let (rank, tokens) = (rank as i32, TOKENS as i64);
            fine(dw_parallel_prefill_create(
                context,
                &spec,
                &layout,
                rank,
                tokens,
                &mut forward,
            ));
            fine(dw_parallel_prefill_get_sizes(forward, &mut of_forward));
            fine(dw_parallel_prefill_tables(
                forward,
                found.as_mut_ptr(),
                of_forward.fragments,
                null_mut(),
                0,
            ));
            fine(dw_parallel_prefill_backward_create(forward, &mut backward));
            fine(dw_parallel_prefill_backward_get_sizes(backward, &mut sizes));
        }
        assert_eq!(
            (of_forward.fragments, of_forward.block),
            (sizes.fragments, sizes.block)
        );
        found.truncate(sizes.fragments as usize);
        let starts = [0, LENGTHS[0]];
        let fragments: Vec<_> = (found.iter())
            .map(|f: &abi::dw_fragment| {
                let begin = starts[f.sequence as usize] + f.begin;
                [f.sequence as usize, begin as usize, f.tokens as usize]
            })
            .collect();
        let rows = fragments.iter().map(|f| f[2]).sum();
        let mut made = Rank {
            context,
            forward,
            backward,
            sizes,
            fragments,
            rows,
            tensors: Vec::new(),
            summary: null_mut(),
            gathered: null_mut(),
            workspace: null_mut(),
        };
        made.summary = made.memory(&vec![0xff; sizes.summary_bytes]);
        made.gathered = made.memory(&vec![0xff; sizes.gathered_bytes]);
        made.workspace = made.memory(&vec![0xff; sizes.workspace_bytes]);
        made.fill();
        made
    }

    fn memory(&self, bytes: &[u8]) -> *mut c_void {
        let mut address = null_mut();
        // SAFETY: the pointers are valid, and both sides have that many bytes.
        unsafe {
            fine(dw_malloc(self.context, bytes.len().max(256), &mut address));
            self.copy_in(address, bytes);
        }
        address
    }

    /// # Safety
    /// The device memory has that many bytes.
    unsafe fn copy_in(&self, to: *mut c_void, bytes: &[u8]) {
        if !bytes.is_empty() {
            let there = abi::DW_TO_DEVICE as c_int;
            let from = bytes.as_ptr().cast();
            // SAFETY: the caller promises it.
            fine(unsafe { dw_copy(self.context, to, from, bytes.len(), there) });
        }
    }

    fn read(&self, from: *const c_void, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        if bytes > 0 {
            let back = abi::DW_TO_HOST as c_int;
            // SAFETY: both sides have that many bytes.
            fine(unsafe { dw_copy(self.context, found.as_mut_ptr().cast(), from, bytes, back) });
        }
        found
    }

    /// Uploads this rank's rows, with rows of no sequence after them, and states that are NaN where nothing may read them.
    fn fill(&mut self) {
        let all = inputs();
        let (n, padded) = (self.fragments.len(), TOKENS);
        let (key, value) = ([padded, HK, K], [padded, HV, V]);
        let scalars = [padded, HV];
        let shapes: [(&[usize], u32); 6] = [
            (&key, abi::DW_BF16),
            (&key, abi::DW_BF16),
            (&value, abi::DW_BF16),
            (&value, abi::DW_BF16),
            (&scalars, abi::DW_F32),
            (&scalars, abi::DW_F32),
        ];
        let bytes_of = |shape: &[usize], dtype: u32| {
            shape.iter().product::<usize>() * if dtype == abi::DW_F32 { 4 } else { 2 }
        };
        for (whole, (shape, dtype)) in all.iter().zip(shapes) {
            let row = bytes_of(&shape[1..], dtype);
            let mut bytes = Vec::new();
            for [_, begin, rows] in &self.fragments {
                bytes.extend(&whole[begin * row..(begin + rows) * row]);
            }
            bytes.resize(padded * row, 0xff);
            let data = self.memory(&bytes);
            self.tensors.push(tensor(data, dtype, shape));
        }
        let starts = [0, LENGTHS[0] as usize];
        let states = [n, HV, K, V];
        for (whole, at_end) in all[6..].iter().zip([false, true]) {
            let mut bytes = Vec::new();
            for &[sequence, begin, rows] in &self.fragments {
                let within = begin - starts[sequence];
                let read = match at_end {
                    true => within + rows == LENGTHS[sequence] as usize,
                    false => within == 0,
                };
                match read {
                    true => bytes.extend(&whole[sequence * STATE * 4..(sequence + 1) * STATE * 4]),
                    false => bytes.extend([0xff; STATE * 4]),
                }
            }
            let data = self.memory(&bytes);
            self.tensors.push(tensor(data, abi::DW_F32, &states));
        }
        let outputs: [(&[usize], u32); 6] = [
            (&key, abi::DW_BF16),
            (&key, abi::DW_BF16),
            (&value, abi::DW_BF16),
            (&scalars, abi::DW_F32),
            (&scalars, abi::DW_F32),
            (&states, abi::DW_F32),
        ];
        for (shape, dtype) in outputs {
            let data = self.memory(&vec![0xff; bytes_of(shape, dtype)]);
            self.tensors.push(tensor(data, dtype, shape));
        }
    }

    fn arguments(&self) -> dw_prefill_backward_tensors {
        let t = &self.tensors;
        dw_prefill_backward_tensors {
            size: size_of::<dw_prefill_backward_tensors>(),
            q: &t[0],
            k: &t[1],
            v: &t[2],
            d_o: &t[3],
            g: &t[4],
            beta: &t[5],
            initial_state: &t[6],
            d_final_state: &t[7],
            d_q: &t[8],
            d_k: &t[9],
            d_v: &t[10],
            d_g: &t[11],
            d_beta: &t[12],
            d_initial_state: &t[13],
            workspace: self.workspace,
            workspace_bytes: self.sizes.workspace_bytes,
            ..Default::default()
        }
    }

    fn first(&self, change: impl FnOnce(&mut dw_prefill_backward_tensors)) -> c_int {
        let mut tensors = self.arguments();
        change(&mut tensors);
        let bytes = self.sizes.summary_bytes;
        // SAFETY: the pointers are valid, or null.
        unsafe {
            dw_parallel_prefill_backward_summarise_launch(
                self.backward,
                null_mut(),
                &tensors,
                self.summary,
                bytes,
            )
        }
    }

    fn second(&self, change: impl FnOnce(&mut dw_prefill_backward_tensors)) -> c_int {
        let mut tensors = self.arguments();
        change(&mut tensors);
        let bytes = self.sizes.gathered_bytes;
        // SAFETY: as above.
        unsafe {
            dw_parallel_prefill_backward_finish_launch(
                self.backward,
                null_mut(),
                &tensors,
                self.gathered,
                bytes,
            )
        }
    }

    /// Puts this rank's gradients into those of all sequences.
    fn outputs(&self, whole: &mut [Vec<u8>; 6]) {
        // SAFETY: the context is valid.
        fine(unsafe { dw_synchronize(self.context, null_mut()) });
        let widths = [HK * K * 2, HK * K * 2, HV * V * 2, HV * 4, HV * 4];
        for ((t, to), row) in self.tensors[8..].iter().zip(whole.iter_mut()).zip(widths) {
            let found = self.read(t.data, TOKENS * row);
            let mut at = 0;
            for [_, begin, rows] in &self.fragments {
                let n = rows * row;
                to[begin * row..begin * row + n].copy_from_slice(&found[at..at + n]);
                at += n;
            }
            assert!(
                found[at..].iter().all(|byte| *byte == 0),
                "rows of no sequence"
            );
        }
        let found = self.read(self.tensors[13].data, self.fragments.len() * STATE * 4);
        let starts = [0, LENGTHS[0] as usize];
        for (&[sequence, begin, _], own) in self.fragments.iter().zip(found.chunks(STATE * 4)) {
            match begin == starts[sequence] {
                true => whole[5][sequence * STATE * 4..][..STATE * 4].copy_from_slice(own),
                false => assert!(
                    own.iter().all(|byte| *byte == 0xff),
                    "dS0 within a sequence"
                ),
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and not used any more.
        unsafe {
            dw_synchronize(self.context, null_mut());
            dw_parallel_prefill_backward_destroy(self.backward);
            dw_parallel_prefill_destroy(self.forward);
            let scratch = [self.summary, self.gathered, self.workspace];
            for address in self.tensors.iter().map(|t| t.data).chain(scratch) {
                dw_free(self.context, address);
            }
            dw_context_destroy(self.context);
        }
    }
}

fn nothing() -> [Vec<u8>; 6] {
    let rows = |width: usize| vec![0xff; TOKENS * width];
    [
        rows(HK * K * 2),
        rows(HK * K * 2),
        rows(HV * V * 2),
        rows(HV * 4),
        rows(HV * 4),
        vec![0xff; 2 * STATE * 4],
    ]
}

/// Gradients of ranks in this thread, with the exchange by copies.
fn staged(ranks: usize, block: i64) -> [Vec<u8>; 6] {
    let each: Vec<_> = (0..ranks)
        .map(|rank| Rank::new(rank, ranks, block))
        .collect();
    let mut all = Vec::new();
    for rank in &each {
        fine(rank.first(|_| {}));
        // SAFETY: the context is valid.
        fine(unsafe { dw_synchronize(rank.context, null_mut()) });
        all.extend(rank.read(rank.summary, rank.sizes.summary_bytes));
    }
    let mut whole = nothing();
    for rank in &each {
        assert_eq!(rank.sizes.gathered_bytes, all.len());
        // SAFETY: the memory has the plan's bytes.
        unsafe { rank.copy_in(rank.gathered, &all) };
        fine(rank.second(|_| {}));
        rank.outputs(&mut whole);
    }
    whole
}

#[test]
fn stages_have_the_bits_of_one_rank() {
    let alone = staged(1, 64);
    for (name, bytes) in ["d_q", "d_k", "d_v", "d_g", "d_beta"].iter().zip(&alone) {
        let zeros = bytes.iter().filter(|byte| **byte == 0).count();
        assert!(zeros < bytes.len() / 4, "{name} is mostly zeros");
    }
    for ranks in [2, 3, 7] {
        assert!(staged(ranks, 64) == alone, "{ranks} ranks");
    }
    assert!(staged(2, 128) != alone, "the block decides the bits");
}

#[test]
fn one_call_has_the_bits_of_the_stages() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("parallel_backward");
    let Some(path) = fake_collectives::compile(&root, &folder, "libranks.so", "-O1") else {
        return;
    };
    let library = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path");
    let context = simulator();
    let mut id = [0u8; 128];
    // SAFETY: the pointers are valid.
    unsafe {
        fine(dw_communicator_unique_id(
            context,
            library.as_ptr(),
            id.as_mut_ptr().cast(),
        ));
        dw_context_destroy(context);
    }
    let run = |n: usize| {
        let rank = Rank::new(n, 3, 64);
        let mut made: *mut dw_communicator = null_mut();
        let call = |rank: &Rank, made, summary_bytes| {
            let (tensors, gathered) = (rank.arguments(), rank.sizes.gathered_bytes);
            // SAFETY: the pointers are valid, or null.
            unsafe {
                dw_communicator_prefill_backward(
                    made,
                    rank.backward,
                    null_mut(),
                    &tensors,
                    rank.summary,
                    summary_bytes,
                    rank.gathered,
                    gathered,
                )
            }
        };
        // SAFETY: as above.
        unsafe {
            let id = id.as_ptr().cast();
            fine(dw_communicator_create(
                rank.context,
                library.as_ptr(),
                id,
                n as i32,
                3,
                60_000,
                &mut made,
            ));
            fine(dw_communicator_agree(made, rank.forward));
            let bytes = rank.sizes.summary_bytes;
            refused(call(&rank, null(), bytes), "communicator: a null pointer");
            refused(call(&rank, made, bytes - 256), "summary: ");
            fine(call(&rank, made, bytes));
            fine(dw_communicator_synchronize(made, null_mut()));
            let other = Rank::new((n + 1) % 3, 3, 64);
            refused(call(&other, made, bytes), "plan: rank ");
            dw_communicator_destroy(made);
        }
        let mut whole = nothing();
        rank.outputs(&mut whole);
        (rank.fragments.clone(), whole)
    };
    let each: Vec<_> = thread::scope(|scope| {
        let run = &run;
        let started: Vec<_> = (0..3).map(|n| scope.spawn(move || run(n))).collect();
        let ended = started.into_iter().map(|rank| rank.join());
        ended.map(|found| found.expect("a rank")).collect()
    });
    let alone = staged(1, 64);
    let widths = [HK * K * 2, HK * K * 2, HV * V * 2, HV * 4, HV * 4];
    for (fragments, whole) in each {
        for [_, begin, rows] in fragments {
            for ((a, b), row) in alone.iter().zip(&whole).zip(widths) {
                let own = begin * row..(begin + rows) * row;
                assert!(a[own.clone()] == b[own]);
            }
        }
    }
}

#[test]
fn wrong_calls_are_refused() {
    let rank = Rank::new(0, 2, 0);
    // The longest sequence has fewer than 16 blocks of the least default block.
    assert_eq!(rank.sizes.block, 256);
    fine(rank.first(|_| {}));
    let given = dw_lengths {
        size: size_of::<dw_lengths>(),
        data: LENGTHS.as_ptr().cast(),
        entries: 2,
        dtype: abi::DW_I64 as i32,
        ..Default::default()
    };
    let flags = rank.tensors[0].data.cast_const().cast();
    for stage in [0, 1] {
        let run = |change: &dyn Fn(&mut dw_prefill_backward_tensors)| match stage {
            0 => rank.first(|t| change(t)),
            _ => rank.second(|t| change(t)),
        };
        refused(run(&|t| t.size = 4), "tensors.size: 4");
        refused(run(&|t| t.q = null()), "q: a null pointer");
        refused(run(&|t| t.d_o = null()), "d_o: a null pointer");
        refused(
            run(&|t| t.context = t.workspace),
            "context: given; it must be NULL: a prefill over ranks saves no context",
        );
        refused(run(&|t| t.cu_seqlens = &given), "cu_seqlens: given");
        refused(
            run(&|t| (t.initial_state, t.has_initial_state) = (null(), flags)),
            "has_initial_state: given without",
        );
        refused(run(&|t| t.d_initial_layout = 5), "d_initial_layout: 5");
        refused(run(&|t| t.workspace_bytes -= 1), "workspace: ");
        refused(run(&|t| t.workspace = null_mut()), "workspace: a null");
        refused(run(&|t| t.d_q = t.k), "d_q: it overlaps k");
        refused(run(&|t| t.d_a_log = t.d_g), "d_a_log: ");
    }
    let tensors = rank.arguments();
    let (summary, gathered) = (rank.sizes.summary_bytes, rank.sizes.gathered_bytes);
    let at = |i: usize| rank.tensors[i].data;
    // SAFETY: pointers are valid, or null.
    unsafe {
        let first = |memory, bytes| {
            let plan = rank.backward;
            dw_parallel_prefill_backward_summarise_launch(plan, null_mut(), &tensors, memory, bytes)
        };
        let second = |memory: *mut c_void, bytes| {
            let plan = rank.backward;
            dw_parallel_prefill_backward_finish_launch(plan, null_mut(), &tensors, memory, bytes)
        };
        refused(first(rank.summary, summary - 1), "summary: ");
        refused(first(null_mut(), summary), "summary: a null pointer");
        refused(second(rank.gathered, gathered - 1), "gathered: ");
        refused(second(null_mut(), gathered), "gathered: a null pointer");
        // Scratch memory over an input, and outputs over it.
        refused(
            first(rank.workspace, summary),
            "workspace: it overlaps summary",
        );
        refused(
            second(rank.workspace, gathered),
            "workspace: it overlaps gathered",
        );
        refused(first(at(0), summary), "summary: it overlaps q");
        refused(second(at(8), gathered), "d_q: it overlaps gathered");
        let plan: *const dw_parallel_prefill_backward = null();
        let status = dw_parallel_prefill_backward_summarise_launch(
            plan,
            null_mut(),
            &tensors,
            rank.summary,
            summary,
        );
        refused(status, "backward: a null pointer");
        let mut made = std::ptr::dangling_mut();
        let status = dw_parallel_prefill_backward_create(null(), &mut made);
        refused(status, "plan: a null pointer");
        assert!(made.is_null());
        let status = dw_parallel_prefill_backward_create(rank.forward, null_mut());
        refused(status, "backward: a null pointer");
        dw_parallel_prefill_backward_destroy(null_mut());
        // Sizes: a struct without its size, and one of the first version of the forward's.
        let mut sizes = dw_parallel_prefill_backward_sizes::default();
        let status = dw_parallel_prefill_backward_get_sizes(rank.backward, &mut sizes);
        refused(status, "sizes.size: 0");
        let mut old = dw_parallel_prefill_sizes {
            size: 56,
            block: -7,
            ..Default::default()
        };
        fine(dw_parallel_prefill_get_sizes(rank.forward, &mut old));
        assert_eq!((old.fragments, old.block), (rank.sizes.fragments, -7));
    }
}
