"""Which plans the torch custom ops keep."""

import unittest
from unittest import mock

from deltawave.plan import Plans

from .test_ops import torch


class Kept(unittest.TestCase):
    def setUp(self):
        self.plans = Plans(most=2)

    def get(self, key, capturing=False):
        """The plan of a key, and whether it was made."""
        made = []
        plan = self.plans.get(key, lambda: made.append(object()) or made[0], capturing)
        return plan, bool(made)

    def test_those_of_latest_use(self):
        first, made = self.get("a")
        self.assertTrue(made)
        self.get("b")
        self.assertEqual(self.get("a"), (first, False))
        self.get("c")
        self.assertEqual(self.get("a"), (first, False))
        self.assertTrue(self.get("b")[1])

    def test_those_of_captures(self):
        before, _ = self.get("before")
        self.assertEqual(self.get("before", capturing=True), (before, False))
        inside, _ = self.get("inside", capturing=True)
        for key in "abc":
            self.get(key)
        self.assertEqual(self.get("before"), (before, False))
        self.assertEqual(self.get("inside"), (inside, False))

    def test_none_is_dropped_during_a_capture(self):
        a, _ = self.get("a")
        self.get("b")
        self.plans.most = 1
        for key in "cd":
            self.get(key, capturing=True)
        self.assertEqual(set(self.plans.latest), {"a", "b"})
        self.get("b")
        self.assertEqual(set(self.plans.latest), {"b"})
        self.assertEqual(set(self.plans.captured), {"c", "d"})

    @unittest.skipIf(torch is None, "torch 2.4 or newer is not installed")
    def test_torch_says_what_is_a_capture(self):
        from deltawave import ops

        with mock.patch.object(ops, "_plans", self.plans), mock.patch.object(torch.cuda, "is_initialized", lambda: True):
            for capturing in (True, False):
                with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing):
                    ops._plan(capturing, object)
        self.assertEqual((list(self.plans.captured), list(self.plans.latest)), ([True], [False]))
