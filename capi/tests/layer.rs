//! The layer through the C interface: the bits of the Rust API, and what is refused, by the name of the argument.

#[path = "../../tests/common/layer/mod.rs"]
mod cases;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use cases::loaded::{has_initial, pools, projections, slots, weights};
use cases::{Case, Data, run};
use deltawave::layer::LayerSpec;
use deltawave::runtime::{Backend, Context};
use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_OK, dw_context, dw_layer, dw_layer_spec, dw_layer_tensors,
    dw_lengths, dw_tensor,
};
use deltawave_c::*;

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

fn spec(s: &LayerSpec) -> dw_layer_spec {
    dw_layer_spec {
        size: size_of::<dw_layer_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: s.heads.key as i32,
        value_heads: s.heads.value as i32,
        key_dim: s.heads.key_dim as i32,
        value_dim: s.heads.value_dim as i32,
        width: s.width as i32,
        qk_l2norm: 1,
        eps: s.eps,
        ..Default::default()
    }
}

/// A dense tensor.
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

/// Some columns of rows.
fn columns(rows: &dw_tensor, range: std::ops::Range<usize>) -> dw_tensor {
    let mut t = tensor(
        rows.data.wrapping_byte_add(2 * range.start),
        abi::DW_BF16,
        &[rows.shape[0] as usize, 1, range.len()],
    );
    t.strides[0] = rows.strides[0];
    t
}

/// A case in memory of a context, and its tensors.
struct Layer {
    context: *mut dw_context,
    case: Case,
    x: dw_tensor,
    /// q, k, v and z, as tensors of their own.
    parts: [dw_tensor; 4],
    a: dw_tensor,
    b: dw_tensor,
    weights: [dw_tensor; 5],
    conv_state: dw_tensor,
    pool: dw_tensor,
    y: dw_tensor,
    slots: *mut c_void,
    has: *mut c_void,
    lengths: *mut c_void,
    host_lengths: Vec<i32>,
}

/// What lies in device memory.
fn upload(context: *mut dw_context, bytes: &[u8]) -> *mut c_void {
    let (mut memory, direction) = (null_mut(), abi::DW_TO_DEVICE as c_int);
    // SAFETY: the pointers are valid, and the copy has that many bytes on both sides.
    unsafe {
        fine(dw_malloc(context, bytes.len().max(1), &mut memory));
        let from = bytes.as_ptr().cast();
        fine(dw_copy(context, memory, from, bytes.len(), direction));
    }
    memory
}

fn bytes_of(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

impl Layer {
    fn new(case: &Case, data: &Data) -> Self {
        let mut context = null_mut();
        let simulator = abi::DW_BACKEND_SIMULATOR as c_int;
        // SAFETY: the pointer is valid.
        fine(unsafe { dw_context_create(simulator, 0, &mut context) });
        let s = &case.spec;
        let (tokens, heads, channels) = (case.tokens(), s.heads.value, case.channels());
        let up = |bytes: &[u8]| upload(context, bytes);
        let x = up(&projections(case, data));
        let x = tensor(x, abi::DW_BF16, &[tokens, channels + case.values()]);
        let keys = s.heads.key * s.heads.key_dim;
        let ends = [0, keys, 2 * keys, channels, channels + case.values()];
        let [conv, vectors @ ..] = weights(data).map(|t| up(&t.bytes));
        let mut sizes = [channels, heads, heads, s.heads.value_dim].into_iter();
        let vectors = vectors.map(|t| {
            let size = sizes.next().expect("four vectors");
            tensor(t, abi::DW_F32, &[size])
        });
        let [bias, a_log, dt_bias, norm] = vectors;
        let [conv_state, pool] = pools(case, data).map(|bytes| up(&bytes));
        let of_pool = [case.pool(), heads, s.heads.key_dim, s.heads.value_dim];
        Layer {
            context,
            case: case.clone(),
            parts: std::array::from_fn(|i| columns(&x, ends[i]..ends[i + 1])),
            x,
            a: tensor(up(&data.a.bytes), abi::DW_BF16, &[tokens, heads]),
            b: tensor(up(&data.b.bytes), abi::DW_BF16, &[tokens, heads]),
            weights: [
                tensor(conv, abi::DW_BF16, &[channels, s.width]),
                bias,
                a_log,
                dt_bias,
                norm,
            ],
            conv_state: tensor(
                conv_state,
                abi::DW_BF16,
                &[case.pool(), channels, case.columns()],
            ),
            pool: tensor(pool, abi::DW_F32, &of_pool),
            y: tensor(
                up(&vec![0xff; 2 * tokens * case.values()]),
                abi::DW_BF16,
                &[tokens, heads, s.heads.value_dim],
            ),
            slots: up(&bytes_of(&slots(case))),
            has: up(&has_initial(case)),
            lengths: up(&bytes_of(&case.cu_seqlens())),
            host_lengths: case.cu_seqlens(),
        }
    }

    fn lengths(&self, data: *const c_void) -> dw_lengths {
        dw_lengths {
            size: size_of::<dw_lengths>(),
            data,
            entries: self.host_lengths.len() as i64,
            dtype: abi::DW_I32 as i32,
            pad0: 0,
        }
    }

    fn plan(&self) -> *mut dw_layer {
        let (spec, mut plan) = (spec(&self.case.spec), null_mut());
        let (tokens, decodes) = (self.case.tokens() as i64, self.case.decodes as i64);
        let sequences = self.case.sequences() as i64;
        let lengths = self.lengths(self.host_lengths.as_ptr().cast());
        // SAFETY: the pointers are valid.
        fine(unsafe {
            match self.case.device {
                true => dw_layer_device(self.context, &spec, tokens, sequences, decodes, &mut plan),
                false => dw_layer_packed(self.context, &spec, &lengths, tokens, decodes, &mut plan),
            }
        });
        plan
    }

    /// A launch of what `change` makes of the tensors.
    fn launch(&self, plan: *mut dw_layer, change: impl FnOnce(&mut dw_layer_tensors)) -> c_int {
        let mut bytes = 0;
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_layer_workspace_bytes(plan, &mut bytes) });
        let workspace = upload(self.context, &vec![0xff; bytes]);
        let lengths = self.lengths(self.lengths);
        let [conv_weight, conv_bias, a_log, dt_bias, norm_weight] = &self.weights;
        let mut tensors = dw_layer_tensors {
            size: size_of::<dw_layer_tensors>(),
            x: &self.x,
            a: &self.a,
            b: &self.b,
            conv_weight,
            conv_bias,
            a_log,
            dt_bias,
            norm_weight,
            conv_state: &self.conv_state,
            pool: &self.pool,
            slots: self.slots.cast(),
            has_initial_state: self.has.cast(),
            y: &self.y,
            cu_seqlens: match self.case.device {
                true => &lengths,
                false => null(),
            },
            workspace,
            workspace_bytes: bytes,
            x_layout: match self.case.interleaved {
                true => abi::DW_CONV_INTERLEAVED as i32,
                false => abi::DW_CONV_FLAT as i32,
            },
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe {
            let status = dw_layer_launch(plan, null_mut(), &tensors);
            fine(dw_synchronize(self.context, null_mut()));
            fine(dw_free(self.context, workspace));
            status
        }
    }

    fn read(&self, t: &dw_tensor, size: usize) -> Vec<u8> {
        let elements: i64 = t.shape[..t.rank as usize].iter().product();
        let mut bytes = vec![0; elements as usize * size];
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: both sides have that many bytes.
        fine(unsafe {
            let direction = abi::DW_TO_HOST as c_int;
            dw_copy(self.context, to, t.data, bytes.len(), direction)
        });
        bytes
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        let [conv, bias, a_log, dt_bias, norm] = self.weights.map(|t| t.data);
        let tensors = [self.x, self.a, self.b, self.conv_state, self.pool, self.y];
        let others = [conv, bias, a_log, dt_bias, norm, self.slots, self.has];
        // SAFETY: all of it was allocated, once.
        unsafe {
            for t in tensors {
                dw_free(self.context, t.data);
            }
            for address in others {
                dw_free(self.context, address);
            }
            dw_free(self.context, self.lengths);
            dw_context_destroy(self.context);
        }
    }
}

/// b and a of each key head behind one another, as Qwen3-Next's projections have them: views of them.
fn in_blocks(layer: &Layer, data: &Data) -> [dw_tensor; 2] {
    let (spec, tokens) = (&layer.case.spec, layer.case.tokens());
    let (heads, group) = (spec.heads.value, spec.heads.value / spec.heads.key);
    let mut ba = Vec::new();
    for t in 0..tokens {
        for first in (0..heads).step_by(group) {
            let at = 2 * (t * heads + first)..2 * (t * heads + first + group);
            ba.extend_from_slice(&data.b.bytes[at.clone()]);
            ba.extend_from_slice(&data.a.bytes[at]);
        }
    }
    let ba = upload(layer.context, &ba);
    [2 * group, 0].map(|bytes| {
        let data = ba.wrapping_byte_add(bytes);
        let mut t = tensor(data, abi::DW_BF16, &[tokens, spec.heads.key, group]);
        (t.strides[0], t.strides[1]) = (2 * heads as i64, 2 * group as i64);
        t
    })
}

/// Two decodes, one of them padding, and prefills.
fn mixed() -> Case {
    Case {
        tail: 2,
        padding: 0b0010,
        ..Case::new(LayerSpec::new(2, 4, 32, 48), &[1, 1, 70, 3], 2)
    }
}

#[test]
fn the_bits_of_the_rust_api() {
    let rust = Context::new(Backend::Simulator, 0).expect("a simulator");
    for (device, interleaved, separate) in [
        (false, false, false),
        (false, true, false),
        (true, false, true),
    ] {
        let case = Case {
            device,
            interleaved,
            ..mixed()
        };
        let data = Data::new(&case);
        let expected = run(&rust, &case, &data);
        let layer = Layer::new(&case, &data);
        let plan = layer.plan();
        let [a, b] = in_blocks(&layer, &data);
        fine(layer.launch(plan, |t| {
            if interleaved {
                (t.a, t.b) = (&a, &b);
            }
            if separate {
                let [q, k, v, z] = &layer.parts;
                (t.x, t.x_q, t.x_k, t.x_v, t.z) = (null(), q, k, v, z);
                t.x_layout = abi::DW_CONV_SEPARATE as i32;
            }
        }));
        assert!(layer.read(&layer.y, 2) == expected.y.bytes, "y: {case:?}");
        let conv_states = layer.read(&layer.conv_state, 2);
        assert!(conv_states == expected.conv_states.bytes, "{case:?}");
        let states = layer.read(&layer.pool, 4);
        assert!(states == expected.states.bytes, "states: {case:?}");
        // SAFETY: made above; b begins where the memory does.
        unsafe {
            dw_free(layer.context, b.data);
            dw_layer_destroy(plan);
        }
    }
}

#[test]
fn plans_that_are_refused() {
    let case = mixed();
    let layer = Layer::new(&case, &Data::new(&case));
    let lengths = layer.lengths(layer.host_lengths.as_ptr().cast());
    let mut plan = null_mut();
    let mut packed = |change: fn(&mut dw_layer_spec), tokens, decodes| {
        let mut spec = spec(&case.spec);
        change(&mut spec);
        // SAFETY: the pointers are valid.
        unsafe { dw_layer_packed(layer.context, &spec, &lengths, tokens, decodes, &mut plan) }
    };
    refused(packed(|s| s.size = 8, 75, 2), "spec.size");
    refused(packed(|s| s.dtype = abi::DW_F32 as i32, 75, 2), "dtype");
    refused(packed(|s| s.width = 5, 75, 2), "width");
    refused(packed(|s| s.key_dim = 24, 75, 2), "key_dim");
    refused(packed(|s| s.eps = 0.0, 75, 2), "eps");
    refused(packed(|s| s.gate = 2, 75, 2), "gate");
    refused(packed(|s| s.qk_l2norm = 2, 75, 2), "qk_l2norm");
    refused(packed(|s| s.segments = -1, 75, 2), "segments");
    refused(packed(|s| s.path = 4, 75, 2), "path");
    refused(packed(|_| (), 75, 3), "decodes");
    refused(packed(|_| (), 75, -1), "decodes");
    refused(packed(|_| (), 10, 2), "cu_seqlens");
    assert!(plan.is_null());
    let mut device = |sequences, decodes| {
        let spec = spec(&case.spec);
        // SAFETY: the pointers are valid.
        unsafe { dw_layer_device(layer.context, &spec, 10, sequences, decodes, &mut plan) }
    };
    refused(device(2, 3), "decodes");
    refused(device(-1, 0), "sequences");
    assert!(plan.is_null());
}

#[test]
fn launches_that_are_refused() {
    let case = mixed();
    let layer = Layer::new(&case, &Data::new(&case));
    let plan = layer.plan();
    let lengths = layer.lengths(layer.lengths);
    let refuse = |change: &dyn Fn(&mut dw_layer_tensors), wanted| {
        refused(layer.launch(plan, change), wanted);
    };
    refuse(&|t| t.size = 8, "tensors.size");
    refuse(&|t| t.x = null(), "x: a null pointer");
    refuse(&|t| t.x_q = t.x, "x_q");
    refuse(&|t| t.x_layout = 3, "x_layout");
    refuse(&|t| t.z = t.a, "z");
    refuse(&|t| t.a = null(), "a: a null pointer");
    refuse(&|t| t.conv_weight = t.a, "conv_weight");
    refuse(&|t| t.conv_bias = t.a_log, "conv_bias");
    refuse(&|t| t.a_log = t.norm_weight, "a_log");
    refuse(&|t| t.dt_bias = t.norm_weight, "dt_bias");
    refuse(&|t| t.norm_weight = t.a_log, "norm_weight");
    refuse(&|t| t.conv_layout = 1, "conv_state");
    refuse(&|t| t.pool_layout = 1, "pool");
    refuse(&|t| t.pool_layout = 2, "pool_layout");
    refuse(&|t| t.y = null(), "y: a null pointer");
    refuse(&|t| t.cu_seqlens = &lengths, "cu_seqlens");
    refuse(&|t| t.workspace_bytes -= 1, "workspace");
    let mut few = layer.conv_state;
    few.shape[0] = 2;
    refuse(&|t| t.conv_state = &few, "conv_state");
    let [q, k, v, _] = &layer.parts;
    let separate = |t: &mut dw_layer_tensors| {
        (t.x, t.x_q, t.x_k, t.x_v) = (null(), q, k, v);
        t.x_layout = abi::DW_CONV_SEPARATE as i32;
    };
    refuse(&separate, "z: absent");
    let mut short = *v;
    short.shape[2] -= 1;
    let shorter = |t: &mut dw_layer_tensors| {
        separate(t);
        (t.x_v, t.z) = (&short, v);
    };
    refuse(&shorter, "x_v: shape");
    fine(layer.launch(plan, |_| ()));
    // SAFETY: made above; null does nothing.
    unsafe {
        refused(dw_layer_launch(null(), null_mut(), null()), "plan");
        dw_layer_destroy(plan);
        dw_layer_destroy(null_mut());
    }
    let device = Case {
        device: true,
        ..case
    };
    let layer = Layer::new(&device, &Data::new(&device));
    let plan = layer.plan();
    let refuse = layer.launch(plan, |t| t.cu_seqlens = null());
    refused(refuse, "cu_seqlens: absent");
    // SAFETY: as above.
    unsafe { dw_layer_destroy(plan) };
}
