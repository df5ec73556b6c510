//! A HIP runtime that does nothing at once and counts its calls: with it, what a launch costs the host is the library's
//! own part. Device memory is addresses that nobody follows.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use deltawave::gates::Gating;
use deltawave::prefill::{PrefillSpec, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::InitialState;
use deltawave::state::States;
use deltawave::state::{State, StateMut};
use deltawave::tensor::Buffer;
use deltawave::types::StateLayout;
use half::bf16;
use hip_sys::{Hip, hipDeviceProp_tR0600, hipError_t, types::*};

/// Calls of each function of the table, in the order of [`Hip::FUNCTIONS`].
static CALLS: [AtomicU64; Hip::FUNCTIONS.len()] =
    [const { AtomicU64::new(0) }; Hip::FUNCTIONS.len()];

/// The functions that were called since the last look, and how often. Allocates.
pub fn take_calls() -> Vec<(&'static str, u64)> {
    let counts = CALLS.iter().map(|c| c.swap(0, Ordering::Relaxed));
    let named = Hip::FUNCTIONS.iter().copied().zip(counts);
    named.filter(|(_, count)| *count > 0).collect()
}

/// Launches may set the device and launch kernels, so many at most.
pub fn assert_only_launches(most: u64, what: &str) {
    let calls = take_calls();
    for &(name, count) in &calls {
        let allowed = match name {
            "hipSetDevice" => 1,
            "hipModuleLaunchKernel" => most,
            _ => 0,
        };
        assert!(count <= allowed, "{what}: {calls:?}");
    }
    let launches = calls.iter().find(|(n, _)| *n == "hipModuleLaunchKernel");
    assert!(launches.is_some(), "{what}: {calls:?}");
}

/// A context on the runtime's device, an MI300X by what it says. The code objects are loaded, and nobody reads them.
pub fn context() -> deltawave::Result<Context> {
    // SAFETY: the casts in `resolver` check that the functions have the signatures of the table.
    let hip = unsafe { Hip::from_resolver("a runtime that does nothing", resolver) };
    Context::with_runtime(hip, 0)
}

/// A function for each of the table, which counts, and says that it succeeded.
macro_rules! nothing {
    (;
        status { $($(#[$a:meta])* fn $status:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$b:meta])* fn $other:ident($($other_arg:ident: $other_type:ty),*) -> $result:ty;)* }
    ) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        enum Index { $($status,)* }

        #[allow(non_snake_case, unused_variables, clippy::too_many_arguments)]
        mod functions {
            use super::*;
            $(pub unsafe extern "C" fn $status($($arg: $type),*) -> hipError_t {
                CALLS[Index::$status as usize].fetch_add(1, Ordering::Relaxed);
                hipError_t::hipSuccess
            })*
        }

        /// The function of a name; null if there is none.
        pub fn resolver(name: &str) -> *const c_void {
            match name {
                // What the library reads an answer of.
                "hipGetDeviceCount" => {
                    (device_count as unsafe extern "C" fn(*mut c_int) -> hipError_t) as *const c_void
                }
                "hipGetDevicePropertiesR0600" => {
                    (properties as unsafe extern "C" fn(*mut hipDeviceProp_tR0600, c_int) -> hipError_t)
                        as *const c_void
                }
                "hipMalloc" => {
                    (malloc as unsafe extern "C" fn(*mut *mut c_void, usize) -> hipError_t) as *const c_void
                }
                $(stringify!($status) => {
                    (functions::$status as unsafe extern "C" fn($($type),*) -> hipError_t) as *const c_void
                })*
                // A runtime may lack functions.
                _ => std::ptr::null(),
            }
        }
    };
}
hip_sys::for_each_function!(nothing);

unsafe extern "C" fn device_count(count: *mut c_int) -> hipError_t {
    // SAFETY: the caller's, as HIP has it.
    unsafe { *count = 1 };
    hipError_t::hipSuccess
}

unsafe extern "C" fn properties(properties: *mut hipDeviceProp_tR0600, _: c_int) -> hipError_t {
    let mut p = hipDeviceProp_tR0600::zeroed();
    for (to, from) in p.gcnArchName.iter_mut().zip(b"gfx942") {
        *to = *from as c_char;
    }
    p.multiProcessorCount = 304;
    // SAFETY: the caller's, as HIP has it.
    unsafe { *properties = p };
    hipError_t::hipSuccess
}

unsafe extern "C" fn malloc(pointer: *mut *mut c_void, size: usize) -> hipError_t {
    static NEXT: AtomicUsize = AtomicUsize::new(1 << 40);
    CALLS[Index::hipMalloc as usize].fetch_add(1, Ordering::Relaxed);
    let address = NEXT.fetch_add(size.next_multiple_of(256), Ordering::Relaxed);
    // SAFETY: the caller's, as HIP has it.
    unsafe { *pointer = std::ptr::without_provenance_mut(address) };
    hipError_t::hipSuccess
}

/// The tensors of a prefill with everything that one can have.
pub struct Layer {
    shape: Shape,
    q: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    g: Buffer<f32>,
    beta: Buffer<f32>,
    a_log: Buffer<f32>,
    initial: Buffer<f32>,
    has_initial: Buffer<u8>,
    o: Buffer<bf16>,
    last: Buffer<f32>,
    workspace: Buffer<u8>,
}

/// Heads of 128 by 128.
#[derive(Clone, Copy)]
pub struct Shape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub tokens: usize,
    pub sequences: usize,
}

const DIM: usize = 128;

impl Shape {
    pub fn spec(&self) -> PrefillSpec {
        PrefillSpec::new(self.key_heads, self.value_heads, DIM, DIM)
    }

    /// Sequences of about equal lengths.
    pub fn cu_seqlens(&self) -> Vec<i32> {
        let entries = (0..=self.sequences).map(|n| n * self.tokens / self.sequences);
        entries.map(|entry| entry as i32).collect()
    }
}

impl Layer {
    pub fn new(context: &Context, shape: Shape, workspace_bytes: usize) -> deltawave::Result<Self> {
        let Shape {
            key_heads,
            value_heads,
            tokens,
            sequences,
        } = shape;
        let states = sequences * value_heads * DIM * DIM;
        Ok(Layer {
            shape,
            q: context.alloc(tokens * key_heads * DIM)?,
            k: context.alloc(tokens * key_heads * DIM)?,
            v: context.alloc(tokens * value_heads * DIM)?,
            g: context.alloc(tokens * value_heads)?,
            beta: context.alloc(tokens * value_heads)?,
            a_log: context.alloc(value_heads)?,
            initial: context.alloc(states)?,
            has_initial: context.alloc(sequences)?,
            o: context.alloc(tokens * value_heads * DIM)?,
            last: context.alloc(states)?,
            workspace: context.alloc(workspace_bytes)?,
        })
    }

    /// What a launch is given.
    pub fn parts(
        &mut self,
        raw_gates: bool,
    ) -> deltawave::Result<(PrefillTensors<'_>, &mut Buffer<u8>)> {
        let Shape {
            key_heads,
            value_heads,
            tokens,
            sequences,
        } = self.shape;
        let keys = [tokens, key_heads, DIM];
        let values = [tokens, value_heads, DIM];
        let states = [sequences, value_heads, DIM, DIM];
        let (g, beta) = (
            self.g.tensor([tokens, value_heads])?.into(),
            self.beta.tensor([tokens, value_heads])?.into(),
        );
        let gating = match raw_gates {
            false => Gating::Given {
                g: Some(g),
                beta: Some(beta),
            },
            true => Gating::Raw {
                a: g,
                b: beta,
                a_log: self.a_log.tensor([value_heads])?,
                dt_bias: Some(self.a_log.tensor([value_heads])?),
                allow_neg_eigval: true,
            },
        };
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: self.q.tensor(keys)?.into(),
            k: self.k.tensor(keys)?.into(),
            v: self.v.tensor(values)?.into(),
            gating,
            states: States::Separate {
                initial: Some(InitialState {
                    state: State {
                        tensor: self.initial.tensor(states)?,
                        layout: StateLayout::KeyMajor,
                    },
                    has_initial_state: Some((&self.has_initial).into()),
                }),
                last: Some(StateMut {
                    tensor: self.last.tensor_mut(states)?,
                    layout: StateLayout::ValueMajor,
                }),
            },
            o: self.o.tensor_mut(values)?.into(),
            snapshots: None,
        };
        Ok((tensors, &mut self.workspace))
    }
}
