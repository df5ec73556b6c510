//! The convolution through the C interface: results, and what is refused, by the name of the argument.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_OK, dw_context, dw_conv, dw_conv_spec, dw_conv_tensors, dw_lengths,
    dw_tensor,
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

const TOKENS: usize = 6;
/// Two key heads of 3 and two value heads of 4.
const CHANNELS: usize = 20;
/// Columns of interleaved rows: z, too.
const COLUMNS: usize = 28;
const LENGTHS: [i32; 3] = [0, 2, 6];

fn spec() -> dw_conv_spec {
    dw_conv_spec {
        size: size_of::<dw_conv_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: 2,
        value_heads: 2,
        key_dim: 3,
        value_dim: 4,
        width: 3,
        activation: abi::DW_ACTIVATION_NONE as i32,
        ..Default::default()
    }
}

/// Tensors in memory of the device, all of it ones.
struct Launch {
    context: *mut dw_context,
    memory: *mut c_void,
    lengths: dw_lengths,
    x: dw_tensor,
    weight: dw_tensor,
    state: dw_tensor,
    out: [dw_tensor; 3],
}

const PART: usize = 1 << 12;

impl Launch {
    fn new() -> Self {
        let (mut context, mut memory) = (null_mut(), null_mut());
        let ones = vec![bf16::ONE; 16 * PART / 2];
        // SAFETY: the pointers are valid, and the copy has that many bytes on both sides.
        unsafe {
            let simulator = abi::DW_BACKEND_SIMULATOR as c_int;
            fine(dw_context_create(simulator, 0, &mut context));
            fine(dw_malloc(context, 16 * PART, &mut memory));
            let to_device = abi::DW_TO_DEVICE as c_int;
            fine(dw_copy(
                context,
                memory,
                ones.as_ptr().cast(),
                16 * PART,
                to_device,
            ));
        }
        let tensor = |part: usize, shape: &[usize]| {
            let mut t = dw_tensor {
                size: size_of::<dw_tensor>(),
                data: memory.wrapping_byte_add(part * PART),
                dtype: abi::DW_BF16 as i32,
                rank: shape.len() as i32,
                ..Default::default()
            };
            let mut stride = 1;
            for (i, n) in shape.iter().enumerate().rev() {
                (t.shape[i], t.strides[i]) = (*n as i64, stride);
                stride *= *n as i64;
            }
            t
        };
        Launch {
            context,
            memory,
            lengths: dw_lengths {
                size: size_of::<dw_lengths>(),
                data: LENGTHS.as_ptr().cast(),
                entries: 3,
                dtype: abi::DW_I32 as i32,
                ..Default::default()
            },
            x: tensor(0, &[TOKENS, COLUMNS]),
            weight: tensor(1, &[CHANNELS, 3]),
            state: tensor(2, &[2, CHANNELS, 2]),
            out: [
                tensor(3, &[TOKENS, 2, 3]),
                tensor(4, &[TOKENS, 2, 3]),
                tensor(5, &[TOKENS, 2, 4]),
            ],
        }
    }

    fn plan(&self) -> *mut dw_conv {
        let mut plan = null_mut();
        // SAFETY: the pointers are valid.
        fine(unsafe {
            dw_conv_packed(
                self.context,
                &spec(),
                &self.lengths,
                TOKENS as i64,
                &mut plan,
            )
        });
        plan
    }

    /// Launches what `change` makes of the valid request.
    fn run(&self, plan: *mut dw_conv, change: impl FnOnce(&mut dw_conv_tensors)) -> c_int {
        let [q, k, v] = &self.out;
        let mut tensors = dw_conv_tensors {
            size: size_of::<dw_conv_tensors>(),
            x: &self.x,
            weight: &self.weight,
            state: &self.state,
            q,
            k,
            v,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_conv_launch(plan, null_mut(), &tensors) }
    }

    /// The first numbers of a part of the memory.
    fn read<const N: usize>(&self, part: usize) -> [f32; N] {
        let mut found = [bf16::ZERO; N];
        // SAFETY: both sides have that many bytes.
        unsafe {
            fine(dw_synchronize(self.context, null_mut()));
            fine(dw_copy(
                self.context,
                found.as_mut_ptr().cast(),
                self.memory.wrapping_byte_add(part * PART),
                2 * N,
                abi::DW_TO_HOST as c_int,
            ));
        }
        found.map(bf16::to_f32)
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        // SAFETY: made with it, and plans have a share of the context of their own.
        unsafe {
            dw_free(self.context, self.memory);
            dw_context_destroy(self.context);
        }
    }
}

#[test]
fn sums_of_ones() {
    let x = Launch::new();
    let plan = x.plan();
    let no = x.memory.wrapping_byte_add(6 * PART).cast::<u8>();
    let zeros = [0u8; 2];
    // SAFETY: both sides have two bytes.
    fine(unsafe {
        let to_device = abi::DW_TO_DEVICE as c_int;
        dw_copy(x.context, no.cast(), zeros.as_ptr().cast(), 2, to_device)
    });
    for layout in [abi::DW_CONV_FLAT, abi::DW_CONV_INTERLEAVED] {
        fine(x.run(plan, |t| t.x_layout = layout as i32));
        assert_eq!(x.read::<36>(3), [3.0; 36]);
        // Without an initial state the first tokens have fewer summands.
        fine(x.run(plan, |t| {
            (t.x_layout, t.has_initial_state) = (layout as i32, no)
        }));
        let first = x
            .read::<48>(5)
            .chunks_exact(8)
            .map(|row| row[0])
            .collect::<Vec<_>>();
        assert_eq!(first, [1.0, 2.0, 1.0, 2.0, 3.0, 3.0]);
        assert_eq!(x.read::<80>(2), [1.0; 80]);
    }
    // SAFETY: made above.
    unsafe {
        dw_conv_destroy(plan);
        dw_conv_destroy(null_mut());
    }
}

#[test]
fn separate_tensors_and_lengths_on_the_device() {
    let x = Launch::new();
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_conv_device(x.context, &spec(), TOKENS as i64, 2, &mut plan) });
    let mut there = x.lengths;
    there.data = x.memory.wrapping_byte_add(7 * PART);
    // SAFETY: both sides have that many bytes.
    fine(unsafe {
        let (from, bytes) = (LENGTHS.as_ptr().cast(), size_of_val(&LENGTHS));
        dw_copy(
            x.context,
            there.data.cast_mut(),
            from,
            bytes,
            abi::DW_TO_DEVICE as c_int,
        )
    });
    let mut inputs = x.out;
    for (i, input) in inputs.iter_mut().enumerate() {
        input.data = x.memory.wrapping_byte_add((8 + i) * PART);
    }
    let separate = |t: &mut dw_conv_tensors| {
        t.cu_seqlens = &there;
        t.x_layout = abi::DW_CONV_SEPARATE as i32;
        (t.x, t.x_q, t.x_k, t.x_v) = (null(), &inputs[0], &inputs[1], &inputs[2]);
    };
    fine(x.run(plan, separate));
    assert_eq!(x.read::<36>(4), [3.0; 36]);
    let unused = |t: &mut dw_conv_tensors| {
        separate(t);
        t.x = &x.x;
    };
    refused(x.run(plan, unused), "x: given with an x_layout");
    refused(x.run(plan, |t| t.x_k = &x.x), "x_k: given with an x_layout");
    let mut wrong = inputs[1];
    wrong.dtype = abi::DW_F16 as i32;
    let wrong = |t: &mut dw_conv_tensors| {
        separate(t);
        t.x_k = &wrong;
    };
    refused(x.run(plan, wrong), "x_k: dtype");
    refused(x.run(plan, |_| {}), "cu_seqlens: absent");
    there.entries = 2;
    refused(
        x.run(plan, |t| t.cu_seqlens = &there),
        "cu_seqlens: 2 elements",
    );
    // SAFETY: made above.
    unsafe { dw_conv_destroy(plan) };
}

/// Rows of ones have norm 1 / sqrt(3) of ones, and gates of zeros and ones are known numbers.
#[test]
fn norms_and_gates_in_the_launch() {
    let x = Launch::new();
    let mut normed = spec();
    normed.qk_l2norm = 1;
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_conv_packed(x.context, &normed, &x.lengths, TOKENS as i64, &mut plan) });
    let tensor = |part: usize, dtype: u32, shape: &[i64], strides: &[i64]| {
        let mut t = x.x;
        t.data = x.memory.wrapping_byte_add(part * PART);
        (t.dtype, t.rank) = (dtype as i32, shape.len() as i32);
        t.shape[..shape.len()].copy_from_slice(shape);
        t.strides[..strides.len()].copy_from_slice(strides);
        t
    };
    // Two key heads with a value head each: rows b a b a.
    let b = tensor(11, abi::DW_BF16, &[6, 2, 1], &[4, 2, 1]);
    let mut a = b;
    a.data = a.data.wrapping_byte_add(2);
    let a_log = tensor(12, abi::DW_BF16, &[2], &[1]);
    let g = tensor(13, abi::DW_F32, &[6, 2], &[2, 1]);
    let beta = tensor(14, abi::DW_F32, &[6, 2], &[2, 1]);
    let gates = |t: &mut dw_conv_tensors| {
        (t.a, t.b, t.a_log, t.g, t.beta) = (&a, &b, &a_log, &g, &beta);
        t.allow_neg_eigval = 1;
    };
    fine(x.run(plan, gates));
    assert_eq!(x.read::<36>(3), [0.578125; 36], "1 / sqrt(3) in bf16");
    assert_eq!(x.read::<48>(5), [3.0; 48], "v has no norm");
    let f32s = |part| {
        let halves = x.read::<24>(part).map(|h| bf16::from_f32(h).to_bits());
        let words = halves.chunks_exact(2);
        let words = words.map(|w| f32::from_bits(u32::from(w[0]) | u32::from(w[1]) << 16));
        words.collect::<Vec<_>>()
    };
    let e = std::f32::consts::E;
    for (g, beta) in f32s(13).into_iter().zip(f32s(14)) {
        assert!((g + e * e.ln_1p()).abs() < 1e-5, "{g}");
        assert!((beta - 2.0 / (1.0 + 1.0 / e)).abs() < 1e-6, "{beta}");
    }
    refused(
        x.run(plan, |t| t.allow_neg_eigval = 1),
        "allow_neg_eigval: set without gates",
    );
    let without = |t: &mut dw_conv_tensors| {
        gates(t);
        t.beta = null();
    };
    refused(x.run(plan, without), "beta: a null pointer");
    // Callers of the version before these fields.
    let short = |t: &mut dw_conv_tensors| t.size = std::mem::offset_of!(dw_conv_tensors, a);
    fine(x.run(plan, short));
    let mut old = spec();
    old.size = std::mem::offset_of!(dw_conv_spec, qk_l2norm);
    // SAFETY: made above, and valid pointers.
    unsafe {
        dw_conv_destroy(plan);
        fine(dw_conv_packed(
            x.context,
            &old,
            &x.lengths,
            TOKENS as i64,
            &mut plan,
        ));
        dw_conv_destroy(plan);
    }
}

#[test]
fn refusals_name_the_argument() {
    let x = Launch::new();
    let mut plan = null_mut();
    let make = |plan: &mut *mut dw_conv, change: &dyn Fn(&mut dw_conv_spec)| {
        let mut spec = spec();
        change(&mut spec);
        // SAFETY: the pointers are valid.
        unsafe { dw_conv_packed(x.context, &spec, &x.lengths, TOKENS as i64, plan) }
    };
    refused(make(&mut plan, &|s| s.size = 0), "spec.size: 0");
    refused(make(&mut plan, &|s| s.dtype = 0), "dtype: dtype f32");
    refused(make(&mut plan, &|s| s.width = 5), "width: 5");
    refused(make(&mut plan, &|s| s.key_dim = -1), "key_dim: -1");
    refused(make(&mut plan, &|s| s.value_heads = 3), "value_heads: 3");
    refused(make(&mut plan, &|s| s.activation = 2), "activation: 2");
    refused(make(&mut plan, &|s| s.qk_l2norm = 2), "qk_l2norm: 2");
    assert!(plan.is_null());
    // SAFETY: the pointers are valid, or null.
    let status = unsafe { dw_conv_packed(x.context, &spec(), null(), 6, &mut plan) };
    refused(status, "cu_seqlens: a null pointer");

    let plan = x.plan();
    let mut flat = x.x;
    flat.shape[1] = 19;
    let lines = x.state;
    refused(x.run(plan, |t| t.size = 8), "tensors.size: 8");
    // Half of a pointer is none.
    let cut = std::mem::offset_of!(dw_conv_tensors, b) + 4;
    refused(
        x.run(plan, |t| t.size = cut),
        &format!("tensors.size: {cut}"),
    );
    refused(x.run(plan, |t| t.x = null()), "x: a null pointer");
    refused(x.run(plan, |t| t.x = &flat), "x: shape [6, 19]");
    refused(x.run(plan, |t| t.x = &lines), "x: shape [2, 20, 2]");
    refused(x.run(plan, |t| t.x_layout = 3), "x_layout: 3");
    refused(x.run(plan, |t| t.weight = null()), "weight: a null pointer");
    refused(x.run(plan, |t| t.bias = &x.weight), "bias: shape [20, 3]");
    refused(x.run(plan, |t| t.state = &x.x), "state: shape [6, 28]");
    refused(
        x.run(plan, |t| t.state_layout = 1),
        "state: shape [2, 20, 2]",
    );
    refused(x.run(plan, |t| t.state_layout = 2), "state_layout: 2");
    refused(x.run(plan, |t| t.v = null()), "v: a null pointer");
    refused(x.run(plan, |t| t.q = &x.out[2]), "q: shape [6, 2, 4]");
    refused(
        x.run(plan, |t| t.cu_seqlens = &x.lengths),
        "cu_seqlens: given to a plan",
    );
    let flags = x.memory.cast::<u8>();
    let without = |t: &mut dw_conv_tensors| (t.state, t.has_initial_state) = (null(), flags);
    refused(
        x.run(plan, without),
        "has_initial_state: given without a state",
    );
    refused(x.run(null_mut(), |_| {}), "plan: a null pointer");
    // SAFETY: made above.
    unsafe { dw_conv_destroy(plan) };
}
