"""What contexts leave behind, whose a fault is, and what threads may share, on the simulator."""

import ctypes
import gc
import os
import threading
import unittest

import deltawave as dw

from .common import needs_numpy, np, simulator
from .test_prefill import HK, HV, K, OFFSETS, TOKENS, V, inputs, poisoned, spec


def resident():
    """Bytes of the process that are in memory, without those that glibc keeps for later allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def life():
    """A context and what it makes; the plans outlive it."""
    context = dw.Context("simulator")
    plans = [dw.Prefill.packed(context, spec(), OFFSETS, TOKENS),
             dw.Layer.packed(context, dw.LayerSpec(HK, HV, K, V), [0, 1, 9], 9, 1)]
    memory = dw.Memory(context, 1 << 16)
    del context
    return plans, memory


class Lifetimes(unittest.TestCase):
    @unittest.skipUnless(os.path.exists("/proc/self/statm"), "the system does not say how much memory a process has")
    def test_contexts_leave_nothing_behind(self):
        for _ in range(20):
            life()
        gc.collect()
        before = resident()
        for _ in range(250):
            life()
        gc.collect()
        self.assertLess(resident() - before, 1 << 20)

    def test_a_fault_is_one_contexts(self):
        lost = dw.Context("simulator")
        y, nowhere = (dw.Memory(lost, 4096), dw.array(4096, "bf16", [1, 1, 16]))
        rows = dw.array(y.address, "bf16", [1, 1, 16])

        def broken():
            dw.norm(lost, z=nowhere, y=rows)
            lost.synchronize()

        with self.assertRaises(dw.Error):
            broken()
        new = dw.Context("simulator")
        fresh = dw.Memory(new, 8192)
        dw.norm(new, z=dw.array(fresh.address + 4096, "bf16", [1, 1, 16]), y=dw.array(fresh.address, "bf16", [1, 1, 16]))
        new.synchronize()
        with self.assertRaises(dw.Error):
            lost.synchronize()
        new.synchronize()


@needs_numpy
class Threads(unittest.TestCase):
    def launches(self, plan, seed, rounds, stream=None):
        """What a thread does: the same launch again and again. Returns whether all gave the same."""
        x, _ = inputs("bf16", seed)
        o = poisoned((TOKENS, HV, V), "bf16")
        alone = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        alone.launch(**x, o=o)
        wanted = o.tobytes()

        def run():
            for _ in range(rounds):
                plan.launch(stream, **x, o=o)
                self.same.append(o.tobytes() == wanted)

        return threading.Thread(target=run)

    def test_a_plan_and_its_workspace_on_one_stream(self):
        self.same = []
        plan = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        threads = [self.launches(plan, seed, 100) for seed in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.same, [True] * 300)

    def test_a_stream_has_a_workspace_of_its_own(self):
        plan = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        default, other, same = plan._workspace(None), plan._workspace(0xDEAD0), plan._workspace(0)
        self.assertIs(default, same)
        self.assertNotEqual(default.address, other.address)
        # The stream of each thread has one address, and is several streams.
        found = [plan._workspace(2)]
        thread = threading.Thread(target=lambda: found.append(plan._workspace(2)))
        thread.start()
        thread.join()
        self.assertNotEqual(found[0].address, found[1].address)
        self.assertIs(plan._workspace(2), found[0])
