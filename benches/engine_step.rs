//! A step of an engine, with its lengths on the host and on the device: modelled times of each kernel, on the simulator.
//!
//! `cargo bench --bench engine_step -- [GPU] [HK,HV]`, for instance `mi300x 16,32`. The step has three decodes, two
//! padded slots and five prefills. DECODES, PREFILLS and A_LOG of all heads are further arguments, for instance
//! `0 4096,4096 0`. Without A_LOG heads draw it, and some have a long memory.

use std::error::Error;

use deltawave::batch::CuSeqlens;
use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::random_normal;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::hip;
use deltawave_sim::launch::{Options, Record};
use deltawave_sim::sanitize::Checks;
use deltawave_sim::timing::SAMPLE;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Decodes of padding, whose slots are negative.
const PADDED: usize = 2;

fn main() -> Outcome<()> {
    let given: Vec<String> = (std::env::args().skip(1))
        .filter(|a| a != "--bench")
        .collect();
    let argument = |i: usize, default: &'static str| given.get(i).map_or(default, String::as_str);
    let gpu =
        Gpu::named(argument(0, "mi300x")).ok_or("known GPUs are mi300x, mi325x and mi308x")?;
    let (hk, hv) = (argument(1, "16,32").split_once(',')).ok_or("heads are HK,HV")?;
    let spec = LayerSpec::new(hk.parse()?, hv.parse()?, 128, 128);
    let decodes = argument(2, "5").parse()?;
    let mut cu_seqlens: Vec<i32> = (0..=decodes as i32).collect();
    for tokens in argument(3, "2048,1024,512,300,64").split(',') {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + tokens.parse::<i32>()?);
    }

    hip::set_gpu(gpu);
    hip::set_options(Options {
        checks: Checks::NONE,
        count: true,
        record: Record::Some(SAMPLE),
        ..Options::default()
    });
    let context = Context::simulator()?;
    let stream = context.stream()?;
    let a_log = given.get(4).map(|x| x.parse()).transpose()?;
    let step = Step::new(&context, spec, cu_seqlens, decodes, a_log)?;
    let mut totals = Vec::new();
    for (place, on_device) in [("host", false), ("device", true)] {
        println!("lengths on the {place}, modelled us on {}:", gpu.name);
        let mut total = 0.0;
        for (kernel, us) in step.run(&context, &stream, gpu, on_device)? {
            println!("  {kernel:<28} {us:>8.1}");
            total += us;
        }
        println!("  {:<28} {total:>8.1}\n", "sum");
        totals.push(total);
    }
    println!("device / host: {:.3}", totals[1] / totals[0]);
    Ok(())
}

/// A layer's inputs.
struct Step {
    spec: LayerSpec,
    /// Padded decodes come last among the decodes.
    decodes: usize,
    cu_seqlens: Vec<i32>,
    rows: usize,
    x: Buffer<u8>,
    a: Buffer<u8>,
    b: Buffer<u8>,
    conv: Buffer<u8>,
    a_log: Buffer<u8>,
    norm: Buffer<u8>,
    slots: Buffer<i32>,
}

impl Step {
    fn new(
        context: &Context,
        spec: LayerSpec,
        cu_seqlens: Vec<i32>,
        decodes: usize,
        a_log: Option<f32>,
    ) -> Outcome<Step> {
        let rows = usize::try_from(cu_seqlens[cu_seqlens.len() - 1])?;
        let (channels, heads) = (spec.conv().total_channels(), spec.heads.value);
        let columns = channels + heads * spec.heads.value_dim;
        let upload = |dtype, name, n| context.upload(&random_normal(dtype, name, n, 0).bytes);
        let padded = decodes.saturating_sub(PADDED)..decodes;
        let sequences = 0..cu_seqlens.len() - 1;
        let slots = sequences.map(|n| if padded.contains(&n) { -1 } else { n as i32 });
        Ok(Step {
            spec,
            decodes,
            rows,
            x: upload(spec.dtype, "x", rows * columns)?,
            a: upload(spec.dtype, "a", rows * heads)?,
            b: upload(spec.dtype, "b", rows * heads)?,
            conv: upload(spec.dtype, "conv", channels * spec.width)?,
            a_log: match a_log {
                Some(a_log) => context.upload(&a_log.to_le_bytes().repeat(heads))?,
                None => upload(Dtype::F32, "a_log", heads)?,
            },
            norm: upload(Dtype::F32, "norm", spec.heads.value_dim)?,
            slots: context.upload(&slots.collect::<Vec<i32>>())?,
            cu_seqlens,
        })
    }

    /// Names and modelled times of the step's kernels.
    fn run(
        &self,
        context: &Context,
        stream: &Stream,
        gpu: Gpu,
        on_device: bool,
    ) -> Outcome<Vec<(String, f64)>> {
        let (s, heads) = (self.spec, self.spec.heads);
        let (rows, sequences, channels) = (
            self.rows,
            self.cu_seqlens.len() - 1,
            s.conv().total_channels(),
        );
        let columns = channels + heads.value * heads.value_dim;
        let plan = match on_device {
            true => Layer::device(context, s, rows, sequences, self.decodes)?,
            false => {
                let cu_seqlens: Vec<i64> = self.cu_seqlens.iter().map(|&n| n.into()).collect();
                Layer::packed(context, s, &cu_seqlens, rows, self.decodes)?
            }
        };
        let lengths = context.upload(&self.cu_seqlens)?;
        let x = (self.x).tensor_of(s.dtype, [rows, columns], [columns, 1], 0)?;
        let scalars = |b| {
            let shape = [rows, heads.value];
            Buffer::<u8>::tensor_of(b, s.dtype, shape, [heads.value, 1], 0)
        };
        let mut conv_pool = context.alloc::<u8>(2 * sequences * channels * (s.width - 1))?;
        let state = [sequences, heads.value, heads.key_dim, heads.value_dim];
        let mut pool = context.alloc::<f32>(state.iter().product())?;
        let mut y = context.alloc::<u8>(2 * rows * heads.value * heads.value_dim)?;
        for buffer in [&mut conv_pool, &mut y] {
            buffer.fill_bytes(0, stream)?;
        }
        pool.fill_bytes(0, stream)?;
        let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
        let conv_shape = [sequences, channels, s.width - 1];
        let y_shape = [rows, heads.value, heads.value_dim];
        let tensors = LayerTensors {
            cu_seqlens: on_device.then(|| CuSeqlens::from(&lengths)),
            x: ConvInput::flat(&x, &s.conv())?,
            z: ConvInput::flat_z(&x, &s.conv())?,
            a: scalars(&self.a)?.into(),
            b: scalars(&self.b)?.into(),
            weights: LayerWeights {
                conv: (self.conv).tensor_of(s.dtype, [channels, s.width], [s.width, 1], 0)?,
                conv_bias: None,
                a_log: self.a_log.tensor_of(Dtype::F32, [heads.value], [1], 0)?,
                dt_bias: None,
                norm: Some((self.norm).tensor_of(Dtype::F32, [heads.value_dim], [1], 0)?),
            },
            states: LayerStates {
                conv: conv_pool.tensor_of_mut(s.dtype, conv_shape, dense_strides(conv_shape), 0)?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: pool.tensor_mut(state)?,
                recurrent_layout: StateLayout::KeyMajor,
                slots: Some((&self.slots).into()),
                has_initial_state: None,
            },
            y: (y.tensor_of_mut(s.dtype, y_shape, dense_strides(y_shape), 0)?).into(),
        };
        stream.synchronize()?;
        hip::take_counted_launches();
        plan.launch(stream, &tensors, Workspace::new(&mut workspace))?;
        stream.synchronize()?;
        let counted = hip::take_counted_launches();
        let times = counted.iter().map(|launch| {
            let us = launch.estimate(gpu).map_or(f64::NAN, |e| e.modelled_us);
            (launch.kernel().name().to_owned(), us)
        });
        Ok(times.collect())
    }
}
