//! What is refused, with which status and text: null pointers, sizes, numbers and shapes. A text names the argument.

#[path = "errors/overlaps.rs"]
mod overlaps;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_ERROR_DEVICE, DW_OK, dw_context, dw_device_info, dw_gate_tensors,
    dw_lengths, dw_prefill, dw_prefill_spec, dw_prefill_tensors, dw_tensor,
};
use deltawave_c::*;

fn last_error() -> String {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    text.to_str().expect("UTF-8").to_owned()
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

fn simulator() -> *mut dw_context {
    let mut context = null_mut();
    // SAFETY: the pointer is valid.
    fine(unsafe { dw_context_create(abi::DW_BACKEND_SIMULATOR as c_int, 0, &mut context) });
    context
}

const HK: i64 = 2;
const HV: i64 = 4;
const K: i64 = 32;
const V: i64 = 16;
const TOKENS: i64 = 9;
const LENGTHS: [i64; 3] = [0, 5, 9];

fn spec() -> dw_prefill_spec {
    dw_prefill_spec {
        size: size_of::<dw_prefill_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: HK as i32,
        value_heads: HV as i32,
        key_dim: K as i32,
        value_dim: V as i32,
        // The kernel for short sequences needs no workspace.
        path: abi::DW_PATH_SPLIT as i32,
        ..Default::default()
    }
}

fn lengths() -> dw_lengths {
    dw_lengths {
        size: size_of::<dw_lengths>(),
        data: LENGTHS.as_ptr().cast(),
        entries: 3,
        dtype: abi::DW_I64 as i32,
        ..Default::default()
    }
}

fn tensor(data: *mut c_void, dtype: u32, shape: &[i64]) -> dw_tensor {
    let mut t = dw_tensor {
        size: size_of::<dw_tensor>(),
        data,
        dtype: dtype as i32,
        rank: shape.len() as i32,
        ..Default::default()
    };
    let mut stride = 1;
    for (i, n) in shape.iter().enumerate().rev() {
        (t.shape[i], t.strides[i]) = (*n, stride);
        stride *= n;
    }
    t
}

#[test]
fn contexts() {
    // SAFETY: pointers are valid, or null.
    unsafe {
        refused(
            dw_context_create(0, 0, null_mut()),
            "context: a null pointer",
        );
        let mut context = std::ptr::dangling_mut();
        refused(
            dw_context_create(7, 0, &mut context),
            "backend: 7; it must be DW_BACKEND_AUTO",
        );
        assert!(context.is_null());
        let simulator_code = abi::DW_BACKEND_SIMULATOR as c_int;
        refused(
            dw_context_create(simulator_code, -1, &mut context),
            "device: -1",
        );
        let status = dw_context_create(simulator_code, 99, &mut context);
        assert_eq!(status, DW_ERROR_DEVICE as c_int);
        assert!(
            last_error().starts_with("device 99 does not exist"),
            "{}",
            last_error()
        );
        dw_context_destroy(null_mut());

        let context = simulator();
        let mut info = dw_device_info::default();
        refused(dw_context_info(context, null_mut()), "info: a null pointer");
        for size in [0, 12, (1 << 16) + 8, usize::MAX - 7] {
            info.size = size;
            refused(
                dw_context_info(context, &mut info),
                &format!("info.size: {size}; it must be sizeof the struct, a multiple of 8 from "),
            );
            assert!(last_error().ends_with(" to 65536"), "{}", last_error());
        }
        info.size = size_of::<dw_device_info>();
        fine(dw_context_info(context, &mut info));
        assert_eq!(CStr::from_ptr(info.backend.as_ptr()), c"simulator");
        assert_eq!(CStr::from_ptr(info.arch.as_ptr()), c"gfx942");
        refused(
            dw_context_info(null(), &mut info),
            "context: a null pointer",
        );
        dw_context_destroy(context);
    }
}

/// Reading or writing through such a pointer would be undefined behaviour.
#[test]
fn pointers_that_are_not_aligned() {
    let context = simulator();
    let mut room = [null_mut::<c_void>(); 2];
    let odd = room.as_mut_ptr().wrapping_byte_add(1);
    let mut plan = null_mut();
    let mut bytes = 0usize;
    let odd_bytes = (&raw mut bytes).wrapping_byte_add(2);
    let simulator_code = abi::DW_BACKEND_SIMULATOR as c_int;
    // SAFETY: pointers are valid, or not aligned.
    unsafe {
        refused(
            dw_context_create(simulator_code, 0, odd.cast()),
            "context: address 0x",
        );
        refused(dw_malloc(context, 4, odd), "address: address 0x");
        assert!(
            last_error().ends_with("it must be aligned to 8 bytes"),
            "{}",
            last_error()
        );
        refused(
            dw_malloc(context.wrapping_byte_add(4), 4, room.as_mut_ptr()),
            "context: address 0x",
        );
        refused(
            dw_prefill_packed(context, &spec(), &lengths(), TOKENS, odd.cast()),
            "plan: address 0x",
        );
        let odd_spec = (&raw const room).wrapping_byte_add(1).cast();
        refused(
            dw_prefill_packed(context, odd_spec, &lengths(), TOKENS, &mut plan),
            "spec: address 0x",
        );
        fine(dw_prefill_packed(
            context,
            &spec(),
            &lengths(),
            TOKENS,
            &mut plan,
        ));
        refused(
            dw_prefill_workspace_bytes(plan, odd_bytes),
            "bytes: address 0x",
        );
        dw_prefill_destroy(plan);
        dw_context_destroy(context);
    }
    assert_eq!((room, bytes), ([null_mut(); 2], 0));
}

#[test]
fn memory() {
    // SAFETY: pointers are valid, or null.
    unsafe {
        let context = simulator();
        let mut address = null_mut();
        refused(dw_malloc(context, 4, null_mut()), "address: a null pointer");
        fine(dw_malloc(context, 4, &mut address));
        let (from, mut to) = ([1u8, 2, 3, 4], [0u8; 4]);
        let [there, back] = [abi::DW_TO_DEVICE, abi::DW_TO_HOST].map(|d| d as c_int);
        fine(dw_copy(context, address, from.as_ptr().cast(), 4, there));
        fine(dw_copy(context, to.as_mut_ptr().cast(), address, 4, back));
        assert_eq!(to, from);
        refused(
            dw_copy(context, address, null(), 4, there),
            "from: a null pointer",
        );
        refused(
            dw_copy(context, null_mut(), address, 4, back),
            "to: a null pointer",
        );
        refused(
            dw_copy(context, address, from.as_ptr().cast(), 4, 9),
            "direction: 9",
        );
        fine(dw_synchronize(context, null_mut()));
        fine(dw_free(context, address));
        fine(dw_free(context, null_mut()));
        // Freed twice: the runtime says so.
        assert_eq!(dw_free(context, address), abi::DW_ERROR_RUNTIME as c_int);
        assert!(last_error().contains("hipFree"), "{}", last_error());
        dw_context_destroy(context);
    }
}

#[test]
fn specs_and_lengths() {
    let context = simulator();
    let packed = |change: &dyn Fn(&mut dw_prefill_spec, &mut dw_lengths)| {
        let (mut spec, mut lengths) = (spec(), lengths());
        change(&mut spec, &mut lengths);
        let mut plan = std::ptr::dangling_mut();
        // SAFETY: the pointers are valid.
        let status = unsafe { dw_prefill_packed(context, &spec, &lengths, TOKENS, &mut plan) };
        assert!(plan.is_null() == (status != 0));
        // SAFETY: null, or just made.
        unsafe { dw_prefill_destroy(plan) };
        status
    };
    fine(packed(&|_, _| {}));
    refused(
        packed(&|s, _| s.size = 8),
        "spec.size: 8; it must be sizeof",
    );
    refused(packed(&|s, _| s.dtype = 0), "dtype: dtype f32");
    refused(
        packed(&|s, _| s.dtype = 9),
        "dtype: 9; it must be DW_F32 or",
    );
    refused(packed(&|s, _| s.head_map = 2), "head_map: 2");
    refused(packed(&|s, _| s.path = 4), "path: 4");
    refused(
        packed(&|s, _| (s.path, s.key_dim) = (abi::DW_PATH_FUSED as i32, 144)),
        "path: fused with K = 144",
    );
    refused(
        packed(&|s, _| s.key_heads = -1),
        "key_heads: -1; it must not be negative",
    );
    refused(packed(&|s, _| s.value_heads = 3), "value_heads: 3");
    refused(packed(&|s, _| s.key_dim = 24), "key_dim: 24");
    refused(packed(&|s, _| s.value_dim = 272), "value_dim: 272");
    refused(
        packed(&|s, _| s.qk_l2norm = 2),
        "qk_l2norm: 2; it must be 0 or 1",
    );
    refused(packed(&|s, _| s.scale = f32::NAN), "scale: NaN");
    refused(packed(&|s, _| s.save = -1), "save: -1");
    refused(
        packed(&|s, _| s.save = 100),
        "save: boundaries every 100 tokens; tokens must be a positive multiple of 64",
    );
    for (save, wanted) in [(0, 0), (abi::DW_SAVE_BOUNDARIES as i32, 64), (192, 192)] {
        let (s, mut tokens) = (dw_prefill_spec { save, ..spec() }, -1);
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_prefill_round_tokens(&s, &mut tokens) });
        assert!(tokens % 64 == 0 && tokens >= wanted && (save != 0 || tokens == 0));
    }
    let wrong = dw_prefill_spec {
        key_dim: 1 << 20,
        save: 1,
        ..spec()
    };
    // SAFETY: as above.
    refused(
        unsafe { dw_prefill_round_tokens(&wrong, &mut 0) },
        "key_dim: 1048576",
    );
    refused(packed(&|_, l| l.size = 0), "cu_seqlens.size: 0");
    refused(packed(&|_, l| l.dtype = 0), "cu_seqlens.dtype: 0");
    refused(packed(&|_, l| l.entries = -1), "cu_seqlens.entries: -1");
    refused(packed(&|_, l| l.entries = 0), "cu_seqlens: it is empty");
    refused(
        packed(&|_, l| l.data = null()),
        "cu_seqlens.data: a null pointer",
    );
    refused(
        packed(&|_, l| l.data = l.data.wrapping_byte_add(1)),
        "cu_seqlens: 3 entries at",
    );
    refused(packed(&|_, l| l.entries = i64::MAX), "cu_seqlens: ");
    let down = [0i64, 7, 5];
    refused(
        packed(&|_, l| l.data = down.as_ptr().cast()),
        "cu_seqlens: entry 2 is 5, after 7",
    );
    let narrow = [0i32, 5, 9];
    fine(packed(&|_, l| {
        l.data = narrow.as_ptr().cast();
        l.dtype = abi::DW_I32 as i32;
    }));

    let mut plan = null_mut();
    let (spec, lengths) = (spec(), lengths());
    // SAFETY: pointers are valid, or null.
    unsafe {
        refused(
            dw_prefill_packed(context, null(), &lengths, TOKENS, &mut plan),
            "spec: a null pointer",
        );
        refused(
            dw_prefill_packed(context, &spec, null(), TOKENS, &mut plan),
            "cu_seqlens: a null pointer",
        );
        refused(
            dw_prefill_packed(null(), &spec, &lengths, TOKENS, &mut plan),
            "context: a null pointer",
        );
        refused(
            dw_prefill_packed(context, &spec, &lengths, -1, &mut plan),
            "tokens: -1",
        );
        refused(
            dw_prefill_packed(context, &spec, &lengths, TOKENS, null_mut()),
            "plan: a null pointer",
        );
        refused(
            dw_prefill_dense(context, &spec, -1, 4, &mut plan),
            "batch: -1",
        );
        refused(
            dw_prefill_dense(context, &spec, i64::MAX, 4, &mut plan),
            "tokens: ",
        );
        refused(
            dw_prefill_device(context, &spec, 4, -1, &mut plan),
            "sequences: -1",
        );
        refused(
            dw_prefill_workspace_bytes(null(), &mut 0),
            "plan: a null pointer",
        );
        dw_prefill_destroy(null_mut());
        dw_context_destroy(context);
    }
}

/// A struct of a later version: longer, and all zeros where this one knows nothing.
#[repr(C)]
struct Longer {
    spec: dw_prefill_spec,
    news: u64,
}

#[test]
fn later_versions() {
    let context = simulator();
    let mut longer = Longer {
        spec: dw_prefill_spec {
            size: size_of::<Longer>(),
            ..spec()
        },
        news: 0,
    };
    // SAFETY: the struct has the size that it states.
    unsafe {
        let mut plan = null_mut();
        fine(dw_prefill_dense(
            context,
            (&raw const longer).cast(),
            1,
            4,
            &mut plan,
        ));
        dw_prefill_destroy(plan);
        longer.news = 1;
        refused(
            dw_prefill_dense(context, (&raw const longer).cast(), 1, 4, &mut plan),
            "spec: a field is set that this version",
        );
        dw_context_destroy(context);
    }
}

/// Valid tensors, all in one allocation of which nothing is read where a launch is refused.
struct Launch {
    context: *mut dw_context,
    memory: *mut c_void,
    q: dw_tensor,
    k: dw_tensor,
    v: dw_tensor,
    o: dw_tensor,
    g: dw_tensor,
    state: dw_tensor,
    per_head: dw_tensor,
    bytes: usize,
}

const ROOM: usize = 1 << 20;

impl Launch {
    fn new(dense: bool) -> Self {
        let context = simulator();
        let mut memory = null_mut();
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_malloc(context, ROOM, &mut memory) });
        // Zeros are written, so that the simulator knows all that is read.
        let zeros = vec![0u8; ROOM];
        let there = abi::DW_TO_DEVICE as c_int;
        // SAFETY: both sides have that many bytes.
        fine(unsafe { dw_copy(context, memory, zeros.as_ptr().cast(), ROOM, there) });
        let at = |i: usize| memory.wrapping_byte_add(i << 14);
        let (first, n): (&[i64], _) = if dense { (&[2, 5], 2) } else { (&[TOKENS], 2) };
        let make = |i, dtype, rest: &[i64]| tensor(at(i), dtype, &[first, rest].concat());
        Launch {
            context,
            memory,
            q: make(0, abi::DW_BF16, &[HK, K]),
            k: make(1, abi::DW_BF16, &[HK, K]),
            v: make(2, abi::DW_BF16, &[HV, V]),
            o: make(3, abi::DW_BF16, &[HV, V]),
            g: make(4, abi::DW_F32, &[HV]),
            state: tensor(at(5), abi::DW_F32, &[n, HV, K, V]),
            per_head: tensor(at(7), abi::DW_F32, &[HV]),
            bytes: ROOM - (8 << 14),
        }
    }

    fn tensors(&self) -> dw_prefill_tensors {
        dw_prefill_tensors {
            size: size_of::<dw_prefill_tensors>(),
            q: &self.q,
            k: &self.k,
            v: &self.v,
            o: &self.o,
            final_state: &self.state,
            workspace: self.memory.wrapping_byte_add(8 << 14),
            workspace_bytes: self.bytes,
            ..Default::default()
        }
    }

    /// Launches what `change` makes of the valid request.
    fn run(&self, plan: *mut dw_prefill, change: impl FnOnce(&mut dw_prefill_tensors)) -> c_int {
        let mut tensors = self.tensors();
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_prefill_launch(plan, null_mut(), &tensors) }
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and not used any more.
        unsafe {
            dw_free(self.context, self.memory);
            dw_context_destroy(self.context);
        }
    }
}

/// A plan that saves the states between rounds says how much, and takes no less.
#[test]
fn saved_context() {
    let x = Launch::new(false);
    let s = dw_prefill_spec { save: 64, ..spec() };
    let (rows, mut plan, mut bytes) = (200i64, null_mut(), 0);
    let given = [0i64, 130, 200];
    let lengths = dw_lengths {
        data: given.as_ptr().cast(),
        ..lengths()
    };
    // SAFETY: the pointers are valid.
    unsafe {
        fine(dw_prefill_packed(x.context, &s, &lengths, rows, &mut plan));
        fine(dw_prefill_context_bytes(plan, &mut bytes));
        // Boundaries after 64 and 128 tokens of one sequence, and after 64 of the other.
        assert_eq!(bytes, 3 * (HV * K * V * 4) as usize);
        refused(
            dw_prefill_context_bytes(plan, null_mut()),
            "bytes: a null pointer",
        );
        refused(
            dw_prefill_device(x.context, &s, rows, 2, &mut null_mut()),
            "save: boundaries; it must be nothing",
        );
        dw_prefill_destroy(plan);
    }
}

#[test]
fn launches() {
    let x = Launch::new(false);
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_packed(x.context, &spec(), &lengths(), TOKENS, &mut plan) });
    let mut workspace = 0;
    // SAFETY: as above.
    fine(unsafe { dw_prefill_workspace_bytes(plan, &mut workspace) });
    let run = |change: &dyn Fn(&mut dw_prefill_tensors)| x.run(plan, change);
    fine(run(&|t| t.workspace_bytes = workspace));
    fine(run(&|t| (t.g, t.beta) = (&x.g, &x.g)));
    fine(run(&|t| {
        (t.a, t.b, t.a_log, t.dt_bias) = (&x.g, &x.g, &x.per_head, &x.per_head);
        t.allow_neg_eigval = 1;
    }));
    // The handle keeps what it needs: the initial state is the final one, in place.
    let flags = x.memory.cast_const().cast();
    fine(run(&|t| {
        (t.initial_state, t.has_initial_state) = (&x.state, flags)
    }));

    // The spec saves nothing, which needs no memory; what is given must be memory all the same.
    fine(run(&|t| (t.context, t.context_bytes) = (t.workspace, 0)));
    refused(run(&|t| t.size = 4), "tensors.size: 4");
    // Half of a field more than there is.
    let cut = size_of::<dw_prefill_tensors>() + 4;
    refused(run(&|t| t.size = cut), &format!("tensors.size: {cut}"));
    refused(run(&|t| t.q = null()), "q: a null pointer");
    refused(run(&|t| t.o = null()), "o: a null pointer");
    refused(
        run(&|t| t.workspace = null_mut()),
        "workspace: a null pointer",
    );
    let less = workspace - 1;
    refused(
        run(&|t| t.workspace_bytes = less),
        &format!("workspace: {less} bytes"),
    );
    refused(run(&|t| t.initial_layout = 5), "initial_layout: 5");
    refused(run(&|t| t.final_layout = -1), "final_layout: -1");
    refused(
        run(&|t| t.has_initial_state = flags),
        "has_initial_state: given without",
    );
    refused(
        run(&|t| t.allow_neg_eigval = 1),
        "allow_neg_eigval: set without raw gates",
    );
    refused(
        run(&|t| (t.g, t.a) = (&x.g, &x.g)),
        "g: given together with raw gates",
    );
    refused(run(&|t| t.a = &x.g), "b: a null pointer");
    refused(run(&|t| t.dt_bias = &x.per_head), "a: a null pointer");
    let given = lengths();
    refused(
        run(&|t| t.cu_seqlens = &given),
        "cu_seqlens: given to a plan that already has lengths",
    );

    let changed = |change: &dyn Fn(&mut dw_tensor)| {
        let mut v = x.v;
        change(&mut v);
        run(&|t| t.v = &v)
    };
    refused(changed(&|v| v.size = 1), "v.size: 1");
    refused(changed(&|v| v.data = null_mut()), "v: a null pointer");
    refused(changed(&|v| v.dtype = abi::DW_F16 as i32), "v: dtype fp16");
    refused(changed(&|v| v.dtype = 77), "v.dtype: 77");
    refused(changed(&|v| v.rank = 5), "v.rank: 5");
    refused(changed(&|v| v.rank = 0), "v.rank: 0");
    refused(
        changed(&|v| v.rank = 2),
        "v: shape [9, 4]; it must be [T, H, D]",
    );
    refused(
        changed(&|v| v.shape[0] = 8),
        "v: shape [8, 4, 16]; it must be [9, 4, 16]",
    );
    refused(changed(&|v| v.shape[1] = -4), "v.shape[1]: -4");
    refused(changed(&|v| v.strides[0] = -1), "v.strides[0]: -1");
    refused(
        changed(&|v| v.strides[2] = 2),
        "v: an innermost stride of 2",
    );
    let state = dw_tensor { rank: 3, ..x.state };
    refused(
        run(&|t| t.final_state = &state),
        "final_state: shape [2, 4, 32]; it must be [N, HV, K, V]",
    );
    // SAFETY: the pointers are valid, or null.
    unsafe {
        refused(
            dw_prefill_launch(null(), null_mut(), &x.tensors()),
            "plan: a null pointer",
        );
        refused(
            dw_prefill_launch(plan, null_mut(), null()),
            "tensors: a null pointer",
        );
        dw_prefill_destroy(plan);
    }
}

#[test]
fn dense_and_device_plans() {
    let x = Launch::new(true);
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_dense(x.context, &spec(), 2, 5, &mut plan) });
    fine(x.run(plan, |t| t.beta = &x.g));
    let flat = tensor(x.q.data, abi::DW_BF16, &[10, HK, K]);
    refused(
        x.run(plan, |t| t.q = &flat),
        "q: shape [10, 2, 32]; it must be [2, 5, 2, 32]",
    );
    // SAFETY: made above.
    unsafe { dw_prefill_destroy(plan) };

    let x = Launch::new(false);
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_device(x.context, &spec(), TOKENS, 2, &mut plan) });
    refused(x.run(plan, |_| {}), "cu_seqlens: absent");
    let mut there = lengths();
    there.data = x.memory;
    fine(x.run(plan, |t| t.cu_seqlens = &there));
    there.entries = 2;
    refused(
        x.run(plan, |t| t.cu_seqlens = &there),
        "cu_seqlens: 2 elements",
    );
    // SAFETY: made above.
    unsafe { dw_prefill_destroy(plan) };
}

#[test]
fn gates() {
    let x = Launch::new(false);
    let (mut g, mut beta) = (x.g, x.g);
    g.data = x.memory.wrapping_byte_add(10 << 14);
    beta.data = x.memory.wrapping_byte_add(11 << 14);
    let tensors = dw_gate_tensors {
        size: size_of::<dw_gate_tensors>(),
        a: &x.g,
        b: &x.g,
        a_log: &x.per_head,
        g: &g,
        beta: &beta,
        ..Default::default()
    };
    let run = |change: &dyn Fn(&mut dw_gate_tensors)| {
        let mut tensors = tensors;
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_gate_launch(x.context, null_mut(), &tensors) }
    };
    fine(run(&|_| {}));
    let mut found = [0f32; (TOKENS * HV) as usize];
    let back = abi::DW_TO_HOST as c_int;
    let mut download = |from: &dw_tensor| {
        // SAFETY: both sides have that many bytes.
        unsafe {
            fine(dw_synchronize(x.context, null_mut()));
            let bytes = size_of_val(&found);
            fine(dw_copy(
                x.context,
                found.as_mut_ptr().cast(),
                from.data,
                bytes,
                back,
            ));
        }
        found
    };
    // All inputs are 0: -exp(0) softplus(0) and sigmoid(0).
    assert!(download(&g).iter().all(|g| (g + 2f32.ln()).abs() < 1e-6));
    assert!(download(&beta).iter().all(|beta| *beta == 0.5));
    fine(run(&|t| (t.dt_bias, t.allow_neg_eigval) = (&x.per_head, 1)));
    assert!(download(&beta).iter().all(|beta| *beta == 1.0));

    refused(run(&|t| t.size = 0), "tensors.size: 0");
    refused(run(&|t| t.a = null()), "a: a null pointer");
    refused(run(&|t| t.g = null()), "g: a null pointer");
    refused(
        run(&|t| t.a_log = &x.g),
        "a_log: shape [9, 4]; it must be [HV]",
    );
    refused(run(&|t| t.allow_neg_eigval = 3), "allow_neg_eigval: 3");
}

/// A dimension of length 1 has a stride of any kind: NumPy and torch leave what they like there.
#[test]
fn strides_that_lead_nowhere() {
    let x = Launch::new(false);
    let one = dw_prefill_spec {
        key_heads: 1,
        value_heads: 1,
        ..spec()
    };
    let ends = [0i64, 1];
    let lengths = dw_lengths {
        data: ends.as_ptr().cast(),
        entries: 2,
        ..lengths()
    };
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_packed(x.context, &one, &lengths, 1, &mut plan) });
    for wild in [i64::MAX, i64::MIN, 1 << 41, -3, 0] {
        let make = |like: &dw_tensor, shape: &[i64]| {
            let mut made = tensor(like.data, like.dtype as u32, shape);
            for i in (0..shape.len()).filter(|i| shape[*i] == 1) {
                made.strides[i] = wild;
            }
            made
        };
        let (q, k) = (make(&x.q, &[1, 1, K]), make(&x.k, &[1, 1, K]));
        let (v, o) = (make(&x.v, &[1, 1, V]), make(&x.o, &[1, 1, V]));
        let (g, state) = (make(&x.g, &[1, 1]), make(&x.state, &[1, 1, K, V]));
        fine(x.run(plan, |t| {
            (t.q, t.k, t.v, t.o, t.g) = (&q, &k, &v, &o, &g);
            (t.initial_state, t.final_state) = (&state, &state);
        }));
        // SAFETY: the context is alive.
        fine(unsafe { dw_synchronize(x.context, null_mut()) });
    }
    // SAFETY: made above.
    unsafe { dw_prefill_destroy(plan) };
}

/// A handle that the runtime does not know is an error of the argument `stream`, and nothing is enqueued.
#[test]
fn streams_that_are_none() {
    let x = Launch::new(false);
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_packed(x.context, &spec(), &lengths(), TOKENS, &mut plan) });
    let gate = dw_gate_tensors {
        size: size_of::<dw_gate_tensors>(),
        a: &x.g,
        b: &x.g,
        a_log: &x.per_head,
        g: &x.g,
        beta: &x.g,
        ..Default::default()
    };
    for handle in [0xdead_usize, usize::MAX, 3] {
        let stream = std::ptr::without_provenance_mut(handle);
        let wanted = format!("stream: 0x{handle:x}, for which the runtime says");
        // SAFETY: the pointers are valid; the simulator looks streams up.
        unsafe {
            refused(dw_prefill_launch(plan, stream, &x.tensors()), &wanted);
            refused(dw_synchronize(x.context, stream), &wanted);
            let gate = dw_gate_tensors {
                g: &dw_tensor {
                    data: x.memory.wrapping_byte_add(10 << 14),
                    ..x.g
                },
                beta: &dw_tensor {
                    data: x.memory.wrapping_byte_add(11 << 14),
                    ..x.g
                },
                ..gate
            };
            refused(dw_gate_launch(x.context, stream, &gate), &wanted);
        }
    }
    fine(x.run(plan, |_| {}));
    // SAFETY: made above.
    unsafe { dw_prefill_destroy(plan) };
}
