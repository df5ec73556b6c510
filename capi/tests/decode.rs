//! Decode, verification and commit through the C interface: results, and what is refused, by the name of the argument.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_OK, dw_commit_tensors, dw_context, dw_decode, dw_decode_spec,
    dw_decode_tensors, dw_tensor,
};
use deltawave_c::*;
use half::bf16;

#[track_caller]
fn refused(status: c_int, wanted: &str) {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    let text = text.to_str().expect("UTF-8");
    assert_eq!(status, DW_ERROR_ARGUMENT as c_int, "{text}");
    assert!(text.starts_with(wanted), "wanted `{wanted}`, was `{text}`");
}

#[track_caller]
fn fine(status: c_int) {
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    assert_eq!(status, DW_OK as c_int, "{text:?}");
}

const BATCH: usize = 2;
const TOKENS: usize = 3;
const DIM: usize = 16;
const PART: usize = 1 << 14;

/// One head of 16 by 16, whose scale is 1.
fn spec(tokens: usize) -> dw_decode_spec {
    dw_decode_spec {
        size: size_of::<dw_decode_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: 1,
        value_heads: 1,
        key_dim: DIM as i32,
        value_dim: DIM as i32,
        scale: 1.0,
        tokens: tokens as i32,
        ..Default::default()
    }
}

/// Memory of the device in parts: ones of 16 bits, zeros, and what is written.
struct Device {
    context: *mut dw_context,
    memory: *mut c_void,
}

impl Device {
    fn new() -> Self {
        let (mut context, mut memory) = (null_mut(), null_mut());
        let mut halves = vec![bf16::ZERO; 8 * PART / 2];
        halves[..PART / 2].fill(bf16::ONE);
        let bytes = size_of_val(&halves[..]);
        // SAFETY: the pointers are valid, and the copy has that many bytes on both sides.
        unsafe {
            let simulator = abi::DW_BACKEND_SIMULATOR as c_int;
            fine(dw_context_create(simulator, 0, &mut context));
            fine(dw_malloc(context, bytes, &mut memory));
            let to_device = abi::DW_TO_DEVICE as c_int;
            fine(dw_copy(
                context,
                memory,
                halves.as_ptr().cast(),
                bytes,
                to_device,
            ));
        }
        Device { context, memory }
    }

    fn part(&self, part: usize) -> *mut c_void {
        self.memory.wrapping_byte_add(part * PART)
    }

    fn tensor(&self, part: usize, dtype: u32, shape: &[usize]) -> dw_tensor {
        let mut t = dw_tensor {
            size: size_of::<dw_tensor>(),
            data: self.part(part),
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

    fn read<T: Copy + Default, const N: usize>(&self, part: usize) -> [T; N] {
        let mut found = [T::default(); N];
        let bytes = size_of_val(&found);
        // SAFETY: both sides have that many bytes.
        unsafe {
            fine(dw_synchronize(self.context, null_mut()));
            let (to, from) = (found.as_mut_ptr().cast(), self.part(part));
            fine(dw_copy(
                self.context,
                to,
                from,
                bytes,
                abi::DW_TO_HOST as c_int,
            ));
        }
        found
    }

    fn write(&self, part: usize, values: &[i32]) {
        let (to, from) = (self.part(part), values.as_ptr().cast());
        let to_device = abi::DW_TO_DEVICE as c_int;
        // SAFETY: both sides have that many bytes.
        fine(unsafe { dw_copy(self.context, to, from, size_of_val(values), to_device) });
    }

    fn plan(&self, tokens: usize) -> *mut dw_decode {
        let mut plan = null_mut();
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_decode_create(self.context, &spec(tokens), BATCH as i64, &mut plan) });
        plan
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made with it, and plans have a share of the context of their own.
        unsafe {
            dw_free(self.context, self.memory);
            dw_context_destroy(self.context);
        }
    }
}

const ONES: usize = 0;
const O: usize = 1;
const POOL: usize = 2;
const STATES: usize = 3;
const SLOTS: usize = 4;
const ACCEPTED: usize = 5;
const CONV: usize = 6;

/// A launch of `tokens` tokens of ones, with what `change` makes of it.
fn decode(
    x: &Device,
    plan: *mut dw_decode,
    tokens: usize,
    change: impl FnOnce(&mut dw_decode_tensors),
) -> c_int {
    let ones = x.tensor(ONES, abi::DW_BF16, &[BATCH * tokens, 1, DIM]);
    let o = x.tensor(O, abi::DW_BF16, &[BATCH * tokens, 1, DIM]);
    let pool = x.tensor(POOL, abi::DW_F32, &[4, 1, DIM, DIM]);
    let mut tensors = dw_decode_tensors {
        size: size_of::<dw_decode_tensors>(),
        q: &ones,
        k: &ones,
        v: &ones,
        o: &o,
        pool: &pool,
        slots: x.part(SLOTS).cast(),
        ..Default::default()
    };
    change(&mut tensors);
    // SAFETY: the pointers are valid, or null.
    unsafe { dw_decode_launch(plan, null_mut(), &tensors) }
}

/// States of ones: S = 1, then 1 + (1 - 16), then -14 + (1 + 224), and outputs 16 times that.
#[test]
fn steps_verification_and_commit() {
    let x = Device::new();
    x.write(SLOTS, &[3, -1]);
    let plan = x.plan(1);
    for state in [1.0, -14.0, 211.0] {
        fine(decode(&x, plan, 1, |_| ()));
        let o = x.read::<bf16, { 2 * DIM }>(O).map(bf16::to_f32);
        assert_eq!(o[..DIM], [16.0 * state; DIM]);
        assert_eq!(o[DIM..], [0.0; DIM], "padding");
        let pool = x.read::<f32, { 4 * 256 }>(POOL);
        assert_eq!(pool[..3 * 256], [0.0; 3 * 256]);
        assert_eq!(pool[3 * 256..], [state; 256]);
    }
    // SAFETY: made above.
    unsafe { dw_decode_destroy(plan) };

    // The same tokens at once, of which one sequence accepts two and the other none.
    let plan = x.plan(TOKENS);
    x.write(SLOTS, &[1, 2]);
    x.write(ACCEPTED, &[2, 0]);
    let states = x.tensor(STATES, abi::DW_F32, &[BATCH * TOKENS, 1, DIM, DIM]);
    fine(decode(&x, plan, TOKENS, |t| t.states = &states));
    let pool = x.read::<f32, { 4 * 256 }>(POOL);
    assert_eq!(pool[..3 * 256], [0.0; 3 * 256]);
    let channels = 3 * DIM;
    let rows = x.tensor(ONES, abi::DW_BF16, &[BATCH * TOKENS, channels]);
    let (pool, conv) = (
        x.tensor(POOL, abi::DW_F32, &[4, 1, DIM, DIM]),
        x.tensor(CONV, abi::DW_BF16, &[4, channels, 3]),
    );
    let request = || dw_commit_tensors {
        size: size_of::<dw_commit_tensors>(),
        accepted: x.part(ACCEPTED).cast(),
        slots: x.part(SLOTS).cast(),
        states: &states,
        pool: &pool,
        conv_state: &conv,
        x: &rows,
        ..Default::default()
    };
    let mut parts = [(); 3].map(|()| x.tensor(ONES, abi::DW_BF16, &[BATCH * TOKENS, 1, DIM]));
    parts[1].dtype = abi::DW_F16 as i32;
    let launch = |tensors: dw_commit_tensors| {
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_commit_launch(plan, null_mut(), &tensors) }
    };
    fine(launch(request()));
    let pool = x.read::<f32, { 4 * 256 }>(POOL);
    assert_eq!(pool[256..512], [-14.0; 256]);
    assert_eq!(pool[512..768], [0.0; 256]);
    let conv = x.read::<bf16, { 3 * 48 * 3 }>(CONV).map(bf16::to_f32);
    for (i, value) in conv.into_iter().enumerate() {
        let wanted = f32::from((144..288).contains(&i) && i % 3 > 0);
        assert_eq!(value, wanted, "conv state {i}");
    }

    let mut wrong = request();
    wrong.accepted = null();
    refused(launch(wrong), "accepted");
    let mut wrong = request();
    wrong.states = wrong.pool;
    refused(launch(wrong), "states");
    let mut wrong = request();
    wrong.x = null();
    refused(launch(wrong), "x");
    let mut wrong = request();
    wrong.conv_state = wrong.states;
    refused(launch(wrong), "conv_state");
    let mut wrong = request();
    wrong.conv_layout = abi::DW_CONV_TOKEN_MAJOR as i32;
    refused(launch(wrong), "conv_state: shape");
    let mut wrong = request();
    wrong.x_layout = abi::DW_CONV_SEPARATE as i32;
    (wrong.x, wrong.x_q, wrong.x_k, wrong.x_v) = (null(), &parts[0], &parts[1], &parts[2]);
    refused(launch(wrong), "x_k: dtype");
    let mut wrong = request();
    (wrong.conv_state, wrong.has_initial_state) = (null(), x.part(ONES).cast());
    refused(launch(wrong), "has_initial_state");
    // SAFETY: made above.
    unsafe { dw_decode_destroy(plan) };
}

/// Drafts of ones: the first sequence starts from the state after its second draft, the other from zeros. A struct of the
/// first version of the ABI, too.
#[test]
fn drafts_and_accepted_counts() {
    const TABLE: usize = 7;
    let x = Device::new();
    let plan = x.plan(TOKENS);
    // Slots after each of three drafts; 0 is none.
    x.write(TABLE, &[2, 3, 0, 1, 0, 0]);
    x.write(ACCEPTED, &[2, 1]);
    x.write(SLOTS, &[0, 2, 3]);
    let lengths = abi::dw_lengths {
        size: size_of::<abi::dw_lengths>(),
        data: x.part(SLOTS).cast(),
        entries: 3,
        dtype: abi::DW_I32 as i32,
        ..Default::default()
    };
    let ragged = |t: &mut dw_decode_tensors| {
        t.slots = null();
        (t.draft_slots, t.read_slots) = (x.part(TABLE).cast(), x.part(TABLE).cast());
        t.accepted = x.part(ACCEPTED).cast();
        t.cu_seqlens = &lengths;
        (t.has_null_slot, t.null_slot) = (1, 0);
    };
    fine(decode(&x, plan, 2, ragged));
    let pool = x.read::<f32, { 4 * 256 }>(POOL);
    for (slot, state) in [0.0, 1.0, 1.0, -14.0].into_iter().enumerate() {
        assert_eq!(pool[slot * 256..][..256], [state; 256], "slot {slot}");
    }
    fine(decode(&x, plan, 2, ragged));
    let pool = x.read::<f32, { 4 * 256 }>(POOL);
    for (slot, state) in [0.0, -14.0, 211.0, -3164.0].into_iter().enumerate() {
        assert_eq!(pool[slot * 256..][..256], [state; 256], "slot {slot}");
    }
    let changed = |change: fn(&mut dw_decode_tensors)| {
        decode(&x, plan, 2, |t| {
            ragged(t);
            change(t);
        })
    };
    refused(changed(|t| t.accepted = null()), "accepted");
    refused(changed(|t| t.read_slots = null()), "read_slots");
    refused(changed(|t| t.slots = t.accepted), "slots");
    refused(changed(|t| t.write_slots = t.accepted), "write_slots");
    refused(changed(|t| t.read_columns = -1), "read_columns");
    refused(changed(|t| t.has_null_slot = 2), "has_null_slot");
    // SAFETY: made above.
    unsafe { dw_decode_destroy(plan) };

    let plan = x.plan(1);
    x.write(SLOTS, &[0, -1]);
    let first = std::mem::offset_of!(dw_decode_tensors, draft_slots);
    fine(decode(&x, plan, 1, |t| {
        t.size = first;
        t.null_slot = 7; // not read
    }));
    assert_eq!(x.read::<f32, 256>(POOL), [1.0; 256]);
    // SAFETY: made above.
    unsafe { dw_decode_destroy(plan) };
}

#[test]
fn what_is_refused() {
    let x = Device::new();
    x.write(SLOTS, &[0, 1]);
    let mut plan = null_mut();
    let mut make = |change: fn(&mut dw_decode_spec), batch: i64| {
        let mut spec = spec(1);
        change(&mut spec);
        // SAFETY: the pointers are valid.
        unsafe { dw_decode_create(x.context, &spec, batch, &mut plan) }
    };
    refused(make(|s| s.dtype = abi::DW_F32 as i32, 1), "dtype");
    refused(make(|s| s.tokens = 17, 1), "tokens");
    refused(make(|s| s.tokens = -1, 1), "tokens");
    refused(make(|s| s.draft = abi::DW_DRAFT_TREE as i32, 1), "draft");
    refused(make(|s| s.draft = 7, 1), "draft");
    refused(make(|s| s.key_dim = 24, 1), "key_dim");
    refused(make(|_| (), -1), "batch");
    assert!(plan.is_null());

    let plan = x.plan(1);
    refused(decode(&x, plan, 1, |t| t.q = null()), "q");
    refused(decode(&x, plan, 1, |t| t.pool = null()), "pool");
    refused(decode(&x, plan, 1, |t| t.pool_layout = 2), "pool_layout");
    refused(
        decode(&x, plan, 1, |t| t.allow_neg_eigval = 1),
        "allow_neg_eigval",
    );
    refused(decode(&x, plan, 1, |t| t.a = t.q), "b");
    let one = x.tensor(POOL, abi::DW_F32, &[1, 1, DIM, DIM]);
    refused(
        decode(&x, plan, 1, |t| (t.pool, t.slots) = (&one, null())),
        "pool",
    );
    refused(decode(&x, plan, 1, |t| t.size = 8), "tensors.size");
    refused(decode(&x, null_mut(), 1, |_| ()), "plan");
    // SAFETY: made above; null does nothing.
    unsafe {
        dw_decode_destroy(plan);
        dw_decode_destroy(null_mut());
    }
}
