//! Ranks that exchange summaries of a shared prefill through RCCL or NCCL.
//!
//! An engine that owns a communicator needs nothing of this: it calls its own all-gather between the stages of
//! [`ParallelPrefill`].

use std::ffi::c_int;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hip_sys::{
    Ccl, CclError, NCCL_IN_PROGRESS, NCCL_UINT8, hipStream_t, ncclComm_t, ncclConfig_t,
    ncclUniqueId,
};

use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::prefill::{
    AGREEMENT_BYTES, BackwardTensors, ParallelPrefill, ParallelPrefillBackward, PrefillTensors,
};
use crate::runtime::{Context, Stream};
use crate::workspace::{Workspace, check_memory};

/// A loaded library of collectives.
#[derive(Clone, Debug)]
pub struct Collectives(Arc<Ccl>);

impl Collectives {
    /// Loads the library at `path`, or the one that [`CCL_VARIABLE`](hip_sys::CCL_VARIABLE) names, or RCCL or NCCL.
    ///
    /// # Errors
    /// No library is found, or it lacks a function.
    pub fn load(context: &Context, path: Option<&Path>) -> Result<Self> {
        Ok(Collectives(Arc::new(Ccl::load(
            path,
            context.hip().is_cuda(),
        )?)))
    }

    /// Name or path of the library.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// An id for a new communicator. One rank makes it and hands its bytes to the others.
    ///
    /// # Errors
    /// The library refuses.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = ncclUniqueId([0; 128]);
        // SAFETY: `id` is valid for the call.
        unsafe { self.0.ncclGetUniqueId(&mut id)? };
        Ok(UniqueId(id.0))
    }
}

/// Bytes by which the ranks of a communicator find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// A rank among ranks, each with a device of its own.
///
/// No call waits longer than `timeout`. If another rank dies or never makes the same call, the communicator is aborted and
/// the call returns [`CclError::Timeout`]; later calls return [`CclError::Aborted`].
#[derive(Debug)]
pub struct Communicator {
    library: Collectives,
    context: Context,
    rank: usize,
    ranks: usize,
    timeout: Duration,
    /// Calls on one communicator come from one thread at a time.
    comm: Mutex<ncclComm_t>,
    aborted: AtomicBool,
}

// SAFETY: the handle may be used from any thread, by one at a time; the mutex sees to that.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the ranks that have the same id. Every rank calls it; it returns once all have.
    ///
    /// # Errors
    /// A rank that is not below `ranks`; the library refuses; not all ranks came in time.
    pub fn new(
        context: &Context,
        library: &Collectives,
        id: UniqueId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Self> {
        check::ensure(rank < ranks && ranks <= c_int::MAX as usize, || {
            let allowed = format!("it must be below the number of ranks, {ranks}");
            ArgumentError::new("rank", ArgumentKind::Value, rank, allowed)
        })?;
        context.make_current()?;
        let mut comm = ncclComm_t(ptr::null_mut());
        let mut config = ncclConfig_t::non_blocking();
        let (id, ranks_of, rank_of) = (ncclUniqueId(id.0), ranks as c_int, rank as c_int);
        // SAFETY: all pointers are valid for the call.
        unsafe {
            (library.0).ncclCommInitRankConfig(&mut comm, ranks_of, id, rank_of, &mut config)?
        };
        let made = Communicator {
            library: library.clone(),
            context: context.clone(),
            rank,
            ranks,
            timeout,
            comm: Mutex::new(comm),
            aborted: AtomicBool::new(false),
        };
        made.settle("ncclCommInitRankConfig", &made.lock(), Instant::now())?;
        Ok(made)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn lock(&self) -> MutexGuard<'_, ncclComm_t> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all work of the communicator, here and for ranks that wait for this one.
    fn abort(&self, comm: ncclComm_t) {
        if !self.aborted.swap(true, Ordering::AcqRel) && !comm.0.is_null() {
            // SAFETY: the handle is valid until here, and nothing uses it afterwards. There is nobody to tell an error.
            let _ = unsafe { self.library.0.ncclCommAbort(comm) };
        }
    }

    /// The state of the communicator's last call; aborts it if that failed, or if the time since `begin` is over.
    fn progress(&self, call: &'static str, comm: ncclComm_t, begin: Instant) -> Result<bool> {
        let mut code = 0;
        // SAFETY: the handle is valid, and `code` is valid for the call.
        let state = unsafe { self.library.0.ncclCommGetAsyncError(comm, &mut code) }
            .and_then(|_| self.library.0.status(call, code));
        match state {
            Ok(NCCL_IN_PROGRESS) => {}
            Ok(_) => return Ok(true),
            Err(error) => {
                self.abort(comm);
                return Err(error.into());
            }
        }
        self.check_time(call, comm, begin)?;
        Ok(false)
    }

    fn check_time(&self, call: &'static str, comm: ncclComm_t, begin: Instant) -> Result<()> {
        if begin.elapsed() < self.timeout {
            return Ok(());
        }
        self.abort(comm);
        let milliseconds = self.timeout.as_millis();
        Err(CclError::Timeout { call, milliseconds }.into())
    }

    /// Waits until the last call is complete on the host.
    fn settle(&self, call: &'static str, comm: &ncclComm_t, begin: Instant) -> Result<()> {
        while !self.progress(call, *comm, begin)? {
            pause(begin);
        }
        Ok(())
    }

    fn usable(&self, call: &'static str) -> Result<MutexGuard<'_, ncclComm_t>> {
        let comm = self.lock();
        match self.aborted.load(Ordering::Acquire) {
            true => Err(CclError::Aborted { call }.into()),
            false => Ok(comm),
        }
    }

    /// Enqueues an all-gather: `send`, of `bytes` bytes on each rank, goes to `receive`, rank by rank, on every rank. All
    /// ranks call it with the same number of bytes. `send` may be this rank's place in `receive`.
    ///
    /// # Errors
    /// Memory that is too small, or that overlaps otherwise; the library refuses; the call did not start in time.
    pub fn all_gather(
        &self,
        stream: &Stream,
        send: &Workspace<'_>,
        receive: &Workspace<'_>,
        bytes: usize,
    ) -> Result<()> {
        let call = "ncclAllGather";
        check::stream(stream, &self.context)?;
        check_memory("send", send, bytes, &self.context)?;
        let all = bytes.saturating_mul(self.ranks);
        check_memory("receive", receive, all, &self.context)?;
        check_places(send, receive, bytes, self.rank, self.ranks)?;
        let comm = self.usable(call)?;
        self.context.make_current()?;
        let begin = Instant::now();
        let (from, to) = (send.address(), receive.address());
        // SAFETY: views of buffers borrow their memory, of which there is enough; callers of `from_raw` vouch.
        let started = unsafe {
            (self.library.0).ncclAllGather(from, to, bytes, NCCL_UINT8, *comm, stream.handle())
        };
        if let Err(error) = started {
            self.abort(*comm);
            return Err(error.into());
        }
        self.settle(call, &comm, begin)
    }

    /// Compares the layouts and specs of all ranks' plans, and waits for the result. All ranks call it together, once per plan,
    /// before the first prefill. Not for a launch path: it allocates.
    ///
    /// # Errors
    /// [`Error::Ranks`](crate::Error::Ranks), on all ranks, which names what differs; a plan of another rank or number of
    /// ranks; as [`Communicator::all_gather`].
    pub fn agree(&self, plan: &ParallelPrefill) -> Result<()> {
        self.check_rank(plan.rank_of())?;
        let mut send = self.context.upload(&plan.agreement())?;
        let mut receive = self.context.alloc::<u8>(self.ranks * AGREEMENT_BYTES)?;
        let stream = self.context.stream()?;
        let memory = [&mut send, &mut receive].map(Workspace::new);
        let [from, to] = &memory;
        self.all_gather(&stream, from, to, AGREEMENT_BYTES)?;
        self.synchronize(&stream)?;
        plan.check_agreement(&receive.download(&stream)?)
    }

    /// `of_plan`: rank and number of ranks of a plan.
    fn check_rank(&self, of_plan: (usize, usize)) -> Result<()> {
        check::ensure(of_plan == (self.rank, self.ranks), || {
            let was = format!("rank {} of {}", of_plan.0, of_plan.1);
            let allowed = format!("the communicator has rank {} of {}", self.rank, self.ranks);
            ArgumentError::new("plan", ArgumentKind::Value, was, allowed)
        })?;
        Ok(())
    }

    /// All steps of a prefill that ranks share: the first stage, the exchange unless there is nothing to exchange, the second
    /// stage. `summary` and `gathered` are scratch memory of [`ParallelPrefill::summary_bytes`] and
    /// [`ParallelPrefill::gathered_bytes`].
    ///
    /// # Errors
    /// A plan of another rank or number of ranks; as the stages and [`Communicator::all_gather`].
    pub fn prefill(
        &self,
        plan: &ParallelPrefill,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        [summary, gathered]: [Workspace<'_>; 2],
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.check_rank(plan.rank_of())?;
        let bytes = plan.summary_bytes();
        check_memory("summary", &summary, bytes, &self.context)?;
        check_memory("gathered", &gathered, plan.gathered_bytes(), &self.context)?;
        check_places(&summary, &gathered, bytes, self.rank, self.ranks)?;
        plan.summarise_launch(stream, tensors, summary.again(), workspace.again())?;
        if bytes > 0 {
            self.all_gather(stream, &summary, &gathered, bytes)?;
        }
        plan.finish_launch(stream, tensors, gathered, None, workspace)
    }

    /// All steps of the backward of a prefill that ranks share, as [`Communicator::prefill`]. `summary` and `gathered` are
    /// scratch memory of [`ParallelPrefillBackward::summary_bytes`] and [`ParallelPrefillBackward::gathered_bytes`].
    ///
    /// # Errors
    /// As [`Communicator::prefill`].
    pub fn prefill_backward(
        &self,
        plan: &ParallelPrefillBackward,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        [summary, gathered]: [Workspace<'_>; 2],
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.check_rank(plan.rank_of())?;
        let bytes = plan.summary_bytes();
        check_memory("summary", &summary, bytes, &self.context)?;
        check_memory("gathered", &gathered, plan.gathered_bytes(), &self.context)?;
        check_places(&summary, &gathered, bytes, self.rank, self.ranks)?;
        plan.summarise_launch(stream, tensors, summary.again(), workspace.again())?;
        if bytes > 0 {
            self.all_gather(stream, &summary, &gathered, bytes)?;
        }
        plan.finish_launch(stream, tensors, gathered, workspace)
    }

    /// Waits until all work of a stream is done, at most `timeout`.
    ///
    /// # Errors
    /// Work that failed; work that another rank keeps waiting.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        check::stream(stream, &self.context)?;
        self.context.make_current()?;
        let comm = self.usable("hipStreamQuery")?;
        let begin = Instant::now();
        loop {
            // SAFETY: the stream is one of the context's.
            match unsafe {
                self.context
                    .hip()
                    .hipStreamQuery(hipStream_t(stream.handle()))
            } {
                Ok(()) => return Ok(()),
                Err(error) if error.is_not_ready() => {}
                Err(error) => return Err(error.into()),
            }
            self.progress("ncclAllGather", *comm, begin)?;
            self.check_time("hipStreamQuery", *comm, begin)?;
            pause(begin);
        }
    }
}

/// Checks that memory to be sent lies apart from what is received, or at this rank's place in it.
fn check_places(
    send: &Workspace<'_>,
    receive: &Workspace<'_>,
    bytes: usize,
    rank: usize,
    ranks: usize,
) -> Checked<()> {
    let (from, to) = (send.address().addr(), receive.address().addr());
    let all = bytes.saturating_mul(ranks);
    let apart = from.saturating_add(bytes) <= to || to.saturating_add(all) <= from;
    check::ensure(
        apart || from == to.saturating_add(rank.saturating_mul(bytes)),
        || {
            let was =
                format!("address {from:#x} in the {ranks} times {bytes} bytes that are received");
            let allowed = format!("memory of its own, or place {rank} in them");
            ArgumentError::new("send", ArgumentKind::Overlap, was, allowed)
        },
    )
}

/// Polls often at first, then rarely.
fn pause(begin: Instant) {
    match begin.elapsed() < Duration::from_millis(1) {
        true => thread::yield_now(),
        false => thread::sleep(Duration::from_micros(100)),
    }
}

impl Drop for Communicator {
    /// Lets issued work end, at most `timeout`, then frees the communicator.
    fn drop(&mut self) {
        let comm = *self.lock();
        if self.aborted.load(Ordering::Acquire) || comm.0.is_null() {
            return;
        }
        // SAFETY: the handle is valid.
        let begun = unsafe { self.library.0.ncclCommFinalize(comm) };
        let settled = begun.is_ok() && {
            self.settle("ncclCommFinalize", &comm, Instant::now())
                .is_ok()
        };
        if settled {
            self.aborted.store(true, Ordering::Release);
            // SAFETY: the handle is valid, and nothing uses it afterwards.
            let _ = unsafe { self.library.0.ncclCommDestroy(comm) };
        } else {
            self.abort(comm);
        }
    }
}
