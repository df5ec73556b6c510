//! The fused convolution and the chain of two kernels that does the same, on the same inputs in the same run of the
//! simulator: bytes, launches and modelled times.

use std::error::Error;
use std::ffi::c_void;
use std::path::Path;
use std::{fs, ptr};

use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{UlpComparison, compare_ulps};
use deltawave_sim::gpu::Gpu;
use deltawave_sim::hip::{self, CountedLaunch};
use deltawave_sim::launch::{Options, Record};
use deltawave_sim::sanitize::Checks;
use deltawave_sim::timing::SAMPLE;

#[path = "../../build/kernels.rs"]
#[allow(dead_code, reason = "only its compiler is wanted")]
mod kernels;

type Fallible<T> = Result<T, Box<dyn Error>>;

const THREADS: u32 = 256;
/// Of a thread of the chain: channels, and tokens of its convolution.
const OCTET: usize = 8;
const RUN: usize = 32;

/// What one launch does.
pub struct Counted {
    pub kernel: String,
    /// Lines that it touches.
    pub unique_bytes: u64,
    /// Lines that the dies' caches are filled with, and those written.
    pub l2_fill_bytes: u64,
    pub modelled_us: f64,
}

impl Counted {
    fn new(launch: &CountedLaunch, gpu: Gpu) -> Self {
        let traffic = launch.totals().traffic;
        Counted {
            kernel: launch.kernel().name().to_owned(),
            unique_bytes: traffic.unique_bytes,
            l2_fill_bytes: traffic.l2_fill_bytes,
            modelled_us: launch.estimate(gpu).map_or(f64::NAN, |e| e.modelled_us),
        }
    }
}

/// Both of them.
pub struct Comparison {
    /// Rows of x that are read once, q, k and v that are written once, weights.
    pub minimal_bytes: u64,
    pub fused: Vec<Counted>,
    pub chain: Vec<Counted>,
    /// How far their outputs are apart.
    pub difference: UlpComparison,
}

/// The device's tensors.
struct Batch {
    spec: ConvSpec,
    tokens: usize,
    x: Buffer<u8>,
    weight: Buffer<u8>,
    /// q, k and v.
    out: [Buffer<u8>; 3],
}

impl Batch {
    /// Elements of a row of x, z included.
    fn columns(&self) -> usize {
        self.spec.total_channels() + self.spec.channels()[2]
    }

    /// Runs something that writes the outputs: these, and what was counted.
    fn run(
        &mut self,
        stream: &Stream,
        gpu: Gpu,
        launch: impl FnOnce(&mut Batch) -> Fallible<()>,
    ) -> Fallible<(Vec<f32>, Vec<Counted>)> {
        for out in &mut self.out {
            out.fill_bytes(0xff, stream)?;
        }
        stream.synchronize()?;
        hip::take_counted_launches();
        launch(self)?;
        stream.synchronize()?;
        let counted = hip::take_counted_launches();
        let mut values = Vec::new();
        for out in &self.out {
            values.extend(HostTensor::from_bytes(self.spec.dtype, out.download(stream)?).values);
        }
        Ok((
            values,
            counted.iter().map(|l| Counted::new(l, gpu)).collect(),
        ))
    }

    fn fused(&mut self, context: &Context, stream: &Stream) -> Fallible<()> {
        let (s, tokens, columns) = (self.spec, self.tokens, self.columns());
        let x = (self.x).tensor_of(s.dtype, [tokens, columns], [columns, 1], 0)?;
        let keys = [tokens, s.heads.key, s.heads.key_dim];
        let values = [tokens, s.heads.value, s.heads.value_dim];
        let [q, k, v] = &mut self.out;
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&x, &s)?,
            weight: (self.weight).tensor_of(
                s.dtype,
                [s.total_channels(), s.width],
                [s.width, 1],
                0,
            )?,
            bias: None,
            state: None,
            slots: None,
            q: q.tensor_of_mut(s.dtype, keys, dense_strides(keys), 0)?
                .into(),
            k: k.tensor_of_mut(s.dtype, keys, dense_strides(keys), 0)?
                .into(),
            v: (v.tensor_of_mut(s.dtype, values, dense_strides(values), 0)?).into(),
            gates: None,
        };
        let plan = Conv::packed(context, s, &[0, i64::try_from(tokens)?], tokens)?;
        Ok(plan.launch(stream, &tensors)?)
    }

    fn chain(&mut self, chain: &Chain, stream: &Stream) -> Fallible<()> {
        let dim = self.spec.total_channels();
        let [keys, ..] = self.spec.channels();
        let (mut tokens, mut dim_argument) = (i32::try_from(self.tokens)?, i32::try_from(dim)?);
        let mut keys = i32::try_from(keys)?;
        let mut stride = i64::try_from(self.columns())?;
        let between = stream.context().alloc::<u8>(2 * self.tokens * dim)?;
        let [mut x, mut weight, mut y] =
            [&self.x, &self.weight, &between].map(|buffer| buffer.address());
        let [mut q, mut k, mut v] = self.out.each_ref().map(|buffer| buffer.address());
        let slabs = dim.div_ceil(THREADS as usize * OCTET);
        let mut arguments = [
            ptr::from_mut(&mut x).cast(),
            ptr::from_mut(&mut weight).cast(),
            ptr::from_mut(&mut y).cast(),
            ptr::from_mut(&mut stride).cast(),
            ptr::from_mut(&mut tokens).cast(),
            ptr::from_mut(&mut dim_argument).cast(),
        ];
        let workgroups = slabs * self.tokens.div_ceil(RUN);
        // SAFETY: they are the kernel's arguments, of tensors of the sizes that it is told.
        unsafe { chain.launch(stream, chain.conv, workgroups, &mut arguments) }?;
        let mut arguments = [
            ptr::from_mut(&mut y).cast(),
            ptr::from_mut(&mut q).cast(),
            ptr::from_mut(&mut k).cast(),
            ptr::from_mut(&mut v).cast(),
            ptr::from_mut(&mut tokens).cast(),
            ptr::from_mut(&mut dim_argument).cast(),
            ptr::from_mut(&mut keys).cast(),
        ];
        let workgroups = (self.tokens * dim / OCTET).div_ceil(THREADS as usize);
        // SAFETY: as above.
        unsafe { chain.launch(stream, chain.split, workgroups, &mut arguments) }?;
        // `between` is freed here.
        Ok(stream.synchronize()?)
    }
}

/// The chain's kernels, loaded.
struct Chain {
    conv: hip_sys::hipFunction_t,
    split: hip_sys::hipFunction_t,
}

impl Chain {
    /// Compiles them in a folder.
    fn new(context: &Context, folder: &Path) -> Fallible<Self> {
        fs::create_dir_all(folder)?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/conv_chain/chain.hip");
        let object = folder.join("chain.co");
        let compiler =
            kernels::Compiler::for_arch("gfx942", folder, std::env::var_os("DELTAWAVE_HIPCC"))?;
        compiler.compile(&source, "gfx942", &object)?;
        let (code, mut module) = (fs::read(object)?, hip_sys::hipModule_t::NULL);
        // SAFETY: the code is a whole code object, which the runtime copies, and the handles are valid for writes.
        unsafe {
            context
                .hip()
                .hipModuleLoadData(&mut module, code.as_ptr().cast())
        }?;
        let function = |name: &std::ffi::CStr| -> Fallible<_> {
            let mut found = hip_sys::hipFunction_t::NULL;
            // SAFETY: as above; the module stays loaded.
            unsafe { (context.hip()).hipModuleGetFunction(&mut found, module, name.as_ptr()) }?;
            Ok(found)
        };
        Ok(Chain {
            conv: function(c"chain_conv")?,
            split: function(c"chain_split")?,
        })
    }

    /// # Safety
    /// The arguments are the kernel's.
    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: hip_sys::hipFunction_t,
        workgroups: usize,
        arguments: &mut [*mut c_void],
    ) -> Fallible<()> {
        let (groups, none) = (u32::try_from(workgroups)?, ptr::null_mut());
        let (hip, stream, arguments) = (
            stream.context().hip(),
            hip_sys::hipStream_t(stream.handle()),
            arguments.as_mut_ptr(),
        );
        // SAFETY: the caller answers for the arguments, whose number the code object states.
        unsafe {
            hip.hipModuleLaunchKernel(
                kernel, groups, 1, 1, THREADS, 1, 1, 0, stream, arguments, none,
            )
        }?;
        Ok(())
    }
}

/// Counts both, on a simulated GPU: bf16, width 4, one sequence of rows `q | k | v | z`. Head dimensions are multiples of 8.
pub fn compare(gpu: Gpu, spec: ConvSpec, tokens: usize, folder: &Path) -> Fallible<Comparison> {
    hip::set_gpu(gpu);
    let context = Context::simulator()?;
    let usual = hip::options();
    hip::set_options(Options {
        checks: Checks::NONE,
        count: true,
        record: Record::Some(SAMPLE),
        ..usual
    });
    let stream = context.stream()?;
    let channels = spec.total_channels();
    let draw = |name, n| random_normal(Dtype::Bf16, name, n, 1).bytes;
    let [q, k, v] = spec.channels().map(|n| context.alloc(2 * tokens * n));
    let mut batch = Batch {
        spec,
        tokens,
        x: context.upload(&draw("x", tokens * (channels + spec.channels()[2])))?,
        weight: context.upload(&draw("weight", channels * spec.width))?,
        out: [q?, k?, v?],
    };
    let chain = Chain::new(&context, folder)?;
    let (own, fused) = batch.run(&stream, gpu, |b| b.fused(&context, &stream))?;
    let (other, both) = batch.run(&stream, gpu, |b| b.chain(&chain, &stream))?;
    hip::set_options(usual);
    let reference: Vec<f64> = own.into_iter().map(f64::from).collect();
    Ok(Comparison {
        minimal_bytes: (2 * channels * (2 * tokens + spec.width)) as u64,
        fused,
        chain: both,
        difference: compare_ulps(&HostTensor::new(spec.dtype, other), &reference),
    })
}
