"""deltawave beside FlashInfer, FlashQLA and FLA on one NVIDIA GPU: `make bench-peers`.

    python3 benches/peers [--out FOLDER] [--resume] [--budget SECONDS] [--peers NAME,...] [--only TEXT] [--wheels FOLDER]
    python3 benches/peers --unpack [--wheels FOLDER]     packages that come in pieces; a machine keeps them
    python3 benches/peers --report FOLDER                tables and chart again, from results.jsonl

First the peers compile in parallel, what can. Then one worker process measures row by row, all contestants in turns; if
one of them brings it down or hangs, the worker is started again without that one in that row. Peers that are missing
are named and left out. FOLDER gets results.jsonl, peers.md and peers.svg; a summary is printed last.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import report
from cases import Case, all_cases, matches
from contestants import CONTESTANTS, ROOT
from gradients import Backward, all_gradients
from measure import available, warm_up, work
from steps import all_steps

PATIENCE = 150  # seconds without a sign of life from the worker
SHARE = 0.5  # of the budget that compiling may take
RESTARTS = 8


def arguments():
    parser = argparse.ArgumentParser(prog="python3 benches/peers", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "target/peers", help="where results go")
    parser.add_argument("--budget", type=float, default=460, help="seconds in all")
    parser.add_argument("--peers", default=",".join(CONTESTANTS), help="who takes part")
    parser.add_argument("--only", default="",
                        help="rows whose names contain this text; TEXT+TEXT: both, TEXT,TEXT: either")
    parser.add_argument("--resume", action="store_true", help="measure the rows that FOLDER does not have yet")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl",
                        help="where the pieces of `make peers-wheels` are, if any")
    parser.add_argument("--unpack", action="store_true", help="only unpack these, for calls to come")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write tables and chart")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def unpack(folder):
    """Packages that were carried here come first on the path of this process and its children. The machine keeps them
    from call to call, so that a piece has to be carried once."""
    cache = Path(os.environ.setdefault("DELTAWAVE_PEERS_CACHE", str(Path(tempfile.gettempdir()) / "deltawave-peers")))
    site = cache / "site"
    for archive in sorted(folder.glob("*.tar.xz")):
        done = cache / f"{archive.name}-{archive.stat().st_size}"
        if done.exists():
            continue
        print(f"unpacking {archive.name}", flush=True)
        site.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as packed:
            packed.extractall(site, filter="data")
        done.touch()
    # Caches of compiled kernels lie beside them.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TILELANG_CACHE_DIR", str(cache / "tilelang"))
    os.environ.setdefault("CUDA_CACHE_PATH", str(cache / "cuda"))
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(1 << 30))
    if site.exists():
        # The second is named by a .pth file, which only folders of installed packages have read.
        found = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")]
        sys.path[:0] = found
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH")]))


def start(option, what, log):
    """This program again, as a process group of its own."""
    command = [sys.executable, str(Path(__file__).parent), option, json.dumps(what)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process):
    """Ends a process that was started here, and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def warm_all(names, cases, until, log):
    """Fills the peers' caches of compiled kernels, in parallel. A failure here shows again when it matters."""
    # Gradients first: more of their kernels have to be compiled.
    jobs = [(name, case) for kind in (Backward, Case) for name in names
            if getattr(CONTESTANTS[name], kind.operation, None)
            for case in CONTESTANTS[name].warm_up_jobs([case for case in cases if type(case) is kind])]
    begun, running, total = time.time(), [], len(jobs)
    while (jobs or running) and time.time() < until:
        while jobs and len(running) < (os.cpu_count() or 1):
            name, case = jobs.pop(0)
            running.append((name, start("--warm-up", {"name": name, "operation": case.operation, "case": vars(case)}, log)))
        time.sleep(0.2)
        for name, process in [r for r in running if r[1].poll() is not None]:
            running.remove((name, process))
            if process.returncode:
                print(f"warming up {name} failed, see the log", flush=True)
    for name, process in running:
        stop(process)
    late = f", {len(jobs) + len(running)} not in time" if jobs or running else ""
    print(f"compiled for {total} kinds of rows in {time.time() - begun:.0f} s{late}", flush=True)


def supervise(names, only, out, deadline, log_path):
    """Runs workers until one has measured all that it could."""
    bad, in_flight = [], out / "in_flight"
    for _ in range(RESTARTS):
        in_flight.write_text("start||")
        with log_path.open("a") as log:
            seen = log.seek(0, os.SEEK_END)
            process = start("--work", {"names": names, "only": only, "out": str(out), "deadline": deadline, "bad": bad},
                            log)
            while process.poll() is None:
                time.sleep(0.5)
                if time.time() - in_flight.stat().st_mtime > PATIENCE or time.time() > deadline + 60:
                    stop(process)
        where = in_flight.read_text().split("|")
        if where[0] == "done" and process.returncode == 0:
            return
        print(f"the worker ended with {process.returncode} at {' '.join(where).strip()}", flush=True)
        print("".join(log_path.read_text(errors="replace")[seen:].splitlines(keepends=True)[-8:]), flush=True)
        case, name = where[:2]
        if time.time() > deadline or not name:
            return
        bad.append(("*" if case == "start" else case, name))
        if name in CONTESTANTS and sum(other == name for _, other in bad) == 3:
            bad.append(("*", name))


def main():
    args = arguments()
    if args.report:
        print(report.write(args.report))
        return
    cases = all_cases() + all_gradients() + all_steps()
    if args.warm_up:
        job = args.warm_up
        kind = {kind.operation: kind for kind in (Case, Backward)}[job["operation"]]
        return warm_up(job["name"], kind(**{**job["case"], "lengths": tuple(job["case"]["lengths"])}))
    if args.work:
        job = args.work
        cases = [case for case in cases if matches(case.name, job["only"])]
        return work(cases, job["names"], Path(job["out"]), job["deadline"], {tuple(pair) for pair in job["bad"]})

    begun = time.time()
    unpack(args.wheels)
    if args.unpack:
        return
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results, log_path = out / "results.jsonl", out / "log"
    if not args.resume or not results.exists():
        results.write_text("")
    log_path.write_text("")
    cases = [case for case in cases if matches(case.name, args.only)]
    names, cannot = available([name for name in CONTESTANTS if name in args.peers.split(",")])
    with results.open("a") as file:
        for name, reason in cannot.items():
            print(f"{CONTESTANTS[name].label} is left out: {reason}", flush=True)
            file.write(json.dumps({"kind": "missing", "what": CONTESTANTS[name].label, "reason": reason}) + "\n")
    with log_path.open("a") as log:
        warm_all(names, cases, begun + SHARE * args.budget, log)
    supervise(names, args.only, out, begun + args.budget, log_path)
    (out / "in_flight").unlink(missing_ok=True)
    report.write(out)
    print(f"\n{report.short(out)}\n{time.time() - begun:.0f} s in all, results in {out}")
    if '"kind": "row"' not in results.read_text():
        sys.exit("no row was measured")


if __name__ == "__main__":
    main()
