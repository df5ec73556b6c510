//! From arguments to a report: plan, draw, launch, check, time.
//!
//! An [`Operation`] knows the shapes that its arguments ask for, then its tensors. [`run`] takes it through all steps.

use deltawave::prefill::Part;
use deltawave::runtime::{Backend, Context, Stream};
use deltawave_lab::replay::{self, Times};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::hip::{self as simulator, CountedLaunch, KernelStatistics};
use deltawave_sim::launch::Record;
use deltawave_sim::timing::SAMPLE;

use crate::args::{CountArgs, ModelArgs, RunArgs};
use crate::device::{Device, Fallible, Results, Slots, Views};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{Checked, Description, Report, Verdict};

/// Options that do not change what is computed.
pub struct Options<'a> {
    pub run: &'a RunArgs,
    pub model: &'a ModelArgs,
    /// `--mfma`, where there is one.
    pub mfma: Option<MfmaMode>,
    /// Count for this GPU, on the simulator.
    pub count: Option<Gpu>,
    pub check: bool,
}

impl<'a> Options<'a> {
    /// Options of an operation that may be counted.
    pub fn new(run: &'a RunArgs, model: &'a ModelArgs, count: &CountArgs, check: bool) -> Self {
        Options {
            run,
            model,
            mfma: None,
            count: count.count,
            check,
        }
    }
}

/// An operation: first its shapes, then a plan, then its tensors.
pub trait Operation {
    /// The library's plan.
    type Plan;
    /// Its tensors on the host.
    type Data;

    /// The operation's name in failures: `the NAME failed`.
    const NAME: &'static str;
    /// Figures of a check, which are `null` without one; words.
    const CHECKED: &'static str;
    /// Steps of a check that [`Progress`] shows.
    const CHECK_STEPS: usize = 1;

    /// The plan: what the library refuses, it refuses here, before anything is drawn.
    fn plan(&self, context: &Context) -> Result<Self::Plan, Failure>;
    /// Draws the tensors, or takes them from a file.
    fn draw(&mut self, plan: &Self::Plan) -> Result<Self::Data, Failure>;
    /// The tensors on the device. All that kernels write must have the same bits in all runs.
    fn slots<'a>(&self, plan: &Self::Plan, data: &'a Self::Data) -> Slots<'a>;
    /// Names of the kernels of a launch, in order.
    fn kernels(&self, plan: &Self::Plan) -> Vec<&'static str>;
    /// Enqueues a part; only a prefill has others than the whole.
    fn launch(&self, views: Views, stream: &Stream, plan: &Self::Plan, part: Part) -> Fallible<()>;
    /// The launches that `--time` measures.
    fn parts(_: &Self::Plan) -> Vec<(&'static str, Part)> {
        vec![(Self::NAME, Part::Whole)]
    }
    /// Bytes that any implementation moves.
    fn minimal_bytes(&self, data: &Self::Data) -> usize;
    /// Anything to do with the results before they are checked.
    fn finish(
        &mut self,
        _context: &Context,
        _plan: &Self::Plan,
        _data: &Self::Data,
        _results: &mut Results,
        _options: &Options,
    ) -> Result<(), Failure> {
        Ok(())
    }
    /// Compares the results with the reference.
    fn check(&self, data: &Self::Data, results: &Results, progress: &mut Progress) -> Checked;
    /// Title, figures and notes for the report.
    fn describe(&self, plan: &Self::Plan, data: &Self::Data) -> Description;
}

/// One run, the fastest of several.
pub struct Ran {
    pub results: Results,
    /// Time of the kernels: of this host on the simulator, else between events of the device.
    pub seconds: f64,
    /// The kernels in order, with the simulator's figures.
    pub kernels: Vec<(&'static str, Option<KernelStatistics>)>,
    /// Launches that the simulator counted.
    pub counted: Vec<CountedLaunch>,
    /// Times of replays.
    pub times: Option<Times>,
}

/// An operation that ran.
pub struct Done<O: Operation> {
    pub context: Context,
    pub plan: O::Plan,
    pub operation: O,
    pub data: O::Data,
    pub ran: Ran,
    pub verdict: Option<Verdict>,
}

/// Runs an operation and reports on it.
pub fn run<O: Operation>(operation: O, options: &Options) -> Result<Report, Failure> {
    Ok(Report::of(&execute(operation, options)?, options))
}

/// Runs an operation, and checks it if that is asked for.
pub fn execute<O: Operation>(mut operation: O, options: &Options) -> Result<Done<O>, Failure> {
    let backend = match (options.count, options.run.backend) {
        (Some(_), Backend::Hip) => {
            let why = "--count needs the simulator: --backend hip cannot be used";
            return Err(Failure::wrong(why));
        }
        (Some(_), _) => Backend::Simulator,
        (None, backend) => backend,
    };
    if let Some(gpu) = options.count {
        // The plan depends on the GPU.
        simulator::set_gpu(gpu);
    }
    let context = Context::new(backend, options.run.device)
        .map_err(Failure::during("no device can be used"))?;
    configure_simulator(&context, options)?;
    let plan = operation.plan(&context)?;
    let mut progress = Progress::new(2 + if options.check { O::CHECK_STEPS } else { 0 });
    let data = progress.step("inputs", || operation.draw(&plan))?;
    let ran = || measure(&context, &plan, &operation, &data, options);
    let mut ran = progress.step("kernels", ran)?;
    operation.finish(&context, &plan, &data, &mut ran.results, options)?;
    let verdict = match options.check {
        true => Some(operation.check(&data, &ran.results, &mut progress)?),
        false => None,
    };
    Ok(Done {
        context,
        plan,
        operation,
        data,
        ran,
        verdict,
    })
}

/// Limits the threads of this process.
pub fn limit_threads(run: &RunArgs) {
    if let Some(threads) = run.threads {
        // A second pool would be refused, and there is none yet.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global();
    }
}

fn configure_simulator(context: &Context, wanted: &Options) -> Result<(), Failure> {
    if context.backend() != Backend::Simulator {
        return match wanted.mfma {
            Some(_) => Err(Failure::wrong(
                "--mfma chooses the simulator's arithmetic, and this runs on a GPU",
            )),
            None => Ok(()),
        };
    }
    if wanted.run.time.is_some() {
        return Err(Failure::wrong(
            "--time measures a GPU, and this runs on the simulator",
        ));
    }
    let mut options = simulator::options();
    options.mfma = wanted.mfma.unwrap_or(options.mfma);
    options.threads = wanted.run.threads.map(usize::from).or(options.threads);
    if wanted.count.is_some() {
        options.count = true;
        options.record = Record::Some(SAMPLE);
    }
    simulator::set_options(options);
    Ok(())
}

/// The fastest of several runs, then replays.
fn measure<O: Operation>(
    context: &Context,
    plan: &O::Plan,
    operation: &O,
    data: &O::Data,
    options: &Options,
) -> Result<Ran, Failure> {
    let upload = Failure::during("copying the tensors to the device failed");
    let failed = Failure::during(format!("the {} failed", O::NAME));
    let slots = operation.slots(plan, data);
    let mut device = Device::new(context, slots).map_err(&upload)?;
    let stream = context.stream().map_err(&upload)?;
    let mut best = replay::fastest(
        options.run.repeat,
        || run_once(&stream, plan, operation, &mut device).map_err(&failed),
        |a, b| {
            let pairs = a.results.values().zip(b.results.values());
            pairs.into_iter().all(|(a, b)| a.bytes == b.bytes)
        },
        |ran| ran.seconds,
        |run| Failure::Unsteady { run },
    )?;
    if let Some(replays) = options.run.time {
        let launch = |stream: &Stream, part| operation.launch(device.views(), stream, plan, part);
        let times = replay::measure(context, replays, &O::parts(plan), launch);
        best.times = Some(times.map_err(&failed)?);
    }
    Ok(best)
}

/// Uploads and runs an operation once, without any report.
pub fn run_alone<O: Operation>(
    context: &Context,
    plan: &O::Plan,
    operation: &O,
    data: &O::Data,
) -> Fallible<Results> {
    let mut device = Device::new(context, operation.slots(plan, data))?;
    Ok(run_once(&context.stream()?, plan, operation, &mut device)?.results)
}

fn run_once<O: Operation>(
    stream: &Stream,
    plan: &O::Plan,
    operation: &O,
    device: &mut Device,
) -> Fallible<Ran> {
    device.reset(stream)?;
    stream.synchronize()?;
    simulator::reset_statistics();
    simulator::take_counted_launches();
    let start = stream.record()?;
    operation.launch(device.views(), stream, plan, Part::Whole)?;
    let end = stream.record()?;
    end.synchronize()?;
    let simulated = stream.context().backend() == Backend::Simulator;
    let statistics = simulator::statistics();
    let of_kernel = |name| simulated.then(|| statistics.get(name).copied().unwrap_or_default());
    let kernels: Vec<_> = (operation.kernels(plan).into_iter())
        .map(|name| (name, of_kernel(name)))
        .collect();
    let seconds = match simulated {
        true => kernels
            .iter()
            .filter_map(|(_, s)| Some((*s)?.seconds))
            .sum(),
        false => f64::from(end.milliseconds_since(&start)?) / 1e3,
    };
    Ok(Ran {
        results: device.read(stream)?,
        seconds,
        kernels,
        counted: simulator::take_counted_launches(),
        times: None,
    })
}
