"""Speculative decoding on the simulator: steps of drafts against steps of the accepted tokens, bit for bit."""

import unittest

import deltawave as dw

from .common import Numbers, needs_numpy, np, poisoned, simulator
from .test_pool import i32
from .test_prefill import HK, HV, K, V

CHANNELS, WIDTH, BATCH, TOKENS, NULL = 2 * HK * K + HV * V, 4, 3, 3, 0
HEADS = {"q": (HK, K), "k": (HK, K), "v": (HV, V)}
# A slot of the pools for each draft; the last sequence is padding.
TABLE = np.array([[4, 1, 7], [2, 6, 3], [NULL, -1, NULL]])


def rows_of(count, seed):
    """Rows x, g and beta, as numbers."""
    numbers = Numbers(seed)
    return {"x": numbers.uniform(-1, 1, (count, CHANNELS), "bf16")[1], "g": numbers.uniform(-.2, 0, (count, HV), "f32")[1],
            "beta": numbers.uniform(0, 1, (count, HV), "f32")[1]}


def pools(columns):
    """A pool of states, and a pool of conv states, token-major."""
    return (Numbers(3).uniform(-1, 1, (8, HV, K, V), "f32")[0],
            Numbers(4).uniform(-1, 1, (8, columns, CHANNELS), "bf16")[0])


def step(rows, offsets, pool, conv_state, conv, decode, **drafts):
    """Convolves and decodes rows of these lengths, which are on the device. Returns o."""
    count, context = len(rows["x"]), simulator()
    weight = Numbers(5).uniform(-1, 1, (CHANNELS, WIDTH), "bf16")[0]
    out = {name: poisoned((count, *shape), "bf16") for name, shape in HEADS.items()}
    plan = dw.Conv.device(context, dw.ConvSpec(HK, HV, K, V, WIDTH), count, len(offsets) - 1)
    plan.launch(x=context.array(rows["x"], "bf16"), weight=weight, state=conv_state, state_layout="token_major",
                cu_seqlens=i32(offsets), **out, **conv, **drafts)
    o = poisoned((count, HV, V), "bf16")
    tokens = TOKENS if drafts else count
    spec = dw.DecodeSpec(HK, HV, K, V, tokens=tokens, qk_l2norm=True)
    gates = {name: context.array(rows[name], "f32") for name in ("g", "beta")}
    dw.Decode(context, spec, len(offsets) - 1).launch(**out, **gates, o=o, pool=pool, **decode, **drafts)
    return o


@needs_numpy
class Drafts(unittest.TestCase):
    def test_accepted_drafts_are_steps(self):
        pool, conv_state = pools(WIDTH - 2 + TOKENS)
        stepped, stepped_conv = simulator().array(pool), simulator().array(conv_state[:, :WIDTH - 1])
        nobody = pool[[NULL, 5]].tobytes(), conv_state[[NULL, 5]].tobytes()
        table, last = i32(TABLE), np.array([1, 1, 1])
        for number, (counts, accepted) in enumerate([((3, 1, 2), (2, 1)), ((1, 3, 0), (1, 3)), ((2, 3, 1), (2, 2))]):
            offsets = np.concatenate([[0], np.cumsum(counts)])
            rows = rows_of(offsets[-1], number)
            o = step(rows, offsets, pool, conv_state, {"slots": table},
                     {"draft_slots": table, "read_slots": table, "cu_seqlens": i32(offsets)}, accepted=i32(last),
                     null_slot=NULL)
            self.assertTrue((dw.to_float(o[offsets[2]:]) == 0).all(), "padding")
            for n, taken in enumerate(accepted):
                own = TABLE[n, 0]
                for t in range(offsets[n], offsets[n] + taken):
                    one = {name: x[t:t + 1] for name, x in rows.items()}
                    slots = {"slots": i32([own])}
                    found = step(one, [0, 1], stepped, stepped_conv, slots, slots)
                    self.assertEqual(found.tobytes(), o[t:t + 1].tobytes())
                last[n] = taken
        for n in range(2):
            own, column = TABLE[n, 0], last[n] - 1
            self.assertEqual(pool[TABLE[n, column]].tobytes(), stepped[own].tobytes())
            self.assertEqual(conv_state[own, column:column + WIDTH - 1].tobytes(), stepped_conv[own].tobytes())
        self.assertEqual((pool[[NULL, 5]].tobytes(), conv_state[[NULL, 5]].tobytes()), nobody)

    def test_what_is_refused(self):
        pool, conv_state = pools(WIDTH - 2 + TOKENS)
        rows, offsets, table = rows_of(3, 1), [0, 1, 2, 3], i32(TABLE)

        def refused(start, conv=(), decode=(), drafts=()):
            with self.assertRaises(dw.ArgumentError) as caught:
                step(rows, offsets, pool, conv_state, {"slots": table, **dict(conv)},
                     {"draft_slots": table, "read_slots": table, "cu_seqlens": i32(offsets), **dict(decode)},
                     **{"accepted": i32([1, 1, 1]), "null_slot": NULL, **dict(drafts)})
            self.assertTrue(str(caught.exception).startswith(start), caught.exception)

        refused("draft_slots", decode={"draft_slots": i32([[1, 2], [3, 4], [5, 6]])})
        refused("draft_slots", decode={"draft_slots": i32([1, 2, 3])})
        refused("read_slots", decode={"read_slots": i32([[1], [2]])})
        refused("read_slots", decode={"read_slots": None})
        refused("write_slots", decode={"write_slots": i32([1, 2, 3])})
        refused("slots", decode={"slots": i32([1, 2, 3])})
        refused("read_columns", decode={"read_columns": 3})
        refused("slot_columns", conv={"slot_columns": 3})
        refused("slots", conv={"slots": i32([[1, 2], [3, 4]])})
        refused("accepted", drafts={"accepted": i32([1, 1])})
        refused("null_slot", drafts={"null_slot": 1 << 40})
