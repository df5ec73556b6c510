//! Chunked Gated DeltaNet prefill.
//!
//! Per value head, with a state `S` of shape `[K, V]`, token after token:
//!
//! ```text
//! S   <- exp(g_t) S
//! d_t  = beta_t (v_t - S^T k_t)
//! S   <- S + k_t d_t^T
//! o_t  = scale S^T q_t
//! ```
//!
//! computed in chunks of 64 tokens by two kernels, `prefill_prepare` and `prefill_scan`, and two more where sequences are
//! cut into segments, `prefill_summarise` and `prefill_combine`. A [`Prefill`] is made once for a batch shape whose
//! lengths the host knows; a [`DevicePrefill`] for one whose lengths are on the device alone.
//! Launching allocates nothing, waits for nothing and reads nothing back, so that it can be captured into a graph.

mod lower;
mod plan;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use lower::{Counts, Kernels, Shape, Tables, check_cu_seqlens};

use crate::abi::{self, dw_prefill_lengths_args};
use crate::check::{self, Batch, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::launch::KEY_BUCKETS;
use crate::runtime::{Context, Stream};
use crate::tensor::{Buffer, Owner, Tensor, TensorMut, TokenScalars, Tokens, TokensMut};
use crate::types::{Dtype, HeadMap, StateLayout};

/// Tokens of a chunk.
pub const CHUNK: usize = abi::DW_CHUNK as usize;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;
/// Alignment of the workspace.
pub const WORKSPACE_ALIGN: usize = 256;

/// What a prefill computes, whatever the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillSpec {
    /// Element type of q, k, v and o: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// `HK`, at least 1.
    pub key_heads: usize,
    /// `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// `K`, a multiple of 16 up to 256.
    pub key_dim: usize,
    /// `V`, a multiple of 16 up to 256.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
    /// Whether rows of q and k are l2-normalised inside: `x / sqrt(sum(x^2) + 1e-6)`, in f32 and never rounded.
    pub qk_l2norm: bool,
    /// Factor of the output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// Segments of the longest sequence of a [`Prefill`], each of the same number of chunks; longer ones than that are cut
    /// too, shorter ones stay whole. 1: no sequence is cut. More than the sequence has chunks are as many as it has.
    /// Absent: as many as take least time. [`SEGMENTS_VARIABLE`] decides it from outside.
    pub segments: Option<usize>,
    /// Compute units that the launches will have, where these are not all of the device.
    pub compute_units: Option<u32>,
}

/// The environment variable that is used instead of [`PrefillSpec::segments`] where it is set: `1` switches segments
/// off.
pub const SEGMENTS_VARIABLE: &str = "DELTAWAVE_SEGMENTS";

impl PrefillSpec {
    /// bf16, grouped heads, no norm inside, the default scale.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        PrefillSpec {
            dtype: Dtype::Bf16,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            head_map: HeadMap::Grouped,
            qk_l2norm: false,
            scale: None,
            segments: None,
            compute_units: None,
        }
    }

    fn validate(&self) -> Checked<()> {
        let dim = |name: &str, n: usize| {
            check::ensure(n > 0 && n.is_multiple_of(16) && n <= MAX_HEAD_DIM, || {
                ArgumentError::new(
                    name,
                    ArgumentKind::Shape,
                    n,
                    format!("it must be a multiple of 16 from 16 to {MAX_HEAD_DIM}"),
                )
            })
        };
        check::dtype("dtype", self.dtype, &[Dtype::Bf16, Dtype::F16])?;
        dim("key_dim", self.key_dim)?;
        dim("value_dim", self.value_dim)?;
        check::ensure(self.key_heads > 0, || {
            ArgumentError::new(
                "key_heads",
                ArgumentKind::Shape,
                self.key_heads,
                "it must be at least 1",
            )
        })?;
        check::ensure(
            self.value_heads > 0
                && self.value_heads.is_multiple_of(self.key_heads)
                && self.value_heads < 1 << 20,
            || {
                let allowed = format!(
                    "it must be a multiple of the {} key heads, at least 1 and below 2^20",
                    self.key_heads
                );
                ArgumentError::new(
                    "value_heads",
                    ArgumentKind::Shape,
                    self.value_heads,
                    allowed,
                )
            },
        )?;
        let positive = |name: &str, n: Option<usize>| {
            check::ensure(n != Some(0), || {
                ArgumentError::new(name, ArgumentKind::Value, 0, "it must be at least 1")
            })
        };
        positive("segments", self.segments)?;
        positive("compute_units", self.compute_units.map(|n| n as usize))?;
        check::ensure(self.scale.is_none_or(f32::is_finite), || {
            ArgumentError::new(
                "scale",
                ArgumentKind::Value,
                self.scale.unwrap_or_default(),
                "it must be finite",
            )
        })
    }

    fn scale(&self) -> f32 {
        self.scale
            .unwrap_or_else(|| (self.key_dim as f32).powf(-0.5))
    }

    /// The smallest key bucket that holds the key dimension.
    fn key_bucket(&self) -> usize {
        let fits = KEY_BUCKETS.into_iter().find(|&b| self.key_dim <= b);
        fits.unwrap_or(KEY_BUCKETS[KEY_BUCKETS.len() - 1])
    }

    fn dtype_name(&self) -> &'static str {
        if self.dtype == Dtype::Bf16 {
            "bf16"
        } else {
            "f16"
        }
    }

    fn kernels(&self) -> Kernels {
        let find = |wanted: String| {
            let all = crate::runtime::KERNELS
                .iter()
                .flat_map(|(_, kernels)| kernels.iter());
            all.copied()
                .find(|k| *k == wanted)
                .expect("every bucket has its kernels")
        };
        let (dtype, bucket) = (self.dtype_name(), self.key_bucket());
        Kernels {
            prepare: find(format!("dw_prefill_prepare_{dtype}")),
            summarise: find(format!("dw_prefill_summarise_{dtype}_k{bucket}")),
            combine: find(format!("dw_prefill_combine_k{bucket}")),
            scan: find(format!("dw_prefill_scan_{dtype}_k{bucket}")),
        }
    }
}

/// The gates of a prefill.
#[derive(Clone, Debug)]
pub enum Gating<'a> {
    /// g and beta themselves.
    Given {
        /// `[T, HV]`, f32, natural logarithms, at most 0; absent: no decay.
        g: Option<TokenScalars<'a>>,
        /// `[T, HV]`, f32; absent: 1.
        beta: Option<TokenScalars<'a>>,
    },
    /// What the projections give; g and beta are computed inside.
    Raw {
        /// `[T, HV]`, f32, bf16 or fp16.
        a: TokenScalars<'a>,
        /// `[T, HV]`, f32, bf16 or fp16.
        b: TokenScalars<'a>,
        /// `[HV]`, f32, bf16 or fp16.
        a_log: Tensor<'a, 1>,
        /// `[HV]`; absent: 0.
        dt_bias: Option<Tensor<'a, 1>>,
        /// Whether beta is `2 sigmoid(b)`.
        allow_neg_eigval: bool,
    },
}

/// States of all sequences and value heads.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: Tensor<'a, 4>,
    /// Which of the two.
    pub layout: StateLayout,
}

/// [`State`], to be written to.
#[derive(Debug)]
pub struct StateMut<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Which of the two.
    pub layout: StateLayout,
}

/// The tensors of one prefill. Packed batches have `[T, H, D]`, dense ones `[B, T, H, D]`.
#[derive(Debug)]
pub struct PrefillTensors<'a> {
    /// `[T, HK, K]`.
    pub q: Tokens<'a>,
    /// `[T, HK, K]`.
    pub k: Tokens<'a>,
    /// `[T, HV, V]`.
    pub v: Tokens<'a>,
    /// Gates.
    pub gating: Gating<'a>,
    /// The states that sequences start from; absent: zeros.
    pub initial_state: Option<State<'a>>,
    /// One byte per sequence, 0: it starts from zeros whatever `initial_state` holds; absent: all have a state.
    pub has_initial_state: Option<Flags<'a>>,
    /// `[T, HV, V]`. Rows past the last sequence become zeros.
    pub o: TokensMut<'a>,
    /// The states after the last token; absent: not wanted. For an empty sequence the initial one. Other memory than
    /// `initial_state`, which the first segment of a sequence may read after the last one has written here.
    pub final_state: Option<StateMut<'a>>,
}

/// One byte per sequence on the device.
#[derive(Clone, Debug)]
pub struct Flags<'a> {
    address: *const u8,
    len: usize,
    owner: Owner,
    borrow: PhantomData<&'a ()>,
}

impl<'a> From<&'a Buffer<u8>> for Flags<'a> {
    fn from(buffer: &'a Buffer<u8>) -> Self {
        Flags {
            address: buffer.address().cast_const().cast(),
            len: buffer.len(),
            owner: buffer.owner(),
            borrow: PhantomData,
        }
    }
}

impl Flags<'_> {
    /// The caller's own memory.
    ///
    /// # Safety
    /// `len` bytes at `address` are memory of the context's device while work that reads them is under way.
    pub unsafe fn from_raw(address: *const u8, len: usize) -> Self {
        Flags {
            address,
            len,
            owner: None,
            borrow: PhantomData,
        }
    }
}

/// `cu_seqlens` on the device.
#[derive(Clone, Copy, Debug)]
pub enum DeviceLengths<'a> {
    /// 32-bit entries.
    I32(&'a Buffer<i32>),
    /// 64-bit entries.
    I64(&'a Buffer<i64>),
    /// The caller's own memory, made by [`DeviceLengths::from_raw`].
    Raw(RawLengths),
}

/// `cu_seqlens` in the caller's own memory.
#[derive(Clone, Copy, Debug)]
pub struct RawLengths {
    address: *const c_void,
    entries: usize,
    wide: bool,
}

impl DeviceLengths<'_> {
    /// `entries` entries at `address`, of 64 bits if `wide`, else of 32.
    ///
    /// # Safety
    /// They lie in memory of the context's device while work that reads them is under way.
    pub unsafe fn from_raw(address: *const c_void, entries: usize, wide: bool) -> Self {
        DeviceLengths::Raw(RawLengths {
            address,
            entries,
            wide,
        })
    }

    fn parts(&self) -> (RawLengths, Owner) {
        match self {
            DeviceLengths::I32(b) => (
                RawLengths {
                    address: b.address(),
                    entries: b.len(),
                    wide: false,
                },
                b.owner(),
            ),
            DeviceLengths::I64(b) => (
                RawLengths {
                    address: b.address(),
                    entries: b.len(),
                    wide: true,
                },
                b.owner(),
            ),
            DeviceLengths::Raw(raw) => (*raw, None),
        }
    }
}

/// Scratch memory of the caller: what one launch hands from kernel to kernel. Its content means nothing before and
/// after; launches on one stream may share it.
#[derive(Debug)]
pub struct Workspace<'a> {
    address: *mut c_void,
    bytes: usize,
    owner: Owner,
    borrow: PhantomData<&'a mut ()>,
}

impl<'a> Workspace<'a> {
    /// A whole buffer.
    pub fn new(buffer: &'a mut Buffer<u8>) -> Self {
        Workspace {
            address: buffer.address(),
            bytes: buffer.len(),
            owner: buffer.owner(),
            borrow: PhantomData,
        }
    }

    /// The caller's own memory.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory of the context's device, and nothing else uses them while a launch that was
    /// given them is under way.
    pub unsafe fn from_raw(address: *mut c_void, bytes: usize) -> Self {
        Workspace {
            address,
            bytes,
            owner: None,
            borrow: PhantomData,
        }
    }
}

fn check_workspace(workspace: &Workspace<'_>, bytes: usize, context: &Context) -> Checked<()> {
    check::device("workspace", &workspace.owner, context)?;
    check::region(
        "workspace",
        workspace.address,
        workspace.bytes,
        bytes,
        WORKSPACE_ALIGN,
    )
}

/// What of a prefill is launched. The parts are for measuring: each takes what the workspace holds, which must be what the
/// parts before it left there. A part that the plan does not have does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// `prefill_prepare`.
    Prepare,
    /// `prefill_summarise`.
    Summarise,
    /// `prefill_combine`. Not to be repeated without a [`Part::Summarise`] before it.
    Combine,
    /// `prefill_scan`.
    Scan,
}

impl Part {
    /// The stem of its kernel's source, or `prefill`.
    pub fn name(self) -> &'static str {
        match self {
            Part::Whole => "prefill",
            Part::Prepare => "prefill_prepare",
            Part::Summarise => "prefill_summarise",
            Part::Combine => "prefill_combine",
            Part::Scan => "prefill_scan",
        }
    }
}

/// A prefill of batches whose lengths the host knows: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Prefill {
    context: Context,
    shape: Shape,
    kernels: Kernels,
    counts: Counts,
    /// Items, chains, and `cu_seqlens`.
    tables: Buffer<i32>,
}

impl Prefill {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Rows past the last
    /// sequence belong to none.
    ///
    /// # Errors
    /// A spec, lengths or [`SEGMENTS_VARIABLE`] that are not allowed; no memory for the lengths.
    pub fn packed<L: Copy + Into<i64>>(
        context: &Context,
        spec: PrefillSpec,
        cu_seqlens: &[L],
        tokens: usize,
    ) -> Result<Self> {
        let sequences = cu_seqlens.len().saturating_sub(1);
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        let checked = check_cu_seqlens(cu_seqlens, tokens)?;
        Self::with_shape(context, shape, &checked)
    }

    /// A dense batch: `batch` sequences of `tokens` rows each, tensors `[B, T, ...]`.
    ///
    /// # Errors
    /// A spec or [`SEGMENTS_VARIABLE`] that is not allowed; no memory for the lengths.
    pub fn dense(
        context: &Context,
        spec: PrefillSpec,
        batch: usize,
        tokens: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Dense { batch, tokens }, batch, context)?;
        let cu_seqlens: Vec<i32> = (0..=batch).map(|n| (n * tokens) as i32).collect();
        Self::with_shape(context, shape, &cu_seqlens)
    }

    fn with_shape(context: &Context, shape: Shape, cu_seqlens: &[i32]) -> Result<Self> {
        let partition = shape.partition(cu_seqlens)?;
        let counts = partition.counts();
        shape.check_grids(counts)?;
        let tables = context.upload(&partition.table(cu_seqlens))?;
        Ok(Prefill {
            context: context.clone(),
            shape,
            kernels: shape.spec.kernels(),
            counts,
            tables,
        })
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.shape.record_bytes() + self.shape.summary_bytes(self.counts.summaries)
    }

    /// Segments in all: as many as there are sequences, unless some are cut.
    pub fn segments(&self) -> usize {
        self.counts.items
    }

    /// The whole launch, then each kernel of it.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part::Whole, Part::Prepare, Part::Scan];
        if self.counts.summaries > 0 {
            parts.insert(2, Part::Summarise);
        }
        if self.counts.chains > 0 {
            parts.insert(3, Part::Combine);
        }
        parts
    }

    /// Names of the kernels that a launch runs, in order: two, or up to four where sequences are cut.
    pub fn kernels(&self) -> Vec<&'static str> {
        let parts = self.parts().into_iter();
        parts.filter_map(|part| self.kernels.of(part)).collect()
    }

    fn tables(&self) -> Tables {
        let items: *const i32 = self.tables.address().cast_const().cast();
        let chains = items.wrapping_add(self.counts.items * plan::ITEM_WORDS);
        Tables {
            cu_seqlens: chains.wrapping_add(self.counts.chains * plan::CHAIN_WORDS),
            items: items.cast(),
            chains,
            counts: self.counts,
        }
    }

    /// Enqueues the prefill: the kernels that [`Prefill::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, a workspace that is too small: then
    /// nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_part(stream, tensors, workspace, Part::Whole)
    }

    /// [`Prefill::launch`] of a part.
    ///
    /// # Errors
    /// As [`Prefill::launch`].
    pub fn launch_part(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
        part: Part,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        Shape::check_devices(tensors, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let lowered = (self.shape).lower(tensors, self.tables(), workspace.address)?;
        self.context.make_current()?;
        // SAFETY: views of buffers borrow them; the makers of raw views answered for theirs.
        unsafe {
            self.shape
                .enqueue(&self.context, stream, self.kernels, &lowered, part)
        }
    }
}

/// A prefill of packed batches whose lengths are on the device alone. One kernel more checks them there: entries that
/// decrease or exceed the tokens are replaced by the nearest allowed ones, never followed out of bounds, and the
/// status says so. No sequence is cut into segments, which takes lengths that the host knows.
#[derive(Debug)]
pub struct DevicePrefill {
    context: Context,
    shape: Shape,
    kernels: Kernels,
}

/// Bytes of the workspace before the checked lengths: the status word.
const STATUS_BYTES: usize = WORKSPACE_ALIGN;

impl DevicePrefill {
    /// Batches of exactly `sequences` sequences (some may be empty) in `tokens` rows.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed; more than one segment.
    pub fn new(
        context: &Context,
        spec: PrefillSpec,
        tokens: usize,
        sequences: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        check::ensure(spec.segments.is_none_or(|n| n == 1), || {
            let was = spec.segments.unwrap_or_default();
            let allowed = "sequences whose lengths the device alone knows are not cut";
            ArgumentError::new("segments", ArgumentKind::Value, was, allowed)
        })?;
        Ok(DevicePrefill {
            context: context.clone(),
            shape,
            kernels: spec.kernels(),
        })
    }

    fn lengths_bytes(&self) -> usize {
        ((self.shape.sequences + 1) * 4).next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        STATUS_BYTES + self.lengths_bytes() + self.shape.record_bytes()
    }

    /// Enqueues the prefill: three kernels. The first 4 bytes of the workspace are the status afterwards: 0, or 1 + the
    /// index of the first entry of `cu_seqlens` that had to be replaced.
    ///
    /// # Errors
    /// As [`Prefill::launch`].
    pub fn launch(
        &self,
        stream: &Stream,
        cu_seqlens: DeviceLengths<'_>,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        Shape::check_devices(tensors, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let (lengths, owner) = cu_seqlens.parts();
        check::device("cu_seqlens", &owner, &self.context)?;
        let entries = self.shape.sequences + 1;
        check::ensure(lengths.entries == entries, || {
            let allowed = format!("one entry more than the {} sequences", self.shape.sequences);
            ArgumentError::new(
                "cu_seqlens",
                ArgumentKind::Lengths,
                format!("{} entries", lengths.entries),
                allowed,
            )
        })?;
        let size = if lengths.wide { 8 } else { 4 };
        check::region(
            "cu_seqlens",
            lengths.address,
            entries * size,
            entries * size,
            size,
        )?;
        let checked = workspace.address.wrapping_byte_add(STATUS_BYTES);
        let records = checked.wrapping_byte_add(self.lengths_bytes());
        let tables = Tables {
            cu_seqlens: checked.cast_const().cast(),
            items: ptr::null(),
            chains: ptr::null(),
            counts: self.shape.whole(),
        };
        let lowered = self.shape.lower(tensors, tables, records)?;
        let arguments = dw_prefill_lengths_args {
            cu_seqlens: lengths.address,
            checked: checked.cast(),
            status: workspace.address.cast(),
            sequences: self.shape.sequences as i32,
            tokens: self.shape.batch.rows() as i32,
            wide: i32::from(lengths.wide),
            pad0: 0,
        };
        self.context.make_current()?;
        // SAFETY: as in `Prefill::launch`; the workspace holds status, lengths and records.
        unsafe {
            self.context.launch(
                stream,
                "dw_prefill_lengths",
                1,
                self.shape.launch.lengths_threads,
                &arguments,
            )?;
            self.shape
                .enqueue(&self.context, stream, self.kernels, &lowered, Part::Whole)
        }
    }
}
