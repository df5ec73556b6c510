//! From arguments to a report: plan, draw, launch, check, time.
//!
//! An operation is a [`Request`], which knows the shapes that its arguments ask for, and a [`Workload`], which has the
//! tensors. [`run`] takes it through all steps.

use deltawave::prefill::Part;
use deltawave::runtime::{Backend, Context, Stream};
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::hip::{self as simulator, CountedLaunch, KernelStatistics};
use deltawave_sim::launch::Record;
use deltawave_sim::timing::SAMPLE;

use crate::args::{CountArgs, ModelArgs, RunArgs};
use crate::device::Fallible;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{Description, Report, Verdict};
use crate::time::{self, Times};

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

/// An operation whose shapes are known, and whose tensors do not exist yet.
pub trait Request {
    type Workload: Workload;

    /// The plan: what the library refuses, it refuses here, before anything is drawn.
    fn plan(&self, context: &Context) -> Result<PlanOf<Self>, Failure>;

    /// Draws the tensors.
    fn load(self, plan: &PlanOf<Self>) -> Result<Self::Workload, Failure>;
}

/// The plan of a request.
pub type PlanOf<R> = <<R as Request>::Workload as Launch>::Plan;

/// The launch of an operation whose tensors are on the host.
pub trait Launch {
    /// The library's plan.
    type Plan;
    /// Its tensors on the device.
    type Device;
    /// Its results on the host.
    type Output;

    /// Names of the kernels of a launch, in order.
    fn kernels(plan: &Self::Plan) -> Vec<&'static str>;
    /// Copies the tensors to the device.
    fn upload(&self, context: &Context, plan: &Self::Plan) -> Fallible<Self::Device>;
    /// Brings states to where a run starts, and makes everything else that kernels write NaN.
    fn reset(&self, device: &mut Self::Device, stream: &Stream) -> Fallible<()>;
    /// Enqueues a part; only a prefill has others than the whole.
    fn launch(
        &self,
        device: &mut Self::Device,
        stream: &Stream,
        plan: &Self::Plan,
        part: Part,
    ) -> Fallible<()>;
    /// Copies the results to the host.
    fn read(&self, device: &Self::Device, stream: &Stream) -> Fallible<Self::Output>;
    /// The results whose bits must be the same in all runs.
    fn results(output: &Self::Output) -> Vec<&HostTensor>;
}

/// An operation with its tensors on the host.
pub trait Workload: Launch {
    /// The operation's name in failures: `the NAME failed`.
    const NAME: &'static str;
    /// Figures of a check, which are `null` without one.
    const CHECKED: &'static [&'static str];
    /// Steps of a check that [`Progress`] shows.
    const CHECK_STEPS: usize = 1;

    /// The launches that `--time` measures.
    fn parts(plan: &Self::Plan) -> Vec<(&'static str, Part)>;
    /// Bytes that any implementation moves.
    fn minimal_bytes(&self) -> usize;
    /// Anything else to do with the results before they are checked.
    fn follow_up(
        &self,
        _context: &Context,
        _plan: &Self::Plan,
        _ran: &mut Ran<Self::Output>,
        _options: &Options,
    ) -> Result<(), Failure> {
        Ok(())
    }
    /// Compares the results with the reference.
    fn check(&self, output: &Self::Output, progress: &mut Progress) -> Result<Verdict, Failure>;
    /// Title, figures and notes for the report.
    fn describe(&self, plan: &Self::Plan, output: &Self::Output) -> Description;
}

/// One run, the fastest of several.
pub struct Ran<T> {
    pub output: T,
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
pub struct Done<W: Workload> {
    pub context: Context,
    pub plan: W::Plan,
    pub workload: W,
    pub ran: Ran<W::Output>,
    pub verdict: Option<Verdict>,
}

/// Runs an operation and reports on it.
pub fn run<R: Request>(request: R, options: &Options) -> Result<Report, Failure> {
    Ok(Report::of(&execute(request, options)?, options))
}

/// Runs an operation, and checks it if that is asked for.
pub fn execute<R: Request>(request: R, options: &Options) -> Result<Done<R::Workload>, Failure> {
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
    let plan = request.plan(&context)?;
    let check_steps = <R::Workload as Workload>::CHECK_STEPS;
    let mut progress = Progress::new(2 + if options.check { check_steps } else { 0 });
    let workload = progress.step("inputs", || request.load(&plan))?;
    let mut ran = progress.step("kernels", || measure(&context, &plan, &workload, options))?;
    workload.follow_up(&context, &plan, &mut ran, options)?;
    let verdict = match options.check {
        true => Some(workload.check(&ran.output, &mut progress)?),
        false => None,
    };
    Ok(Done {
        context,
        plan,
        workload,
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
fn measure<W: Workload>(
    context: &Context,
    plan: &W::Plan,
    workload: &W,
    options: &Options,
) -> Result<Ran<W::Output>, Failure> {
    let upload = Failure::during("copying the tensors to the device failed");
    let failed = Failure::during(format!("the {} failed", W::NAME));
    let mut device = workload.upload(context, plan).map_err(&upload)?;
    let stream = context.stream().map_err(&upload)?;
    let mut best = fastest(
        options.run.repeat,
        || run_once(&stream, plan, workload, &mut device).map_err(&failed),
        |a, b| {
            let (a, b) = (W::results(&a.output), W::results(&b.output));
            a.iter().zip(&b).all(|(a, b)| a.bytes == b.bytes)
        },
        |ran| ran.seconds,
    )?;
    if let Some(replays) = options.run.time {
        let launch = |stream: &Stream, part| workload.launch(&mut device, stream, plan, part);
        let times = time::measure(context, replays, &W::parts(plan), launch);
        best.times = Some(times.map_err(&failed)?);
    }
    Ok(best)
}

/// Uploads and runs an operation once, without any report.
pub fn run_alone<W: Workload>(
    context: &Context,
    plan: &W::Plan,
    workload: &W,
) -> Fallible<W::Output> {
    let mut device = workload.upload(context, plan)?;
    Ok(run_once(&context.stream()?, plan, workload, &mut device)?.output)
}

fn run_once<W: Workload>(
    stream: &Stream,
    plan: &W::Plan,
    workload: &W,
    device: &mut W::Device,
) -> Fallible<Ran<W::Output>> {
    workload.reset(device, stream)?;
    stream.synchronize()?;
    simulator::reset_statistics();
    simulator::take_counted_launches();
    let start = stream.record()?;
    workload.launch(device, stream, plan, Part::Whole)?;
    let end = stream.record()?;
    end.synchronize()?;
    let simulated = stream.context().backend() == Backend::Simulator;
    let statistics = simulator::statistics();
    let of_kernel = |name| simulated.then(|| statistics.get(name).copied().unwrap_or_default());
    let kernels: Vec<_> = (W::kernels(plan).into_iter())
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
        output: workload.read(device, stream)?,
        seconds,
        kernels,
        counted: simulator::take_counted_launches(),
        times: None,
    })
}

/// The fastest outcome of `runs` runs, at least one.
fn fastest<T>(
    runs: u32,
    mut run: impl FnMut() -> Result<T, Failure>,
    same_bits: impl Fn(&T, &T) -> bool,
    seconds: impl Fn(&T) -> f64,
) -> Result<T, Failure> {
    let mut best = run()?;
    for n in 2..=runs {
        let outcome = run()?;
        if !same_bits(&best, &outcome) {
            return Err(Failure::Unsteady { run: n });
        }
        if seconds(&outcome) < seconds(&best) {
            best = outcome;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_equal_runs() {
        let of = |times: &[f64], bits: &[u8]| {
            let mut runs = times.iter().copied().zip(bits.iter().copied());
            let next = || Ok(runs.next().expect("no more runs than there are"));
            fastest(times.len() as u32, next, |a, b| a.1 == b.1, |run| run.0)
        };
        assert_eq!(of(&[3.0, 1.0, 2.0], &[7; 3]).unwrap(), (1.0, 7));
        let unsteady = of(&[1.0, 2.0, 3.0], &[7, 7, 8]);
        assert!(matches!(unsteady, Err(Failure::Unsteady { run: 3 })));
    }
}
