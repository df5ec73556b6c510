//! Pools of states and snapshots of prefill through the C interface.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_OK, dw_context, dw_lengths, dw_prefill, dw_prefill_spec,
    dw_prefill_tensors, dw_snapshot, dw_tensor,
};
use deltawave_c::*;
use half::bf16;

fn last_error() -> String {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    text.to_string_lossy().into_owned()
}

#[track_caller]
fn refused(status: c_int, wanted: &str) {
    let text = last_error();
    assert_eq!(status, DW_ERROR_ARGUMENT as c_int, "{text}");
    assert!(text.starts_with(wanted), "wanted `{wanted}`, was `{text}`");
}

#[track_caller]
fn fine(status: c_int) {
    assert_eq!(status, DW_OK as c_int, "{}", last_error());
}

const TOKENS: i64 = 198;
/// The first has two chunks, the second a part of one more.
const LENGTHS: [i32; 3] = [0, 128, 198];
const HEADS: i64 = 2;
const DIM: i64 = 32;
const SLOTS: i64 = 4;
/// Floats of a state of all heads.
const STATE: usize = (HEADS * DIM * DIM) as usize;

/// A plan, and tensors in memory of the device.
struct Prefill {
    context: *mut dw_context,
    memory: *mut c_void,
    plan: *mut dw_prefill,
    k: dw_tensor,
    o: dw_tensor,
    initial: dw_tensor,
    last: dw_tensor,
    pool: dw_tensor,
    workspace_bytes: usize,
}

/// Bytes of each tensor's room.
const ROOM: usize = 1 << 16;
/// The parts of the memory.
const K: usize = 0;
const O: usize = 1;
const INITIAL: usize = 2;
const LAST: usize = 3;
const POOL: usize = 4;
const NUMBERS: usize = 5;
const WORKSPACE: usize = 6;

fn tensor(memory: *mut c_void, part: usize, dtype: u32, shape: &[i64]) -> dw_tensor {
    let mut t = dw_tensor {
        size: size_of::<dw_tensor>(),
        data: memory.wrapping_byte_add(part * ROOM),
        dtype: dtype as i32,
        rank: shape.len() as i32,
        ..Default::default()
    };
    let mut stride = 1;
    for (i, n) in shape.iter().enumerate().rev() {
        (t.shape[i], t.strides[i]) = (*n, stride);
        stride *= *n;
    }
    t
}

impl Prefill {
    fn new() -> Self {
        let (mut context, mut memory, mut plan) = (null_mut(), null_mut(), null_mut());
        let spec = dw_prefill_spec {
            size: size_of::<dw_prefill_spec>(),
            dtype: abi::DW_BF16 as i32,
            key_heads: HEADS as i32,
            value_heads: HEADS as i32,
            key_dim: DIM as i32,
            value_dim: DIM as i32,
            qk_l2norm: 1,
            segments: 1,
            ..Default::default()
        };
        let lengths = dw_lengths {
            size: size_of::<dw_lengths>(),
            data: LENGTHS.as_ptr().cast(),
            entries: 3,
            dtype: abi::DW_I32 as i32,
            ..Default::default()
        };
        let mut workspace_bytes = 0;
        // SAFETY: the pointers are valid.
        unsafe {
            let simulator = abi::DW_BACKEND_SIMULATOR as c_int;
            fine(dw_context_create(simulator, 0, &mut context));
            fine(dw_prefill_packed(
                context, &spec, &lengths, TOKENS, &mut plan,
            ));
            fine(dw_prefill_workspace_bytes(plan, &mut workspace_bytes));
            let bytes = WORKSPACE * ROOM + workspace_bytes;
            fine(dw_malloc(context, bytes, &mut memory));
        }
        let rows = [TOKENS, HEADS, DIM];
        let states = |slots| [slots, HEADS, DIM, DIM];
        let out = Prefill {
            context,
            memory,
            plan,
            k: tensor(memory, K, abi::DW_BF16, &rows),
            o: tensor(memory, O, abi::DW_BF16, &rows),
            initial: tensor(memory, INITIAL, abi::DW_F32, &states(2)),
            last: tensor(memory, LAST, abi::DW_F32, &states(2)),
            pool: tensor(memory, POOL, abi::DW_F32, &states(SLOTS)),
            workspace_bytes,
        };
        let mut random = 1u32;
        let mut numbers = std::iter::repeat_with(|| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as f32 / (1 << 23) as f32 - 1.0
        });
        let k: Vec<bf16> = (0..TOKENS * HEADS * DIM)
            .map(|_| bf16::from_f32(numbers.next().unwrap_or(0.0)))
            .collect();
        let initial: Vec<f32> = numbers.take(2 * STATE).collect();
        out.write(K, 0, &k);
        out.write(INITIAL, 0, &initial);
        out
    }

    /// Writes to a part of the memory, from an element on.
    fn write<T>(&self, part: usize, at: usize, values: &[T]) {
        let to = self
            .memory
            .wrapping_byte_add(part * ROOM + at * size_of::<T>());
        let (from, direction) = (values.as_ptr().cast(), abi::DW_TO_DEVICE as c_int);
        // SAFETY: both sides have that many bytes.
        fine(unsafe { dw_copy(self.context, to, from, size_of_val(values), direction) });
    }

    /// The first numbers of a part of the memory.
    fn read(&self, part: usize, numbers: usize) -> Vec<u32> {
        let mut out = vec![0u32; numbers];
        let from = self.memory.wrapping_byte_add(part * ROOM);
        // SAFETY: both sides have that many bytes.
        unsafe {
            fine(dw_synchronize(self.context, null_mut()));
            let (to, direction) = (out.as_mut_ptr().cast(), abi::DW_TO_HOST as c_int);
            fine(dw_copy(self.context, to, from, 4 * numbers, direction));
        }
        out
    }

    fn numbers(&self) -> *const i32 {
        self.memory
            .wrapping_byte_add(NUMBERS * ROOM)
            .cast_const()
            .cast()
    }

    /// Launches what `change` makes of a request without states.
    fn run(&self, change: impl FnOnce(&mut dw_prefill_tensors)) -> c_int {
        let mut tensors = dw_prefill_tensors {
            size: size_of::<dw_prefill_tensors>(),
            q: &self.k,
            k: &self.k,
            v: &self.k,
            o: &self.o,
            workspace: self.memory.wrapping_byte_add(WORKSPACE * ROOM),
            workspace_bytes: self.workspace_bytes,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_prefill_launch(self.plan, null_mut(), &tensors) }
    }

    /// Poisons the pool, and puts the initial states into the slots 2 and 0.
    fn fill_pool(&self) {
        self.write(POOL, 0, &[u32::MAX; SLOTS as usize * STATE]);
        let initial = self.read(INITIAL, 2 * STATE);
        self.write(POOL, 2 * STATE, &initial[..STATE]);
        self.write(POOL, 0, &initial[STATE..]);
    }

    fn outputs(&self) -> Vec<u32> {
        self.read(O, (TOKENS * HEADS * DIM / 2) as usize)
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and not used any more.
        unsafe {
            dw_prefill_destroy(self.plan);
            dw_free(self.context, self.memory);
            dw_context_destroy(self.context);
        }
    }
}

fn snapshot(sequence: i64, tokens: i64, slot: i64) -> dw_snapshot {
    dw_snapshot {
        sequence,
        tokens,
        slot,
    }
}

#[test]
fn a_pool_is_updated_in_place() {
    let x = Prefill::new();
    fine(x.run(|t| (t.initial_state, t.final_state) = (&x.initial, &x.last)));
    let (outputs, states) = (x.outputs(), x.read(LAST, 2 * STATE));
    let expect = |slot: usize, state: &[u32]| {
        let pool = x.read(POOL, SLOTS as usize * STATE);
        assert!(pool[slot * STATE..][..STATE] == *state, "slot {slot}");
    };
    let poison = [u32::MAX; STATE];

    // Slots of the launch.
    x.write(NUMBERS, 0, &[2i32, 0]);
    x.fill_pool();
    fine(x.run(|t| (t.pool, t.slots) = (&x.pool, x.numbers())));
    assert!(x.outputs() == outputs);
    for (slot, state) in [
        (2, &states[..STATE]),
        (0, &states[STATE..]),
        (1, &poison),
        (3, &poison),
    ] {
        expect(slot, state);
    }

    // Slots of the plan, and a snapshot in the pool: at the end of a sequence it is the final state.
    let list = [snapshot(0, 128, 3)];
    // SAFETY: the pointers are valid.
    unsafe {
        fine(dw_prefill_set_slots(
            x.plan,
            [2, 0].as_ptr(),
            [2, 1].as_ptr(),
            2,
        ));
        fine(dw_prefill_set_snapshots(x.plan, list.as_ptr(), 1));
    }
    x.fill_pool();
    fine(x.run(|t| t.pool = &x.pool));
    assert!(x.outputs() == outputs);
    for (slot, state) in [
        (2, &states[..STATE]),
        (1, &states[STATE..]),
        (3, &states[..STATE]),
    ] {
        expect(slot, state);
    }
    refused(
        x.run(|t| (t.pool, t.slots) = (&x.pool, x.numbers())),
        "slots: given to a plan",
    );
    refused(x.run(|_| ()), "pool: absent");
}

/// Slots of snapshots on the device: the middle of the first sequence, from which it is continued.
#[test]
fn snapshots_of_a_launch() {
    let x = Prefill::new();
    let mut entries = 0;
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_chunk_entries(x.plan, &mut entries) });
    assert_eq!(entries, TOKENS / 64 + 2);
    x.write(NUMBERS, 0, &[1i32, 0, -1, 9, -1]);
    x.fill_pool();
    fine(x.run(|t| {
        (t.initial_state, t.final_state) = (&x.initial, &x.last);
        (t.snapshots, t.snapshot_slots) = (&x.pool, x.numbers());
    }));
    let states = x.read(LAST, 2 * STATE);
    let pool = x.read(POOL, SLOTS as usize * STATE);
    // After both chunks: the final state.
    assert!(pool[..STATE] == states[..STATE]);
    // After the first one: another, and nothing that was there.
    let middle = &pool[STATE..2 * STATE];
    assert!(middle != &states[..STATE] && middle.iter().all(|&x| f32::from_bits(x).is_finite()));
    assert!(pool[3 * STATE..].iter().all(|&x| x == u32::MAX));
}

#[test]
fn refusals() {
    let x = Prefill::new();
    let slots = x.numbers();
    refused(x.run(|t| t.slots = slots), "slots: given without a pool");
    refused(
        x.run(|t| t.write_slots = slots),
        "write_slots: given without a pool",
    );
    refused(
        x.run(|t| (t.pool, t.pool_layout) = (&x.pool, 5)),
        "pool_layout: 5",
    );
    refused(
        x.run(|t| (t.snapshots, t.snapshot_layout) = (&x.pool, 7)),
        "snapshot_layout: 7",
    );
    refused(x.run(|t| t.snapshots = &x.pool), "snapshot_slots: absent");
    refused(
        x.run(|t| t.snapshot_slots = slots),
        "snapshots: given without a tensor",
    );
    refused(
        x.run(|t| (t.pool, t.final_state) = (&x.pool, &x.last)),
        "pool: given with an initial_state or a final_state",
    );
    let set = |slots: &[i32], count| {
        // SAFETY: as many lie there, or the call is refused.
        unsafe { dw_prefill_set_slots(x.plan, slots.as_ptr(), null(), count) }
    };
    refused(
        set(&[1, 1], 2),
        "slots: slot 1, written by the sequences 0 and 1",
    );
    refused(set(&[1], 1), "slots: 1 slots");
    refused(set(&[1], -1), "count: -1");
    let set = |snapshot: dw_snapshot| {
        // SAFETY: as above.
        unsafe { dw_prefill_set_snapshots(x.plan, &snapshot, 1) }
    };
    refused(set(snapshot(2, 64, 0)), "snapshots: sequence 2");
    refused(
        set(snapshot(1, 128, 0)),
        "snapshots: a state after 128 tokens",
    );
    refused(
        set(snapshot(0, 60, 0)),
        "snapshots: a state after 60 tokens",
    );
    refused(set(snapshot(0, 64, -1)), "snapshots.slot: -1");
    // SAFETY: the pointers are null or valid.
    unsafe {
        refused(
            dw_prefill_set_slots(x.plan, null(), null(), 2),
            "slots: a null pointer",
        );
        refused(
            dw_prefill_set_slots(null_mut(), null(), null(), 0),
            "plan: a null pointer",
        );
        let (mut device, spec) = (
            null_mut(),
            dw_prefill_spec {
                size: size_of::<dw_prefill_spec>(),
                dtype: abi::DW_BF16 as i32,
                key_heads: 1,
                value_heads: 1,
                key_dim: 16,
                value_dim: 16,
                ..Default::default()
            },
        );
        fine(dw_prefill_device(x.context, &spec, 100, 1, &mut device));
        refused(
            dw_prefill_set_slots(device, [0].as_ptr(), null(), 1),
            "slots: given to a plan whose lengths are on the device",
        );
        refused(
            dw_prefill_set_snapshots(device, null(), 0),
            "snapshots: given to a plan whose lengths are on the device",
        );
        dw_prefill_destroy(device);
    }
}
