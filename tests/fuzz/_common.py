"""What the targets share: bytes that are nearly right, values of JSON and TOML, and the loop."""

import struct
import time

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SETTINGS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def mutations(data: bytes):
    """`data` with some bytes replaced, cut out, doubled, or cut off; header fields with numbers at their ends."""

    @st.composite
    def mutated(draw):
        changed = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(0, len(changed) - 1)))
            kind = draw(st.sampled_from(["byte", "number", "cut", "double", "end", "front"]))
            if kind == "byte" and changed:
                changed[at] = draw(st.integers(0, 255))
            elif kind == "number":
                number = draw(st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
                changed[at : at + 4] = struct.pack("<I", number)
            elif kind == "cut":
                del changed[at : at + draw(st.integers(1, 40))]
            elif kind == "double":
                changed[at:at] = changed[at : at + draw(st.integers(1, 40))]
            elif kind == "end":
                del changed[at:]
            else:
                at = draw(st.integers(0, min(24, len(changed))))
                changed[at : at + 1] = draw(st.binary(max_size=3))
        return bytes(changed)

    return mutated()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def repeated(cases: dict, seconds: float, number: int, batch: int = 200) -> int:
    """Inputs of each case, a function of hypothesis' `data`, in turn for so long, from this seed on. How many."""
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for name, case in cases.items():
            print(f"{name}: seed {number}", flush=True)
            phases = [Phase.generate, Phase.shrink]
            wanted = settings(max_examples=batch, phases=phases, report_multiple_bugs=False, **SETTINGS)
            seed(number)(wanted(given(st.data())(_of(case))))()
            tried += batch
        number += 1
    return tried


def _of(case):
    def one(data):
        case(data)

    return one
